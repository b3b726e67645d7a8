# Serving on an NVIDIA GPU, on Triton's own container of 25.07 or later (Triton 2.59.1, Python 3.12). From a clone:
#
#     docker build --file deploy/gpu.Dockerfile --build-arg BASE=nvcr.io/nvidia/tritonserver:YY.MM-py3 --tag dspark-trt:gpu .
#     docker run --gpus 1 --read-only --tmpfs /tmp --shm-size 1g --cap-drop ALL --security-opt no-new-privileges \
#       --volume "$PWD/build/qwen3-8b:/build:ro" --publish 127.0.0.1:9000:9000 dspark-trt:gpu
#
# Engines are built by the same image, on the same kind of GPU: `docker run --gpus 1 ... dspark-trt:gpu build --output ...`.
# Everything has its sha256 in locks/, but for TensorRT: its packages on PyPI fetch the libraries from NVIDIA's own index.
ARG BASE

# hadolint ignore=DL3006
FROM ${BASE}
WORKDIR /source
COPY locks locks
ARG TENSORRT=11.4.0.106
RUN python3 -m venv --without-pip /opt/dspark && \
    python3 -m pip --python /opt/dspark/bin/python install --no-cache-dir --require-hashes --no-deps --only-binary=:all: \
      --requirement locks/serve.txt --requirement locks/torch.txt --requirement locks/cuda.txt \
      --requirement locks/kernels.txt && \
    /opt/dspark/bin/python -m pip install --no-cache-dir "tensorrt==${TENSORRT}"
COPY pyproject.toml setup.py README.md LICENSE NOTICE ./
COPY dspark_trt dspark_trt
COPY plugins plugins
COPY triton_model_repo triton_model_repo
RUN /opt/dspark/bin/python -m pip install --no-cache-dir --no-deps --no-build-isolation . && rm -r /source/*

ENV XDG_CACHE_HOME=/tmp/cache PYTHONDONTWRITEBYTECODE=1
USER 1000:1000
WORKDIR /tmp
EXPOSE 9000 8001
HEALTHCHECK --start-period=10m CMD ["/opt/dspark/bin/python", "-c", \
  "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9000/health', timeout=10)"]
ENTRYPOINT ["/opt/dspark/bin/dspark-trt"]
CMD ["serve", "/build", "--address", "0.0.0.0", "--openai-port", "9000"]

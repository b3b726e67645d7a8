# Serving on a CPU: this package and the tritonserver that `serve` unpacks, by sha256 and before it runs. From a clone:
#
#     docker build --file deploy/cpu.Dockerfile --tag dspark-trt:cpu .
#     docker run --read-only --tmpfs /tmp --shm-size 1g --cap-drop ALL --security-opt no-new-privileges \
#       --volume "$PWD/build/smollm2:/build:ro" --publish 127.0.0.1:9000:9000 dspark-trt:cpu
#
# BASE: any Debian or Ubuntu whose `python3` is 3.11 or 3.12 and has pip and libpython; name it by its digest where you build.
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
WORKDIR /source
COPY locks/serve.txt locks/
RUN python3 -m venv --without-pip /opt/dspark && \
    python3 -m pip --python /opt/dspark/bin/python install --no-cache-dir --require-hashes --no-deps \
      --only-binary=:all: --requirement locks/serve.txt
COPY pyproject.toml setup.py README.md LICENSE NOTICE ./
COPY dspark_trt dspark_trt
COPY plugins plugins
COPY triton_model_repo triton_model_repo
RUN /opt/dspark/bin/python -m pip install --no-cache-dir --no-deps --no-build-isolation .
# tritonserver is unpacked and checked now: a container has no way out to fetch it, and no folder to write it to.
ENV XDG_CACHE_HOME=/opt/dspark/cache
RUN /opt/dspark/bin/python -c "from dspark_trt.server.server_tree import find_server; find_server()"

FROM ${BASE}
COPY --from=build /opt/dspark /opt/dspark
ENV XDG_CACHE_HOME=/opt/dspark/cache PYTHONDONTWRITEBYTECODE=1
USER 1000:1000
WORKDIR /tmp
EXPOSE 9000
HEALTHCHECK --start-period=10m CMD ["/opt/dspark/bin/python", "-c", \
  "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9000/health', timeout=10)"]
ENTRYPOINT ["/opt/dspark/bin/dspark-trt"]
CMD ["serve", "/build", "--address", "0.0.0.0", "--openai-port", "9000"]

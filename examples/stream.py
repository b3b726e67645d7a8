"""Stream one chat answer from a running server over gRPC.

dspark-trt serve build/smollm2 &
python examples/stream.py 127.0.0.1:8001 "Why is the sky blue?"
"""

from __future__ import annotations

import queue
import sys

import numpy as np
from tritonclient import grpc
from tritonclient.utils import np_to_triton_dtype


def tensor(name: str, values: np.ndarray) -> grpc.InferInput:
    made = grpc.InferInput(name, values.shape, np_to_triton_dtype(values.dtype))
    made.set_data_from_numpy(values)
    return made


def main(address: str, question: str) -> None:
    inputs = [
        tensor("text_input", np.array([[question]], dtype=object)),
        tensor("max_tokens", np.array([[64]], dtype=np.int32)),
        tensor("chat", np.array([[True]])),
        tensor("stream", np.array([[True]])),
    ]
    responses: queue.Queue[tuple[grpc.InferResult | None, Exception | None]] = queue.Queue()
    client = grpc.InferenceServerClient(address)
    client.start_stream(callback=lambda result, error: responses.put((result, error)))
    client.async_stream_infer("ensemble", inputs, enable_empty_final_response=True)
    while True:
        result, error = responses.get(timeout=120)
        if error is not None:
            raise SystemExit(f"error: {error}")
        assert result is not None, "a response is a result or an error"
        response = result.get_response()
        if response.outputs:
            print(result.as_numpy("text_output")[0].decode(), end="", flush=True)
        if response.parameters["triton_final_response"].bool_param:
            break
    print()
    client.stop_stream()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])

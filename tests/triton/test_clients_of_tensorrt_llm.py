"""The call patterns of TensorRT-LLM's own Triton clients, unmodified in names, types, shapes and ways to read."""

from __future__ import annotations

import numpy as np
import pytest
import tritonclient.grpc as grpc

from dspark_trt.server.supervisor import TritonServer
from tests.support.triton_clients import one, stream, text_of
from tests.triton.conftest import InProcess

pytestmark = [pytest.mark.triton, pytest.mark.demo]

PROMPT = "The three primary colours are"
NUM_TOKENS = 16
EOS = 2


@pytest.mark.parametrize("streaming", [True, False])
def test_end_to_end_client(server: TritonServer, in_process: InProcess, streaming: bool) -> None:
    expected = in_process.answer(PROMPT, NUM_TOKENS).text
    with stream(server.grpc_address) as opened:
        opened.send(
            "ensemble",
            {
                "text_input": one(PROMPT, object),
                "max_tokens": one(NUM_TOKENS, np.int32),
                "stream": one(streaming, bool),
                "beam_width": one(1, np.int32),
                "temperature": one(0.0, np.float32),
                "num_return_sequences": one(1, np.int32),
                "stop_words": one("</s>", object),
                "bad_words": one("", object),
                "repetition_penalty": one(1.0, np.float32),
                "presence_penalty": one(0.0, np.float32),
                "frequency_penalty": one(0.0, np.float32),
                "length_penalty": one(1.0, np.float32),
                "end_id": one(EOS, np.int32),
                "pad_id": one(EOS, np.int32),
                "exclude_input_in_output": one(False, bool),
            },
            outputs=[grpc.InferRequestedOutput("text_output")],
            request_id="1",
        )
        results = opened.read_all()
    assert "".join(map(text_of, results)) == (expected if streaming else PROMPT + expected)
    assert len(results) > 1 if streaming else len(results) == 1


def test_core_model_client(server: TritonServer) -> None:
    with stream(server.grpc_address) as opened:
        for index in range(10):
            opened.send(
                "dspark",
                {
                    "input_ids": np.array([[504, 1123 + index, 28]], np.int32),
                    "input_lengths": one(3, np.int32),
                    "request_output_len": one(NUM_TOKENS, np.int32),
                    "pad_id": one(0, np.int32),
                    "end_id": one(-1, np.int32),
                },
                request_id=str(index),
            )
        results = [opened.next() for _ in range(10)]
    assert {result.get_response().id for result in results} == {str(index) for index in range(10)}
    for result in results:
        assert result.as_numpy("output_ids").shape == (1, 1, NUM_TOKENS)
        assert result.as_numpy("sequence_length").tolist() == [[NUM_TOKENS]]
        assert result.as_numpy("output_ids").min() >= 0


def test_packed_stop_words_of_the_core_model_client(server: TritonServer, in_process: InProcess) -> None:
    answer = in_process.answer(PROMPT, NUM_TOKENS)
    from_prompt = {"text_input": one(PROMPT.encode(), object), "max_tokens": one(NUM_TOKENS, np.int32)}
    stop_ids = answer.token_ids[5:7]
    with stream(server.grpc_address) as opened:
        opened.send("preprocessing", {"QUERY": from_prompt["text_input"]})
        (tokenised,) = opened.read_all()
        opened.send(
            "dspark",
            {
                "input_ids": tokenised.as_numpy("INPUT_ID"),
                "input_lengths": tokenised.as_numpy("REQUEST_INPUT_LEN"),
                "request_output_len": from_prompt["max_tokens"],
                "temperature": one(0.0, np.float32),
                "stop_words_list": np.array([[stop_ids, [2, -1]]], np.int32),
            },
        )
        (result,) = opened.read_all()
    assert result.as_numpy("finish_reason").item() == b"stop"
    assert result.as_numpy("output_ids").ravel().tolist() == answer.token_ids[:7]

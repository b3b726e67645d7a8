"""The ensemble's first step: prompts and chats to ids, and every refusal names the client's own field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, processors

from dspark_trt.checkpoints.tokenizer import write_tokenizer
from dspark_trt.errors import RequestError
from dspark_trt.packaging.signature import PACKED_OUTPUTS, PUBLIC_OUTPUTS
from dspark_trt.serving.fields import Fields, pack_sequences
from dspark_trt.serving.postprocess import handle_of, is_ping, pack, ping, postprocess
from dspark_trt.serving.preprocess import preprocess
from dspark_trt.text import TextCodec
from tests.support.factories import write_target

MESSAGES = [{"role": "user", "content": "It's 12345"}, {"role": "assistant", "content": "Yes"}]


def strings(*values: str | bytes) -> np.ndarray:
    encoded = [value if isinstance(value, bytes) else value.encode() for value in values]
    return np.array([encoded], dtype=np.object_)


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_target(folder / "target", vocab_size=320, tokenizer=True)
    write_tokenizer(str(folder / "target"), folder / "tokenizer")
    return TextCodec.load(folder / "tokenizer")


def prompt_ids(codec: TextCodec, **tensors: Any) -> list[int]:
    outputs = preprocess({"QUERY": strings(""), **tensors}, (), codec, max_seq_len=64)
    (ids,) = outputs["INPUT_ID"].tolist()
    assert outputs["INPUT_ID"].dtype == outputs["REQUEST_INPUT_LEN"].dtype == np.int32
    assert outputs["REQUEST_INPUT_LEN"].tolist() == [[len(ids)]]
    return ids


def test_text_is_tokenised_as_it_is(codec: TextCodec) -> None:
    text = "the quick <|im_start|> brown 東京 🦊"
    assert prompt_ids(codec, QUERY=strings(text)) == codec.encode(text)


def test_chat_makes_text_one_user_turn(codec: TextCodec) -> None:
    expected = codec.encode_chat([{"role": "user", "content": "the dog"}])
    assert prompt_ids(codec, QUERY=strings("the dog"), CHAT=np.array([[True]])) == expected
    assert prompt_ids(codec, QUERY=strings("the dog"), CHAT=np.array([[False]])) == codec.encode("the dog")


def test_messages_and_template_arguments_reach_the_template(codec: TextCodec) -> None:
    ids = prompt_ids(
        codec,
        MESSAGES=strings(json.dumps(MESSAGES)),
        CHAT_TEMPLATE_KWARGS=strings('{"enable_thinking": false}'),
    )
    assert ids == codec.encode_chat(MESSAGES, enable_thinking=False) != codec.encode_chat(MESSAGES)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, r"text_input: the prompt is empty"),
        ({"CHAT": np.array([[True]])}, r"text_input: the prompt is empty"),
        ({"QUERY": strings(b"\xff\xfe")}, r"text_input: not valid UTF-8"),
        ({"QUERY": strings("a", "b")}, r"text_input: expected one value .* found \(1, 2\)"),
        ({"MESSAGES": strings("[{]")}, r"messages: not valid JSON"),
        ({"MESSAGES": strings("[" * 1000)}, r"messages: not valid JSON"),
        ({"MESSAGES": strings("[" * 100_000)}, r"messages: the prompt has 100000 bytes, at most 1024 are read"),
        ({"QUERY": strings("a" * 1025)}, r"text_input: the prompt has 1025 bytes, at most 1024 are read"),
        ({"QUERY": strings("a"), "BAD_WORDS_DICT": strings(*["a"] * 257)}, r"bad_words: expected at most 256 words"),
        ({"QUERY": strings("a"), "BAD_WORDS_DICT": strings("a" * 257)}, r"bad_words: expected at most 256 characters"),
        ({"MESSAGES": strings('{"role": "user"}')}, r"messages: expected a JSON list"),
        ({"MESSAGES": strings("[]")}, r"messages: expected a non-empty list"),
        ({"MESSAGES": strings('["hello"]')}, r"messages: expected a non-empty list of objects"),
        ({"QUERY": strings("a"), "MESSAGES": strings(json.dumps(MESSAGES))}, r"text_input, messages: .* found both"),
        (
            {"QUERY": strings("a"), "CHAT_TEMPLATE_KWARGS": strings('{"a": 1}')},
            r"chat_template_kwargs: expected with chat",
        ),
        (
            {"QUERY": strings("a"), "CHAT_TEMPLATE_KWARGS": strings("[1]")},
            r"chat_template_kwargs: expected a JSON object",
        ),
        ({"QUERY": strings("a"), "EMBEDDING_BIAS_WORDS": strings("b")}, r"embedding_bias_words.*: not supported"),
        ({"QUERY": strings("a"), "EMBEDDING_BIAS_WEIGHTS": np.ones((1, 1))}, r"embedding_bias_weights: not supported"),
    ],
)
def test_refusals_name_the_field_that_the_client_sent(codec: TextCodec, tensors: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        prompt_ids(codec, **tensors)


def test_misspelt_field_is_refused_by_name_and_tritons_own_parameters_pass(codec: TextCodec) -> None:
    tensors = {"QUERY": strings("a")}
    with pytest.raises(
        RequestError, match=r"unknown fields max_token, temprature; known fields: text_input, .*temperature"
    ):
        preprocess(tensors, {"temprature": 0.5, "max_token": 3}, codec, max_seq_len=64)
    with pytest.raises(RequestError, match=r"unknown field max_token;"):
        preprocess(tensors, {"max_token": 3}, codec, max_seq_len=64)
    preprocess(tensors, {"triton_enable_empty_final_response": False}, codec, max_seq_len=64)


def test_bad_words_become_token_sequences_and_empty_ones_are_none(codec: TextCodec) -> None:
    outputs = preprocess({"QUERY": strings("a"), "BAD_WORDS_DICT": strings("the", "dog")}, (), codec, max_seq_len=64)
    packed = Fields({"bad_words_list": outputs["BAD_WORDS_IDS"]}).token_sequences("bad_words_list")
    assert packed == tuple(codec.encode_words(["the", "dog"])) != ()
    outputs = preprocess({"QUERY": strings("a"), "BAD_WORDS_DICT": strings("")}, (), codec, max_seq_len=64)
    assert Fields({"bad_words_list": outputs["BAD_WORDS_IDS"]}).token_sequences("bad_words_list") == ()


def test_token_sequences_are_packed_as_tensorrt_llm_does() -> None:
    assert pack_sequences([(5, 6), (7,)]).tolist() == [[[5, 6, 7], [2, 3, -1]]]
    assert pack_sequences([]).tolist() == [[[0], [-1]]]


@pytest.mark.parametrize("ends", [[3, 2, -1], [1, 4, -1]])
def test_packed_sequences_that_cannot_be_are_refused(ends: list[int]) -> None:
    with pytest.raises(RequestError, match="stop_words_list: expected row 1"):
        Fields({"stop_words_list": np.array([[[5, 6, 7], ends]])}).token_sequences("stop_words_list")


def response(**more: Any) -> dict[str, np.ndarray]:
    numbers = {name: float(index) for index, name in enumerate(PACKED_OUTPUTS)}
    return {
        "TEXT": strings("naïve"),
        "HANDLE": np.array([[3]]),
        "NUMBERS": pack(numbers),
        "LOG_PROBS": np.zeros((1, 1, 2), np.float32),
        "FINISH_REASON": strings("stop"),
        **more,
    }


def test_text_output_has_no_batch_dimension_and_every_number_its_own_name_and_type() -> None:
    outputs = postprocess(response())
    assert outputs["OUTPUT"].shape == (1,)
    assert outputs["OUTPUT"][0].decode() == "naïve"
    for tensor in PUBLIC_OUTPUTS:
        if tensor.name in PACKED_OUTPUTS:
            assert outputs[tensor.name].tolist() == [[PACKED_OUTPUTS.index(tensor.name)]]
            assert outputs[tensor.name].dtype == (np.float32 if tensor.data_type == "FP32" else np.int32)
    assert set(outputs) == {"OUTPUT", *(tensor.name for tensor in PUBLIC_OUTPUTS)}


def test_ping_is_told_from_a_response_and_names_its_request() -> None:
    tensors = {"HANDLE": ping(7)["handle"]}
    assert is_ping(tensors)
    assert handle_of(tensors) == 7
    assert not is_ping(response())
    assert handle_of(response()) == 3


def test_prompt_that_brings_its_bos_gets_no_second_one_and_a_client_may_decide(tmp_path: Path) -> None:
    """vllm#4688: front ends that render the chat template themselves send it with every request."""
    target = write_target(tmp_path / "target", vocab_size=320, tokenizer=True)
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(target / "tokenizer.json"))
    write_tokenizer(str(target), tmp_path / "tokenizer")
    codec = TextCodec.load(tmp_path / "tokenizer")
    plain = prompt_ids(codec, QUERY=strings("the dog"))
    assert plain[0] == 1
    assert prompt_ids(codec, QUERY=strings("<s>the dog")) == plain
    assert prompt_ids(codec, QUERY=strings("the dog"), ADD_SPECIAL_TOKENS=np.array([[False]])) == plain[1:]
    assert prompt_ids(codec, QUERY=strings("<s>the dog"), ADD_SPECIAL_TOKENS=np.array([[True]])) == [1, *plain]
    chat = prompt_ids(codec, QUERY=strings("the dog"), CHAT=np.array([[True]]))
    assert chat == codec.encode_chat([{"role": "user", "content": "the dog"}])


class PanicException(BaseException):
    """What a panic of native code is to Python: no Exception."""


def test_panic_of_the_tokenizer_is_a_refusal(codec: TextCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    """S6: 12 million spaces make the pattern of Llama 3 panic."""

    class Panicking:
        def encode(self, *arguments: Any, **options: Any) -> Any:
            raise PanicException("/secret/path")

        decode = encode

    monkeypatch.setattr(codec, "_tokenizer", Panicking())
    with pytest.raises(RequestError, match=r"^the tokenizer does not accept this text"):
        prompt_ids(codec, QUERY=strings("a"))
    with pytest.raises(RequestError, match=r"^the tokenizer does not accept these token ids"):
        codec.decode([1])

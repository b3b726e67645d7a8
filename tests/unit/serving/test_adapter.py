"""Tensors to requests and emissions to tensors: every field is honoured, or refused by its name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dspark_trt.errors import RequestError
from dspark_trt.packaging.signature import ENGINE_FIELDS, ENGINE_ONLY_INPUTS, ENGINE_OUTPUTS
from dspark_trt.runtime.emission import Emission
from dspark_trt.runtime.metrics import RequestStatistics
from dspark_trt.runtime.request import SamplingParams
from dspark_trt.serving.adapter import EngineRequest, read_request, read_stop, with_client_names
from dspark_trt.serving.responses import ResponseWriter
from tests.support.toy_engines import letters

PROMPT = {"input_ids": np.array([[3, 4, 5]], np.int32), "input_lengths": np.array([[3]], np.int32)}
DTYPES = {"BOOL": np.bool_, "FP32": np.float32, "INT32": np.int32, "INT64": np.int64, "UINT64": np.uint64}
NUMPY_TYPES = {**DTYPES, "STRING": np.object_}


def one(value: Any) -> np.ndarray:
    return np.array([[value.encode()]], dtype=np.object_) if isinstance(value, str) else np.array([[value]])


def read(**tensors: Any) -> EngineRequest:
    arrays = {name: value if isinstance(value, np.ndarray) else one(value) for name, value in tensors.items()}
    return read_request(
        {**PROMPT, "request_output_len": one(np.int32(9)), **arrays},
        (),
        handle=17,
        client_id="mine",
        decode=letters,
        make_sampling=lambda **given: SamplingParams(
            **{"temperature": 0.5, **{name: value for name, value in given.items() if value is not None}}
        ),
    )


def test_required_fields_alone_give_the_checkpoints_defaults() -> None:
    request = read()
    assert request.generation_request.prompt_ids == (3, 4, 5)
    assert request.generation_request.sampling == SamplingParams(max_tokens=9, temperature=0.5)
    assert (request.handle, request.client_id, request.generation_request.request_id) == (17, "mine", "17")
    assert not request.is_streaming
    assert not request.echoes_prompt


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("temperature", 0.25, {"temperature": 0.25}),
        ("temperature", 0.0, {"temperature": 0.0}),
        ("runtime_top_k", 40, {"top_k": 40}),
        ("runtime_top_p", 0.5, {"top_p": 0.5}),
        ("min_p", 0.125, {"min_p": 0.125}),
        ("seed", np.uint64(2**64 - 1), {"seed": 2**64 - 1}),
        ("min_tokens", 4, {"min_tokens": 4}),
        ("min_length", 4, {"min_tokens": 4}),
        ("repetition_penalty", 1.25, {"repetition_penalty": 1.25}),
        ("presence_penalty", 0.5, {"presence_penalty": 0.5}),
        ("frequency_penalty", -0.5, {"frequency_penalty": -0.5}),
        ("logit_bias", '{"7": -100, "8": 1.5}', {"logit_bias": {7: -100.0, 8: 1.5}}),
        ("return_log_probs", True, {"num_log_probs": 0}),
        ("return_log_probs", False, {}),
        ("end_id", 6, {"stop_token_ids": (6,), "ignore_eos": True}),
        ("end_id", -1, {"ignore_eos": True}),
        ("stop_words", np.array([[b"", b"\n\n"]], np.object_), {"stop_strings": ("\n\n",)}),
        ("stop_words_list", np.array([[[1, 2, 3], [2, 3, -1]]]), {"stop_strings": ("bc", "d")}),
        ("bad_words_list", np.array([[[1, 2, 3], [2, 3, -1]]]), {"bad_words": ((1, 2), (3,))}),
    ],
)
def test_field_reaches_the_sampling_parameters(field: str, value: Any, expected: dict[str, Any]) -> None:
    assert read(**{field: value}).generation_request.sampling == SamplingParams(
        **{"max_tokens": 9, "temperature": 0.5, **expected}
    )


def test_what_clients_always_send_for_off_passes() -> None:
    off = {
        "beam_width": 1,
        "num_return_sequences": 1,
        "len_penalty": 1.0,
        "pad_id": 0,
        "return_perf_metrics": False,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
        "guided_decoding_guide": "",
    }
    assert read(**off) == read()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("beam_width", 2, "beam_width: expected 1, found 2"),
        ("num_return_sequences", 3, "num_return_sequences: expected 1, found 3"),
        ("len_penalty", 0.5, r"length_penalty: expected 1.0, found 0\.5"),
        ("return_perf_metrics", True, "return_perf_metrics: expected False, found 1"),
        ("lora_task_id", np.uint64(8), "lora_task_id: expected 0, found 8; LoRA"),
        ("guided_decoding_guide", "{}", "guided_decoding_guide: guided decoding is not supported"),
        ("guided_decoding_guide_type", "json", "guided_decoding_guide_type: guided decoding"),
        ("logit_bias", '{"seven": 1}', "logit_bias: expected a JSON object of token ids"),
        ("logit_bias", '{"7": null}', "logit_bias: expected a JSON object of token ids"),
        ("input_lengths", 4, "input_lengths: expected the number of prompt tokens in input_ids, at most 3, found 4"),
        ("temperature", np.array([[0.5, 0.5]]), r"temperature: expected one value .* found \(1, 2\)"),
        ("request_output_len", np.array([[5], [5]]), r"max_tokens: expected one value .* found \(2, 1\)"),
    ],
)
def test_unsupported_or_malformed_field_is_refused_by_name(field: str, value: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        read(**{field: value})


def test_request_without_max_tokens_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match=r"max_tokens: expected the most tokens to generate"):
        read_request(PROMPT, (), handle=1, client_id="", decode=letters, make_sampling=lambda **given: SamplingParams())


def test_min_tokens_and_its_other_name_must_agree() -> None:
    assert read(min_tokens=3, min_length=3).generation_request.sampling.min_tokens == 3
    with pytest.raises(RequestError, match="min_length: expected the same"):
        read(min_tokens=3, min_length=4)


@pytest.mark.parametrize(
    ("alias", "value", "expected"),
    [
        ("sampling_param_max_tokens", np.int32(4), {"max_tokens": 4}),
        ("sampling_param_temperature", 0.25, {"temperature": 0.25}),
        ("sampling_param_top_k", 40, {"top_k": 40}),
        ("sampling_param_seed", np.uint64(3), {"seed": 3}),
        ("sampling_param_stop", np.array([[b"x", b"y"]], np.object_), {"stop_strings": ("x", "y")}),
    ],
)
def test_other_names_of_tensorrt_llm_are_read_and_named_in_refusals(
    alias: str, value: Any, expected: dict[str, Any]
) -> None:
    array = value if isinstance(value, np.ndarray) else one(value)
    required = {} if alias == "sampling_param_max_tokens" else {"request_output_len": one(np.int32(9))}

    def sampling(array: np.ndarray) -> SamplingParams:
        return read_request(
            {**PROMPT, **required, alias: array},
            (),
            handle=1,
            client_id="",
            decode=letters,
            make_sampling=lambda **given: SamplingParams(
                **{name: value for name, value in given.items() if value is not None}
            ),
        ).generation_request.sampling

    assert {name: getattr(sampling(array), name) for name in expected} == expected
    with pytest.raises(RequestError, match=f"^{alias}: expected "):
        sampling(np.repeat(array, 20, axis=1))


def test_streaming_has_another_name_and_a_field_comes_once() -> None:
    assert read(stream=True).is_streaming
    with pytest.raises(RequestError, match=r"^sampling_param_temperature: another name of temperature; send one"):
        read(temperature=0.5, sampling_param_temperature=0.5)


def test_every_declared_input_is_read_or_known_to_be_without_effect() -> None:
    class Recorder(dict):  # type: ignore[type-arg]
        seen: set[str] = set()  # noqa: RUF012

        def get(self, name: str, default: Any = None) -> Any:
            self.seen.add(name)
            return super().get(name, default)

    tensors = Recorder({**PROMPT, "request_output_len": one(np.int32(9))})
    read_stop(tensors, "")
    read_stop(Recorder({"stop": one(True)}), "mine")
    read_request(tensors, (), handle=1, client_id="", decode=letters, make_sampling=lambda **given: SamplingParams())
    declared = {field.step_tensor().name for field in ENGINE_FIELDS} | {tensor.name for tensor in ENGINE_ONLY_INPUTS}
    always_answered = {"pad_id", "return_num_input_tokens", "return_num_output_tokens"}
    assert declared - Recorder.seen == always_answered


def test_stop_request_names_a_request_by_handle_or_by_client_id() -> None:
    assert read_stop(PROMPT, "mine") is None
    assert read_stop({"stop": one(False)}, "mine") is None
    by_id = read_stop({"stop": one(True)}, "mine")
    assert by_id is not None
    assert (by_id.handle, by_id.client_id) == (None, "mine")
    by_handle = read_stop({"stop": one(True), "stop_handle": one(np.int64(5))}, "")
    assert by_handle is not None
    assert by_handle.handle == 5
    with pytest.raises(RequestError, match="stop: expected the request id"):
        read_stop({"stop": one(True)}, "")


def test_alternatives_are_asked_for_by_number_and_within_the_runtimes_limit() -> None:
    assert read().generation_request.sampling.num_log_probs is None
    assert read(return_log_probs=True).generation_request.sampling.num_log_probs == 0
    assert read(num_top_log_probs=3).generation_request.sampling.num_log_probs == 3
    refused = with_client_names(RequestError("num_log_probs: expected an integer in 0..20"))
    assert str(refused) == "num_top_log_probs: expected an integer in 0..20"


def test_alternatives_of_a_whole_answer_stand_in_the_order_of_its_tokens() -> None:
    writer = ResponseWriter(read(num_top_log_probs=2), letters, ["top_token_ids", "top_log_probs"])
    first = Emission(request_id="17", token_ids=(7,), top_log_probs=(((7, -0.5), (3, -1.5)),))
    rest = ((8, -0.25), (1, -2.0)), ((5, -1.0), (9, -1.25))
    last = Emission(request_id="17", token_ids=(8, 9), top_log_probs=rest, finish_reason="length")
    assert writer.write(first) is None
    answer = writer.write(last)
    assert answer is not None
    assert answer["top_token_ids"].tolist() == [[[7, 3], [8, 1], [5, 9]]]
    assert answer["top_log_probs"].tolist() == [[[-0.5, -1.5], [-0.25, -2.0], [-1.0, -1.25]]]


STATISTICS = RequestStatistics(num_prompt_tokens=3, num_prompt_tokens_reused=2, num_generated_tokens=4)
STATISTICS.record_step(num_proposed=7, verify_len=4, num_accepted=1, num_emitted=2)
STATISTICS.record_step(num_proposed=7, verify_len=0, num_accepted=0, num_emitted=1)
EMISSIONS = (
    Emission(request_id="17", token_ids=(7,), text="", log_probs=(-1.0,)),
    Emission(request_id="17", token_ids=(8, 9), text="h ï", log_probs=(-2.0, -3.0)),
    Emission(request_id="17", token_ids=(2,), text="!", log_probs=(-4.0,), finish_reason="stop", statistics=STATISTICS),
)


def responses(request: EngineRequest) -> list[dict[str, np.ndarray]]:
    writer = ResponseWriter(request, letters, [tensor.name for tensor in ENGINE_OUTPUTS])
    return [dict(tensors) for tensors in map(writer.write, EMISSIONS) if tensors is not None]


def test_streaming_gives_one_response_per_emission_with_deltas() -> None:
    answers = responses(read(streaming=True, exclude_input_in_output=False))
    assert [answer["output_ids"].tolist() for answer in answers] == [[[[7]]], [[[8, 9]]], [[[2]]]]
    assert [answer["text"][0, 0].decode() for answer in answers] == ["", "h ï", "!"], "a prompt is never streamed back"
    assert [answer["num_output_tokens"].item() for answer in answers] == [1, 2, 1]
    assert [answer["sequence_length"].item() for answer in answers] == [1, 2, 1]
    assert [answer["output_log_probs"].tolist() for answer in answers] == [[[[-1.0]]], [[[-2.0, -3.0]]], [[[-4.0]]]]
    assert [answer["cum_log_probs"].item() for answer in answers] == [-1.0, -6.0, -10.0]
    assert [answer["finish_reason"][0, 0] for answer in answers] == [b"", b"", b"stop"]
    assert [answer["num_steps"].item() for answer in answers] == [0, 0, 2]
    assert [answer["num_cached_tokens"].item() for answer in answers] == [0, 0, 2]
    assert all(answer["handle"].item() == 17 for answer in answers)
    assert all(answer["num_input_tokens"].item() == 3 for answer in answers)


def test_without_streaming_there_is_exactly_one_response_with_the_whole_answer() -> None:
    (answer,) = responses(read())
    assert answer["output_ids"].tolist() == [[[7, 8, 9, 2]]]
    assert answer["text"][0, 0].decode() == "h ï!"
    assert answer["num_output_tokens"].item() == 4
    assert answer["cum_log_probs"].item() == -10.0
    assert answer["output_log_probs"].tolist() == [[[-1.0, -2.0, -3.0, -4.0]]]
    assert answer["finish_reason"][0, 0] == b"stop"
    assert answer["total_draft_tokens"].item() == 4
    assert answer["total_accepted_draft_tokens"].item() == 1
    assert answer["acceptance_rate"].item() == 0.25


def test_prompt_is_echoed_only_where_a_client_says_so() -> None:
    (answer,) = responses(read(exclude_input_in_output=False))
    assert answer["output_ids"].tolist() == [[[3, 4, 5, 7, 8, 9, 2]]]
    assert answer["text"][0, 0].decode() == "defh ï!"
    assert answer["num_output_tokens"].item() == 4
    (answer,) = responses(read(exclude_input_in_output=True))
    assert answer["text"][0, 0].decode() == "h ï!"


def test_responses_have_every_declared_output_in_its_type_and_rank() -> None:
    (answer,) = responses(read())
    assert list(answer) == [tensor.name for tensor in ENGINE_OUTPUTS]
    for tensor in ENGINE_OUTPUTS:
        assert answer[tensor.name].dtype == NUMPY_TYPES[tensor.data_type], tensor.name
        assert answer[tensor.name].ndim == 1 + len(tensor.dims), tensor.name


def test_a_salt_reaches_the_runtime() -> None:
    assert read(cache_salt="tenant 7").generation_request.cache_salt == "tenant 7"
    assert read().generation_request.cache_salt == ""

"""Every tensor of the four Triton models, once: configurations and adapters both read it.

Every input is optional to Triton, also those that a request must have: of these Triton only counts whether there are
enough inputs, and an ensemble whose step lacks one ends without any answer. The steps themselves refuse them, by name.

Names, types and shapes of the ensemble and of the engine model are those of TensorRT-LLM's Triton backend, so its
clients work unmodified; the tensors that exist only here are marked.
"""

from __future__ import annotations

from dataclasses import dataclass

from dspark_trt.packaging.pbtxt import ANY, DataType, TritonTensor

ENSEMBLE = "ensemble"
PREPROCESSING = "preprocessing"
POSTPROCESSING = "postprocessing"


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a request: its name in the ensemble, and the name of the tensor of the step that reads it."""

    name: str
    data_type: DataType
    dims: tuple[int, ...] = (1,)
    step_name: str = ""  # "": the same

    def ensemble_tensor(self) -> TritonTensor:
        return TritonTensor(self.name, self.data_type, self.dims, is_optional=True)

    def step_tensor(self) -> TritonTensor:
        return TritonTensor(self.step_name or self.name, self.data_type, self.dims, is_optional=True)


# Fields that preprocessing turns into token ids.
PREPROCESSING_FIELDS = (
    Field("text_input", "STRING", step_name="QUERY"),
    Field("chat", "BOOL", step_name="CHAT"),  # only here: text_input is one user turn
    Field("messages", "STRING", step_name="MESSAGES"),  # only here: JSON list of messages, text_input is empty
    Field("chat_template_kwargs", "STRING", step_name="CHAT_TEMPLATE_KWARGS"),  # only here: JSON object
    Field("add_special_tokens", "BOOL", step_name="ADD_SPECIAL_TOKENS"),  # only here: the tokenizer's own, a BOS mostly
    Field("bad_words", "STRING", (ANY,), step_name="BAD_WORDS_DICT"),
    Field("embedding_bias_words", "STRING", (ANY,), step_name="EMBEDDING_BIAS_WORDS"),
    Field("embedding_bias_weights", "FP32", (ANY,), step_name="EMBEDDING_BIAS_WEIGHTS"),
)

# Fields that go to the engine model as they are.
_OWN_ENGINE_FIELDS = (
    Field("max_tokens", "INT32", step_name="request_output_len"),
    Field("stream", "BOOL", step_name="streaming"),
    Field("exclude_input_in_output", "BOOL"),
    Field("stop_words", "STRING", (ANY,)),
    Field("end_id", "INT32"),
    Field("pad_id", "INT32"),
    Field("temperature", "FP32"),
    Field("top_k", "INT32", step_name="runtime_top_k"),
    Field("top_p", "FP32", step_name="runtime_top_p"),
    Field("min_p", "FP32"),  # only here
    Field("seed", "UINT64"),
    Field("min_tokens", "INT32"),
    Field("min_length", "INT32"),  # what genai-perf calls min_tokens
    Field("repetition_penalty", "FP32"),
    Field("presence_penalty", "FP32"),
    Field("frequency_penalty", "FP32"),
    Field("logit_bias", "STRING"),  # only here: JSON object, token id -> bias
    Field("skip_special_tokens", "BOOL"),  # only here
    Field("draft", "BOOL"),  # only here, as the following
    Field("max_verify_len", "INT32"),
    Field("timeout_ms", "INT32"),
    Field("priority", "INT32"),
    Field("cache_salt", "STRING"),
    Field("probe", "BOOL"),
    Field("return_log_probs", "BOOL"),
    Field("return_perf_metrics", "BOOL"),
    Field("return_num_input_tokens", "BOOL"),
    Field("return_num_output_tokens", "BOOL"),
    Field("length_penalty", "FP32", step_name="len_penalty"),
    Field("beam_width", "INT32"),
    Field("num_return_sequences", "INT32"),
    Field("lora_task_id", "UINT64"),
    Field("guided_decoding_guide", "STRING"),
    Field("guided_decoding_guide_type", "STRING"),
)

# What TensorRT-LLM's Triton model has called some of them since July 2026: other names of the same fields.
_PREFIXED = ("max_tokens", "temperature", "top_k", "top_p", "seed", "presence_penalty", "frequency_penalty")
ALIASES = {
    "streaming": "stream",
    "sampling_param_stop": "stop_words",
    **{f"sampling_param_{name}": name for name in (*_PREFIXED, "return_perf_metrics")},
}


def _alias_fields() -> tuple[Field, ...]:
    own = {field.name: field for field in _OWN_ENGINE_FIELDS}
    named = ((alias, own[name]) for alias, name in ALIASES.items())
    # the engine model has a tensor `streaming` of its own, so there this one is called `stream`
    return tuple(
        Field(alias, field.data_type, field.dims, step_name=field.name if field.step_name == alias else "")
        for alias, field in named
    )


ENGINE_FIELDS = (*_OWN_ENGINE_FIELDS, *_alias_fields())

PREPROCESSING_OUTPUTS = (
    TritonTensor("INPUT_ID", "INT32", (ANY,)),
    TritonTensor("REQUEST_INPUT_LEN", "INT32"),
    TritonTensor("BAD_WORDS_IDS", "INT32", (2, ANY)),
)

# Inputs of the engine model that no field of the ensemble fills.
ENGINE_ONLY_INPUTS = (
    TritonTensor("stop_words_list", "INT32", (2, ANY), is_optional=True),
    TritonTensor("stop", "BOOL", is_optional=True),
    TritonTensor("stop_handle", "INT64", is_optional=True),  # only here: the handle of the request to stop
    TritonTensor("num_top_log_probs", "INT32", is_optional=True),  # only here: how many alternatives to each token
)

ENGINE_OUTPUTS = (
    TritonTensor("output_ids", "INT32", (ANY, ANY)),
    TritonTensor("sequence_length", "INT32", (ANY,)),
    TritonTensor("text", "STRING"),  # only here: detokenisation needs the state of the request
    TritonTensor("handle", "INT64"),  # only here
    TritonTensor("cum_log_probs", "FP32", (ANY,)),
    TritonTensor("output_log_probs", "FP32", (ANY, ANY)),
    TritonTensor("top_token_ids", "INT32", (ANY, ANY)),  # only here: alternatives to each token
    TritonTensor("top_log_probs", "FP32", (ANY, ANY)),
    TritonTensor("batch_index", "INT32"),
    TritonTensor("sequence_index", "INT32"),
    TritonTensor("num_input_tokens", "INT32"),
    TritonTensor("num_output_tokens", "INT32"),  # of this response
    TritonTensor("finish_reason", "STRING"),  # only here: empty before the last response
    # Speculation, on the last response; 0 before.
    TritonTensor("acceptance_rate", "FP32"),  # accepted / verified drafts
    TritonTensor("total_draft_tokens", "INT32"),  # verified
    TritonTensor("total_accepted_draft_tokens", "INT32"),
    TritonTensor("num_steps", "INT32"),  # only here: verification steps
    TritonTensor("num_cached_tokens", "INT32"),  # only here: prompt tokens reused, on the last response
)

# What the ensemble takes from the engine model: few tensors, because each costs time in the engine's process. The
# numbers of a response travel in one, in this order; postprocessing gives each its public name, shape and type.
PACKED = TritonTensor("numbers", "FP64", (ANY,))
PACKED_OUTPUTS = (
    "cum_log_probs",
    "batch_index",
    "sequence_index",
    "num_input_tokens",
    "num_output_tokens",
    "acceptance_rate",
    "total_draft_tokens",
    "total_accepted_draft_tokens",
    "num_steps",
    "num_cached_tokens",
)
# that the ensemble does not have
_INNER_OUTPUTS = ("output_ids", "sequence_length", "text", "handle", "top_token_ids", "top_log_probs")
PUBLIC_OUTPUTS = tuple(tensor for tensor in ENGINE_OUTPUTS if tensor.name not in _INNER_OUTPUTS)

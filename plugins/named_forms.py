"""Forms of published models and of every kind, by name: what the resource report and the microbenchmark look at."""

from __future__ import annotations

from typing import Any

from dspark_trt_plugins.acceptance.form import AcceptanceForm
from dspark_trt_plugins.acceptance.launches import AcceptanceOperation
from dspark_trt_plugins.markov_head.form import MarkovHeadForm
from dspark_trt_plugins.markov_head.launches import MarkovHeadOperation
from dspark_trt_plugins.page_write.form import PageWriteForm
from dspark_trt_plugins.page_write.launches import PageWriteOperation
from dspark_trt_plugins.prefix_select.form import PrefixSelectForm
from dspark_trt_plugins.prefix_select.launches import PrefixSelectOperation
from dspark_trt_plugins.row_attention.form import FloatType, RowAttentionForm
from dspark_trt_plugins.row_attention.launches import RowAttentionOperation

PAGE_POSITIONS = 64
CAPACITY = 4096  # positions that a row may have
LONG_CAPACITY = 16384


def _qwen3_8b(**changes: Any) -> MarkovHeadOperation:
    sizes = {"gamma": 7, "vocab_size": 151936, "markov_rank": 256, "hidden_size": 4096, "weight_type": "bfloat16"}
    return MarkovHeadOperation(MarkovHeadForm(**{**sizes, **changes}))


def _attention(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    num_slots: int = 8,
    element_type: FloatType = "bfloat16",
    capacity: int = CAPACITY,
    num_chunk_slots: int = 0,
    is_causal: bool = True,
) -> RowAttentionOperation:
    width = capacity // PAGE_POSITIONS
    form = RowAttentionForm(
        num_heads, num_kv_heads, head_dim, PAGE_POSITIONS, width, num_slots, num_chunk_slots, is_causal, element_type
    )
    return RowAttentionOperation(form)


NamedOperation = (
    AcceptanceOperation | MarkovHeadOperation | PageWriteOperation | PrefixSelectOperation | RowAttentionOperation
)

NAMED_FORMS: dict[str, NamedOperation] = {
    "acceptance-qwen3-8b": AcceptanceOperation(AcceptanceForm(151936, 8)),
    "acceptance-draft-vocabulary": AcceptanceOperation(AcceptanceForm(151936, 8, draft_vocab_size=32768)),
    "smollm2-135m": _qwen3_8b(vocab_size=49152, markov_rank=64, hidden_size=576),
    "qwen3-8b": _qwen3_8b(),
    "qwen3-8b-bfloat16-logits": _qwen3_8b(logits_type="bfloat16"),
    "qwen3-8b-top-2048": _qwen3_8b(top_n=2048),
    "qwen3-8b-gated-float16": _qwen3_8b(head_type="gated", weight_type="float16"),
    "qwen3-8b-rnn": _qwen3_8b(head_type="rnn"),
    "qwen3-8b-rnn-float32": _qwen3_8b(head_type="rnn", weight_type="float32"),
    "qwen3-8b-without-head": _qwen3_8b(markov_rank=0),
    "page-write-qwen3-8b": PageWriteOperation(PageWriteForm(8, 128, PAGE_POSITIONS, "bfloat16")),
    "prefix-select": PrefixSelectOperation(PrefixSelectForm(7)),
    "row-attention-qwen3-8b": _attention(32, 8, 128),
    "row-attention-qwen3-8b-drafter": _attention(32, 8, 128, num_slots=7, is_causal=False),
    "row-attention-qwen3-8b-prompts": _attention(32, 8, 128, num_chunk_slots=512),
    "row-attention-qwen3-8b-long-chunk": _attention(32, 8, 128, num_chunk_slots=16, capacity=LONG_CAPACITY),
    "row-attention-qwen3-8b-float32": _attention(32, 8, 128, element_type="float32"),
    "row-attention-smollm2-135m": _attention(9, 3, 64),
    "row-attention-without-groups": _attention(8, 8, 64, element_type="float16"),
    "row-attention-groups-of-8": _attention(64, 8, 128),
    "row-attention-heads-of-80": _attention(32, 8, 80),
    "row-attention-heads-of-96": _attention(32, 8, 96, element_type="float16"),
    "row-attention-heads-of-256": _attention(16, 4, 256),
}

"""Forms of published drafters and of every head, by name: what the resource report and the microbenchmark look at."""

from __future__ import annotations

from typing import Any

from dspark_trt_plugins.markov_head.form import MarkovHeadForm
from dspark_trt_plugins.markov_head.launches import MarkovHeadOperation
from dspark_trt_plugins.prefix_select.form import PrefixSelectForm
from dspark_trt_plugins.prefix_select.launches import PrefixSelectOperation


def _qwen3_8b(**changes: Any) -> MarkovHeadOperation:
    sizes = {"gamma": 7, "vocab_size": 151936, "markov_rank": 256, "hidden_size": 4096, "weight_type": "bfloat16"}
    return MarkovHeadOperation(MarkovHeadForm(**{**sizes, **changes}))


NAMED_FORMS: dict[str, MarkovHeadOperation | PrefixSelectOperation] = {
    "smollm2-135m": _qwen3_8b(vocab_size=49152, markov_rank=64, hidden_size=576),
    "qwen3-8b": _qwen3_8b(),
    "qwen3-8b-bfloat16-logits": _qwen3_8b(logits_type="bfloat16"),
    "qwen3-8b-top-2048": _qwen3_8b(top_n=2048),
    "qwen3-8b-gated-float16": _qwen3_8b(head_type="gated", weight_type="float16"),
    "qwen3-8b-rnn": _qwen3_8b(head_type="rnn"),
    "qwen3-8b-rnn-float32": _qwen3_8b(head_type="rnn", weight_type="float32"),
    "qwen3-8b-without-head": _qwen3_8b(markov_rank=0),
    "prefix-select-early-stop": PrefixSelectOperation(PrefixSelectForm(7, "early_stop")),
    "prefix-select-lagged-budget": PrefixSelectOperation(PrefixSelectForm(7, "lagged_budget")),
}

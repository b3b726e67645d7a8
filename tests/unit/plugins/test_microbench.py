"""The microbenchmark compares with torch code that computes the same, and with bytes that are counted right."""

from __future__ import annotations

from typing import Any

import numpy as np
import plugin_microbench
import pytest
import torch
from attention_cases import num_queries, torch_row_attention
from dspark_trt_plugins.markov_head.form import MarkovHeadForm
from dspark_trt_plugins.markov_head.launches import MarkovHeadOperation
from dspark_trt_plugins.markov_head.reference import markov_head
from dspark_trt_plugins.named_forms import NAMED_FORMS
from dspark_trt_plugins.operation import extents_of
from dspark_trt_plugins.prefix_select.form import PrefixSelectForm
from dspark_trt_plugins.prefix_select.reference import prefix_select
from dspark_trt_plugins.row_attention.form import RowAttentionForm
from dspark_trt_plugins.row_attention.launches import RowAttentionOperation
from dspark_trt_plugins.row_attention.reference import row_attention
from plugin_microbench import Row, example_inputs, floor_bytes, table, timed_calls
from torch_plugins import torch_markov_head, torch_prefix_select

from tests.support.markov_head_cases import random_inputs, random_weights
from tests.support.prefix_select_cases import random_step
from tests.support.row_attention_cases import TOLERANCE, Rows, attention_form, random_call, without_poison


@pytest.mark.parametrize("top_n", [0, 30])
@pytest.mark.parametrize(("head_type", "rank"), [("vanilla", 0), ("vanilla", 8), ("gated", 8), ("rnn", 8)])
def test_the_torch_markov_head_equals_the_reference(head_type: Any, rank: int, top_n: int) -> None:
    form = MarkovHeadForm(3, 500, rank, head_type, top_n=top_n)
    weights, inputs = random_weights(form, 16), random_inputs(form, 16, [0.0, 0.7, 1.0, 3.0])
    found = torch_markov_head(form, {name: torch.from_numpy(value) for name, value in {**weights, **inputs}.items()})
    expected = markov_head(form, weights, **inputs)  # type: ignore[arg-type]
    np.testing.assert_array_equal(found["draft_ids"], expected.draft_ids)
    np.testing.assert_allclose(found["draft_logits"], expected.draft_logits, atol=2e-5)
    np.testing.assert_allclose(found["confidence_logits"], expected.confidence_logits, atol=2e-5)


def test_the_torch_prefix_select_equals_the_reference() -> None:
    form = PrefixSelectForm(7)
    for seed in range(20):
        inputs = random_step(form, 9, seed)
        found = torch_prefix_select(form, {name: torch.from_numpy(value) for name, value in inputs.items()})
        for name, value in prefix_select(form, inputs).items():
            np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_the_floor_counts_w2_once_a_slot() -> None:
    """V = 151,936, r = 256, gamma = 7: 545 MB of W2 in bfloat16, 8.5 MB of float32 logits a request."""
    one, two = (floor_bytes(NAMED_FORMS["qwen3-8b"], count) for count in (1, 2))
    logits = 8 * 7 * 151_936
    assert one == pytest.approx(2 * 7 * 151_936 * 256 + logits, rel=1e-3)
    assert two - one == pytest.approx(logits, rel=2e-2)


def test_the_floor_of_top_n_counts_the_candidates_rows() -> None:
    whole, restricted = (floor_bytes(NAMED_FORMS[name], 1) for name in ("qwen3-8b", "qwen3-8b-top-2048"))
    assert whole - restricted == 2 * 7 * 256 * (151_936 - 2048)


@pytest.mark.parametrize("name", ["smollm2-135m", "prefix-select"])
def test_example_inputs_fit_the_operation(name: str) -> None:
    operation = NAMED_FORMS[name]
    inputs = example_inputs(operation, 3, "cpu")
    assert extents_of(operation.inputs, [inputs[tensor.name].shape for tensor in operation.inputs])["R"] == 3
    for tensor in operation.inputs:
        assert inputs[tensor.name].dtype == getattr(torch, tensor.element_type)
    if isinstance(operation, MarkovHeadOperation):
        assert (torch_markov_head(operation.form, inputs)["draft_ids"] < operation.form.vocab_size).all()
    else:
        assert torch_prefix_select(operation.form, inputs)["num_tokens"].item() > 3


@pytest.mark.parametrize(
    "form",
    [attention_form(9, 3, 16, 300, 4, "float32"), attention_form(4, 4, 8, 300, 4, "float32", is_causal=False)],
)
def test_the_torch_row_attention_equals_the_reference(form: RowAttentionForm) -> None:
    inputs = without_poison(random_call(form, Rows.alike([280, 0, 17], 4)))
    found = torch_row_attention(form, {name: torch.from_numpy(value) for name, value in inputs.items()})
    np.testing.assert_allclose(found["attended"], row_attention(form, **inputs), atol=TOLERANCE["float32"])


def test_the_floor_of_attention_counts_what_is_live() -> None:
    """Qwen3-8B, bfloat16: 4 KiB of keys and values a position; 8 queries and outputs of 8 KiB a row."""
    operation = NAMED_FORMS["row-attention-qwen3-8b"]
    assert floor_bytes(operation, 3, 1000) == 3 * (1000 * 4096 + 2 * 8 * 8192)


def test_example_rows_see_what_they_are_said_to() -> None:
    operation = RowAttentionOperation(attention_form(9, 3, 16, 300, 4, "bfloat16"))
    inputs = example_inputs(operation, 2, "cpu", num_live=100)
    extents = extents_of(operation.inputs, [inputs[tensor.name].shape for tensor in operation.inputs])
    assert extents == {"T": 8, "P": 11, "B": 2, "D": 2, "S": 4}
    assert {t.name: getattr(torch, t.element_type) for t in operation.inputs} == {n: x.dtype for n, x in inputs.items()}
    assert (inputs["past_lengths"] + inputs["query_lengths"]).tolist() == [100, 100]
    assert len(inputs["block_tables"].unique()) == 10, "no page twice"
    chunk = example_inputs(
        RowAttentionOperation(attention_form(9, 3, 16, 300, 4, "bfloat16", num_chunk_slots=32)), 1, "cpu", num_live=100
    )
    assert chunk["query_lengths"].tolist() == [0, 32], "no row verifies beside it"


def test_every_timed_call_of_attention_sees_as_much_as_it_has_queries_and_no_more_than_a_row() -> None:
    forms = {name: NAMED_FORMS[name] for name in timed_calls()}
    timed = {name: op for name, op in forms.items() if isinstance(op, RowAttentionOperation)}
    assert max(num_queries(operation.form) for operation in timed.values()) == 512, "a prompt chunk is among them"
    for name, operation in timed.items():
        for num_live, _ in timed_calls()[name]:
            assert num_queries(operation.form) <= num_live <= operation.form.capacity


def test_the_table_names_the_share_of_the_floor() -> None:
    assert table([Row("qwen3-8b", 0, 8, 200.0, 900.0, 2000.0, 150.0)]).splitlines()[1].split() == [
        "qwen3-8b",
        "8",
        "200.0",
        "900.0",
        "2000.0",
        "150.00",
        "75%",
    ]


def test_a_machine_without_a_gpu_is_told_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert plugin_microbench.main([]) == 3
    assert "expected a CUDA GPU, found none" in capsys.readouterr().err

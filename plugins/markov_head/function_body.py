"""MarkovHead as an ONNX function: gamma unrolled steps of standard opset-24 operators.

ONNX Runtime runs this body; TensorRT takes the plugin where it is registered and inlines the body where it is not.

Shape letters: `R` requests, `G` gamma, `V` vocabulary, `D` hidden, `r` Markov rank, `N` top_n, `C` blocks of BLOCK_SIZE
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from dspark_trt_plugins.body import Body, form_function, form_node
from dspark_trt_plugins.markov_head.form import EXCLUDED_LOGIT, LARGEST_LOGIT, W1, W2, FloatType, MarkovHeadForm
from onnx import TensorProto, helper, numpy_helper

NAME = "MarkovHead"
# The vocabulary is searched in two levels, blocks first: exact enough in float32 and much faster than a scan over V.
BLOCK_SIZE = 128
_LARGEST_FRACTION = 1 - 2.0**-23  # stays below 1 where a compiler computes float64 as float32 (TensorRT does)


def markov_head_node(form: MarkovHeadForm, inputs: Sequence[str], outputs: Sequence[str]) -> onnx.NodeProto:
    """The node that calls the function, with the attributes that a TensorRT plugin reads.

    `inputs` and `outputs` are value names in the order of `form.input_names` and `form.output_names`.
    """
    return form_node(NAME, form, inputs, outputs)


def markov_head_function(form: MarkovHeadForm) -> onnx.FunctionProto:
    """The function body for one form. A model holds one MarkovHead, so forms share the name without overloads.

    Source: paper section 3.1, eq. 4-7.
    """
    body = Body(f"{NAME}/")
    # widened once, not once a slot; of what is gathered from, the gathered rows are
    gathered = {W1, W2} if form.top_n else {W1}
    weights = {n: _float32(body, n, form.weight_type) for n in form.weight_names if n not in gathered}
    steps = _Steps(form, body, weights)
    previous = _nearest_row(body) if form.has_markov_head else "anchor_ids"
    ids, logits, embeddings = [], [], []
    for slot in range(form.gamma):
        slot_logits = steps.logits(slot, previous)
        embeddings.append(steps.embedded)
        previous = steps.draw(slot, slot_logits)
        ids.append(body.op("Unsqueeze", previous, body.axes(1)))
        logits.append(body.op("Unsqueeze", slot_logits, body.axes(1)))
    body.op("Concat", *ids, axis=1, output="draft_ids")
    body.op("Concat", *logits, axis=1, output="draft_logits")
    if form.has_confidence_head:
        _confidence(form, body, weights, embeddings)
    return form_function(NAME, form, body.nodes)


def _nearest_row(body: Body) -> str:
    """The anchors; an id that W1 has no row for is the nearest that it has."""
    last = body.op("Sub", body.op("Gather", body.op("Shape", W1), body.scalar(0), axis=0), body.scalar(1))
    return body.op("Min", body.op("Max", "anchor_ids", body.scalar(0)), last)


class _Steps:
    """The sequential stage, one slot after the other."""

    def __init__(self, form: MarkovHeadForm, body: Body, weights: dict[str, str]) -> None:
        self._form, self._body, self._weights = form, body, weights
        self._num_blocks = -(-form.vocab_size // BLOCK_SIZE)
        base_logits = _float32(body, "base_logits", form.logits_type)
        self._base = body.split(base_logits, form.gamma, axis=1)  # G times [R, 1, V]
        self._candidates = self._top(base_logits) if form.top_n else []  # G times [R, 1, N]
        zero = body.float32(0)
        self._is_greedy = body.op("LessOrEqual", "temperatures", zero)  # [R]
        hottest = body.op("ReduceMax", "temperatures", keepdims=0)
        self._is_any_sampled = body.op("Greater", hottest, zero)
        temperature = body.op("Where", self._is_greedy, body.float32(1), "temperatures")
        self._temperature = body.op("Unsqueeze", temperature, body.axes(1, 2))  # [R, 1, 1]
        self._uniforms = body.split(body.op("Cast", "uniforms", to=TensorProto.DOUBLE), form.gamma, axis=1)
        self._state: str | None = None
        self.embedded = ""  # [R, r]: W1 of the token before the slot

    def logits(self, slot: int, previous: str) -> str:
        """Corrected, finite logits of one slot, [R, V]."""
        body = self._body
        base = body.op("Squeeze", self._base[slot], body.axes(1))
        feature = None
        if self._form.has_markov_head:
            embedded = body.op("Gather", W1, previous, axis=0)
            self.embedded = _float32(body, embedded, self._form.weight_type)
            feature = self._bias_feature(slot)
        if self._form.top_n:
            return self._of_candidates(base, feature, body.op("Squeeze", self._candidates[slot], body.axes(1)))
        if feature is None:
            return self._finite(base)
        return self._finite(body.op("Gemm", feature, self._weights[W2], base, transB=1))

    def _top(self, base_logits: str) -> list[str]:
        """The candidates of each slot. They do not depend on any draft."""
        body, form = self._body, self._form
        values, indices = body.fresh(), body.fresh()
        inputs = [_clip(body, base_logits), body.axes(form.top_n)]
        body.nodes.append(helper.make_node("TopK", inputs, [values, indices], axis=2))
        return body.split(indices, form.gamma, axis=1)

    def _of_candidates(self, base: str, feature: str | None, candidates: str) -> str:
        """Logits [R, V] of candidates [R, N]; every other token is EXCLUDED_LOGIT."""
        body = self._body
        logits = body.op("GatherElements", base, candidates, axis=1)
        if feature is not None:
            rows = _float32(body, body.op("Gather", W2, candidates, axis=0), self._form.weight_type)  # [R, N, r]
            bias = body.op("MatMul", rows, body.op("Unsqueeze", feature, body.axes(2)))
            logits = body.op("Add", logits, body.op("Squeeze", bias, body.axes(2)))
        excluded = body.op("Expand", body.float32(EXCLUDED_LOGIT), body.op("Shape", base))
        return body.op("ScatterElements", excluded, candidates, self._finite(logits), axis=1)

    def _bias_feature(self, slot: int) -> str:
        body, form = self._body, self._form
        if form.head_type == "vanilla":
            return self.embedded
        hidden = _float32(body, body.op("Gather", "hidden", body.scalar(slot), axis=1), form.weight_type)
        if form.head_type == "gated":
            joined = body.op("Concat", hidden, self.embedded, axis=1)
            gate = body.op("Sigmoid", _linear(body, self._weights, "markov_head.gate_proj", joined))
            return body.op("Mul", gate, self.embedded)
        if self._state is None:
            zero = numpy_helper.from_array(np.zeros(1, np.float32))
            self._state = body.op("ConstantOfShape", body.op("Shape", self.embedded), value=zero)
        joined = body.op("Concat", self._state, self.embedded, hidden, axis=1)
        projected = _linear(body, self._weights, "markov_head.joint_proj", joined)
        gate, candidate, out = body.split(projected, 3, axis=1)
        gate = body.op("Sigmoid", gate)
        kept = body.op("Mul", gate, self._state)
        entering = body.op("Mul", body.op("Sub", body.float32(1), gate), body.op("Tanh", candidate))
        self._state = body.op("Add", kept, entering)
        return body.op("Tanh", out)

    def _finite(self, logits: str) -> str:
        """NaN and values beyond +-LARGEST_LOGIT are replaced. Looking whether there are any is one cheap pass."""
        body, large = self._body, self._body.float32(LARGEST_LOGIT)
        is_clean = body.op("LessOrEqual", body.op("ReduceL1", logits, keepdims=0), large)
        clean = body.branch()
        clean_result = clean.op("Identity", logits)
        repair = body.branch()
        return self._choose(is_clean, clean, clean_result, repair, _clip(repair, logits), TensorProto.FLOAT)

    def draw(self, slot: int, logits: str) -> str:
        """Token ids [R]; the sampling work is skipped when every request is greedy."""
        body = self._body
        blocks = self._blocks(logits)  # [R, C, BLOCK_SIZE]
        block_max = body.op("ReduceMax", blocks, body.axes(2), keepdims=0)  # [R, C]
        best_block = body.op("ArgMax", block_max, axis=1, keepdims=1)  # [R, 1]
        in_block = body.op("ArgMax", _pick(body, blocks, best_block), axis=1, keepdims=1)
        greedy = self._token(body, best_block, in_block)
        only_greedy = body.branch()
        only_greedy_ids = only_greedy.op("Identity", greedy)
        mixed = body.branch()
        sampled = self._sample(mixed, blocks, block_max, self._uniforms[slot])
        mixed_ids = mixed.op("Where", self._is_greedy, greedy, sampled)
        return self._choose(self._is_any_sampled, mixed, mixed_ids, only_greedy, only_greedy_ids, TensorProto.INT64)

    def _blocks(self, logits: str) -> str:
        body, form = self._body, self._form
        padding = self._num_blocks * BLOCK_SIZE - form.vocab_size
        if padding:
            logits = body.op("Pad", logits, body.axes(0, 0, 0, padding), body.float32(EXCLUDED_LOGIT))
        return body.op("Reshape", logits, body.axes(0, self._num_blocks, BLOCK_SIZE))

    def _sample(self, body: Body, blocks: str, block_max: str, uniform: str) -> str:
        """Inverse-CDF draw [R]: first the block, then the token in it.

        Weights are float32 and summed in runs of BLOCK_SIZE; everything cumulative is float64. Inside the
        block the position is a fraction of the block's own sum, so a token without weight is never drawn.
        """
        largest = body.op("Unsqueeze", body.op("ReduceMax", block_max, body.axes(1)), body.axes(2))
        scaled = body.op("Div", body.op("Sub", blocks, largest), self._temperature)
        weights = body.op("Exp", scaled)  # [R, C, BLOCK_SIZE]
        mass = body.op("Cast", body.op("ReduceSum", weights, body.axes(2), keepdims=0), to=TensorProto.DOUBLE)
        block, position = _search(body, mass, uniform, self._num_blocks)
        before = body.op("GatherElements", body.op("CumSum", mass, body.scalar(1), exclusive=1), block, axis=1)
        fraction = body.op("Div", body.op("Sub", position, before), body.op("GatherElements", mass, block, axis=1))
        row = body.op("Cast", _pick(body, weights, block), to=TensorProto.DOUBLE)  # [R, BLOCK_SIZE]
        in_block, _ = _search(body, row, fraction, BLOCK_SIZE)
        return self._token(body, block, in_block)

    @staticmethod
    def _token(body: Body, block: str, in_block: str) -> str:
        first = body.op("Mul", block, body.axes(BLOCK_SIZE))
        return body.op("Squeeze", body.op("Add", first, in_block), body.axes(1))

    def _choose(self, condition: str, then: Body, then_value: str, other: Body, value: str, element_type: int) -> str:
        return self._body.op(
            "If",
            condition,
            then_branch=then.graph(then_value, element_type),
            else_branch=other.graph(value, element_type),
        )


def _search(body: Body, mass: str, fraction: str, size: int) -> tuple[str, str]:
    """First index [R, 1] whose cumulative mass exceeds `fraction` of the whole, and that share of the mass [R, 1]."""
    inside = body.op("Clip", fraction, body.float64(0), body.float64(_LARGEST_FRACTION))
    cumulative = body.op("CumSum", mass, body.scalar(1))
    whole = body.op("Gather", cumulative, body.axes(size - 1), axis=1)
    position = body.op("Mul", inside, whole)
    passed = body.op("Cast", body.op("LessOrEqual", cumulative, position), to=TensorProto.INT64)
    return body.op("ReduceSum", passed, body.axes(1), keepdims=1), position


def _pick(body: Body, blocks: str, block: str) -> str:
    """One block of each request: [R, C, BLOCK_SIZE], [R, 1] -> [R, BLOCK_SIZE]."""
    return body.op("GatherND", blocks, block, batch_dims=1)


def _float32(body: Body, value: str, element_type: FloatType) -> str:
    return value if element_type == "float32" else body.op("Cast", value, to=TensorProto.FLOAT)


def _clip(body: Body, logits: str) -> str:
    """NaN becomes -LARGEST_LOGIT, everything else stays within +-LARGEST_LOGIT."""
    smallest = body.float32(-LARGEST_LOGIT)
    known = body.op("Where", body.op("IsNaN", logits), smallest, logits)
    return body.op("Clip", known, smallest, body.float32(LARGEST_LOGIT))


def _linear(body: Body, weights: dict[str, str], module: str, features: str) -> str:
    return body.op("Gemm", features, *(weights[name] for name in weights if name.startswith(module)), transB=1)


def _confidence(form: MarkovHeadForm, body: Body, weights: dict[str, str], embeddings: list[str]) -> None:
    """All slots at once: a confidence needs the token before its slot only, which the steps have already looked up."""
    features = _float32(body, "hidden", form.weight_type)
    if form.has_markov_head and form.is_confidence_with_markov:
        stacked = body.op("Concat", *(body.op("Unsqueeze", e, body.axes(1)) for e in embeddings), axis=1)
        features = body.op("Concat", features, stacked, axis=2)
    rows = body.op("Flatten", features, axis=2)  # [R * G, D (+ r)]
    scored = _linear(body, weights, "confidence_head.proj", rows)  # [R * G, 1]
    body.op("Reshape", scored, body.axes(-1, form.gamma), output="confidence_logits")

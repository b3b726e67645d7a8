"""PrefixSelect as an ONNX function of standard opset-24 operators.

ONNX Runtime runs this body; TensorRT takes the plugin where it is registered and inlines the body where it is not.
TensorRT limits TopK to R * G <= 3840, computes float64 as float32, and does not promise the order of equal survivals.

Shape letters: `R` requests, `G` gamma, `N` = R * G drafts in the order (j, r), `T` packed tokens, `B` KV rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from dspark_trt_plugins.body import Body, form_function, form_node
from dspark_trt_plugins.prefix_select.form import PrefixSelectForm
from onnx import TensorProto, helper

NAME = "PrefixSelect"
_NOT_OFFERED = -1.0  # stands for the survival of a draft beyond its request's cap, and of a forced one


def prefix_select_node(form: PrefixSelectForm, inputs: Sequence[str], outputs: Sequence[str]) -> onnx.NodeProto:
    """The node that calls the function, with the attributes that a TensorRT plugin reads.

    `inputs` and `outputs` are value names in the order of `form.input_names` and `form.output_names`.
    """
    return form_node(NAME, form, inputs, outputs)


def prefix_select_function(form: PrefixSelectForm) -> onnx.FunctionProto:
    """The function body for one form. Source: paper section 5.2."""
    writer = _Writer(form)
    writer.admit()
    writer.pack_tokens()
    writer.pack_rows()
    return form_function(NAME, form, writer.nodes)


class _Writer:
    def __init__(self, form: PrefixSelectForm) -> None:
        self._form = form
        self._body = Body(f"{NAME}/")

    @property
    def nodes(self) -> list[onnx.NodeProto]:
        return self._body.nodes

    def admit(self) -> None:
        """verify_len [R], first_tokens [R] and num_tokens [1]."""
        body, form = self._body, self._form
        survival = self._survival()  # [R, G]
        slots = body.constant(np.arange(form.gamma, dtype=np.int64))
        is_forced = body.op("Greater", "is_forced", body.scalar(0))
        free_caps = body.op("Where", is_forced, body.scalar(0), "caps")
        is_offered = body.op("Less", slots, body.op("Unsqueeze", free_caps, body.axes(1)))  # [R, G]
        keys = body.op("Where", is_offered, survival, self._body.float64(_NOT_OFFERED))
        flat = body.op("Reshape", body.op("Transpose", keys, perm=[1, 0]), body.axes(1, -1))  # [1, N]
        count = body.op("Size", flat)
        ranked, order = self._sort(flat, body.op("Reshape", count, body.axes(1)))
        rank = self._range(count)  # [N]
        is_ranked = body.op("GreaterOrEqual", ranked, self._body.float64(0))
        is_taken = body.op("And", is_ranked, body.op("Less", rank, "num_admitted"))
        none = body.op("Mul", order, body.scalar(0))
        taken = body.op("ScatterElements", none, order, body.op("Cast", is_taken, to=TensorProto.INT64), axis=1)
        by_slot = body.op("Reshape", taken, body.axes(form.gamma, -1))  # [G, R]
        admitted = body.op("ReduceSum", by_slot, body.axes(0), keepdims=0)
        forced = body.op("Max", "caps", body.scalar(0))
        body.op("Where", is_forced, forced, admitted, output="verify_len")
        is_request = body.op("GreaterOrEqual", "caps", body.scalar(0))
        tokens = body.op("Where", is_request, body.op("Add", "verify_len", body.scalar(1)), body.scalar(0))
        body.op("CumSum", tokens, body.scalar(0), exclusive=1, output="first_tokens")
        body.op("ReduceSum", tokens, body.axes(0), keepdims=1, output="num_tokens")

    def _survival(self) -> str:
        """Running product of sigmoid(logit / temperature), [R, G] float64; 0 from a non-finite confidence on."""
        body = self._body
        largest = body.float32(float(np.finfo(np.float32).max))
        is_finite = body.op("LessOrEqual", body.op("Abs", "confidence_logits"), largest)
        logits = body.op("Where", is_finite, "confidence_logits", body.float32(0))
        tempered = body.op("Div", self._as_double(logits), self._as_double("temperatures"))
        confidence = body.op("Where", is_finite, body.op("Sigmoid", tempered), self._body.float64(0))
        slots = body.split(confidence, self._form.gamma, axis=1)
        products = slots[:1]
        for slot in slots[1:]:
            products.append(body.op("Mul", products[-1], slot))
        return body.op("Concat", *products, axis=1)

    def _sort(self, keys: str, count: str) -> tuple[str, str]:
        """Falling, [1, N], and where each one was; equal ones in the order of drafts."""
        values, indices = self._body.fresh(), self._body.fresh()
        self._body.nodes.append(helper.make_node("TopK", [keys, count], [values, indices], axis=1))
        return values, indices

    def pack_tokens(self) -> None:
        """What stands at each packed token, [T]. Padding repeats the last token."""
        body, width = self._body, self._form.gamma + 1
        token = body.op("Min", "token_index", body.op("Sub", "num_tokens", body.scalar(1)))
        has_begun = body.op("LessOrEqual", body.op("Unsqueeze", "first_tokens", body.axes(1)), token)  # [R, T]
        begun = body.op("ReduceSum", body.op("Cast", has_begun, to=TensorProto.INT64), body.axes(0), keepdims=0)
        request = body.op("Sub", begun, body.scalar(1), output="token_requests")
        slot = body.op("Sub", token, body.op("Gather", "first_tokens", request))
        blocks = body.op("Concat", body.op("Unsqueeze", "anchor_ids", body.axes(1)), "draft_ids", axis=1)
        at = body.op("Add", body.op("Mul", request, body.scalar(width)), slot)
        body.op("Gather", body.op("Reshape", blocks, body.axes(-1)), at, output="token_ids")
        body.op("Add", body.op("Gather", "past_lengths", request), slot, output="positions")
        first_slot = body.op("Mul", body.op("Gather", "block_rows", request), body.scalar(width))
        body.op("Add", first_slot, slot, output="padded_indices")

    def pack_rows(self) -> None:
        """The target's row group. Padding points at the row's last token, in a row without request at token 0."""
        body, zero = self._body, self._body.scalar(0)
        is_used = body.op("Greater", "row_query_lengths", zero)
        request = body.op("Where", is_used, "row_requests", zero)
        length = body.op("Where", is_used, body.op("Gather", "verify_len", request), zero)
        first = body.op("Where", is_used, body.op("Gather", "first_tokens", request), zero)
        slots = body.constant(np.arange(self._form.gamma + 1, dtype=np.int64))
        inside = body.op("Min", slots, body.op("Unsqueeze", length, body.axes(1)))
        body.op("Add", body.op("Unsqueeze", first, body.axes(1)), inside, output="decode.tokens")
        past = body.op("Gather", "past_lengths", request)
        body.op("Where", is_used, past, zero, output="decode.past_lengths")
        queries = body.op("Add", length, body.scalar(1))
        body.op("Where", is_used, queries, zero, output="decode.query_lengths")

    def _range(self, count: str) -> str:
        return self._body.op("Range", self._body.scalar(0), count, self._body.scalar(1))

    def _as_double(self, value: str) -> str:
        return self._body.op("Cast", value, to=TensorProto.DOUBLE)

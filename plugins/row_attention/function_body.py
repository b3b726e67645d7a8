"""RowAttention as an ONNX function of standard opset-24 operators: pages gathered into rows, and Attention over whole
rows under an explicit mask.

ONNX Runtime runs this body; TensorRT takes the plugin where it is registered and inlines the body where it is not. Cost
then follows the capacity, rows are copied, and a NaN behind the last live position gets through (0 * NaN).

Shape letters: `T` packed tokens, `B` rows, `S` longest query, `N` query heads, `K` KV heads, `H` head dim, `P` pages of
the pool, `G` positions of a page, `W` pages of a row, `C` = W * G.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from dspark_trt_plugins.body import Body, form_function, form_node
from dspark_trt_plugins.row_attention.form import FloatType, RowAttentionForm
from onnx import TensorProto, helper

NAME = "RowAttention"
_ONNX_TYPES: dict[FloatType, int] = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
}


def row_attention_node(
    form: RowAttentionForm, inputs: Sequence[str], outputs: Sequence[str], name: str = NAME
) -> onnx.NodeProto:
    """A node that calls the function, with the attributes that a TensorRT plugin reads.

    `inputs` and `outputs` are value names in the order of `form.input_names` and `form.output_names`. A graph has one
    such node for each layer: give each one its own `name`.
    """
    return form_node(NAME, form, inputs, outputs, name=name)


def row_attention_function(form: RowAttentionForm) -> onnx.FunctionProto:
    """The function body for one form."""
    body = Body(f"{NAME}/")
    lengths = [body.op("Shape", name, start=1) for name in form.input_names[6:]]  # [1] each
    longest = body.op("Squeeze", body.op("Max", *lengths), body.axes(0))
    slots = body.op("Range", body.scalar(0), longest, body.scalar(1))  # [S]
    last = body.op("Sub", body.op("Unsqueeze", "query_lengths", body.axes(1)), body.scalar(1))
    inside = body.op("Max", body.op("Min", slots, last), body.scalar(0))  # [B, S], padding repeats the last query
    past = body.op("Unsqueeze", "past_lengths", body.axes(1))
    limits = body.op("Add", past, inside if form.is_causal else body.op("Max", last, body.scalar(0)))  # [B, S] or 1
    mask = body.op(
        "LessOrEqual",
        body.constant(np.arange(form.capacity, dtype=np.int64)),
        body.op("Unsqueeze", limits, body.axes(1, 3)),
    )  # [B, 1, S or 1, C]
    num_tokens = body.op("Shape", "query", start=0, end=1)  # [1]
    tokens = body.op("Add", body.op("Unsqueeze", "first_tokens", body.axes(1)), inside)
    read = body.op("Min", tokens, body.op("Sub", num_tokens, body.scalar(1)))  # an idle row may stand behind them
    heads = body.axes(0, 0, form.num_heads, form.head_dim)
    padded = body.op("Reshape", body.op("Gather", "query", read, axis=0), heads)  # [B, S, N, H]
    queries = body.op("Transpose", padded, perm=[0, 2, 1, 3])
    keys, values = gathered_rows(body, form)
    if not form.is_causal:
        mask = body.op(
            "Expand", mask, body.op("Concat", body.axes(1, 1), body.op("Max", *lengths), body.axes(1), axis=0)
        )
    result = body.op("Attention", queries, keys, values, mask, scale=form.head_dim**-0.5)  # [B, N, S, H]
    width = form.num_heads * form.head_dim
    rows = body.op("Reshape", body.op("Transpose", result, perm=[0, 2, 1, 3]), body.axes(0, 0, width))
    is_idle = body.op("Less", last, body.scalar(0))
    at = body.op("Unsqueeze", body.op("Where", is_idle, num_tokens, tokens), body.axes(2))  # an idle row: behind all
    zero = helper.make_tensor("zero", _ONNX_TYPES[form.element_type], [1], [0.0])
    more = body.op("Add", num_tokens, body.axes(1))
    nothing = body.op("ConstantOfShape", body.op("Concat", more, body.axes(width), axis=0), value=zero)
    body.op(
        "Slice",
        body.op("ScatterND", nothing, at, rows),
        body.axes(0),
        num_tokens,
        body.axes(0),
        output="attended",
    )
    return form_function(NAME, form, body.nodes)


def gathered_rows(body: Body, form: RowAttentionForm) -> tuple[str, str]:
    """Keys and values of whole rows, [B, K, C, H]."""
    pages = body.op("Gather", "pages", "block_tables", axis=0)  # [B, W, 2, K, G, H]
    both = body.op("Transpose", pages, perm=[2, 0, 3, 1, 4, 5])  # [2, B, K, W, G, H]
    shape = body.axes(-1, form.num_kv_heads, form.capacity, form.head_dim)
    keys, values = body.split(both, 2, axis=0)
    return body.op("Reshape", keys, shape), body.op("Reshape", values, shape)

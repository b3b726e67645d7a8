"""RowAttention as an ONNX function of standard opset-24 operators: Attention over the whole row under an explicit mask.

ONNX Runtime runs this body; TensorRT takes the plugin where it is registered and inlines the body where it is not. Cost
then follows the capacity, or what the compiler makes of the mask, and a NaN behind the last live position gets through
(0 * NaN).

Shape letters: `B` rows, `N` query heads, `K` KV heads, `S` padded query length, `C` row capacity, `H` head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from dspark_trt_plugins.body import Body, form_function, form_node
from dspark_trt_plugins.row_attention.form import RowAttentionForm

NAME = "RowAttention"


def row_attention_node(
    form: RowAttentionForm, inputs: Sequence[str], outputs: Sequence[str], name: str = NAME
) -> onnx.NodeProto:
    """A node that calls the function, with the attributes that a TensorRT plugin reads.

    `inputs` and `outputs` are value names in the order of `form.input_names` and `form.output_names`. A graph has one
    such node for each layer: give each one its own `name`.
    """
    return form_node(NAME, form, inputs, outputs, name=name)


def row_attention_function(form: RowAttentionForm) -> onnx.FunctionProto:
    """The function body for one form. All nodes of a model share it:
    their forms may differ in num_slots, which it does not read."""
    body = Body(f"{NAME}/")
    positions = body.constant(np.arange(form.capacity, dtype=np.int64))
    limits = body.op("Unsqueeze", "last_seen", body.axes(1, 3))  # [B, 1, S, 1]
    mask = body.op("LessOrEqual", positions, limits)  # [B, 1, S, C]
    body.op("Attention", "query", "keys", "values", mask, output="attended", scale=form.head_dim**-0.5)
    return form_function(NAME, form, body.nodes)

"""PageWrite as an ONNX function of standard opset-24 operators: one ScatterND.

ONNX Runtime runs this body, in place where input and output are bound to the same memory; TensorRT takes the plugin
where it is registered and inlines the body where it is not, which copies the pool.

Shape letters: `T` packed tokens, `K` KV heads, `H` head dim, `P` pages of the pool, `G` positions of a page.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from dspark_trt_plugins.body import Body, form_function, form_node
from dspark_trt_plugins.page_write.form import PageWriteForm

NAME = "PageWrite"


def page_write_node(
    form: PageWriteForm, inputs: Sequence[str], outputs: Sequence[str], name: str = NAME
) -> onnx.NodeProto:
    """A node that calls the function, with the attributes that a TensorRT plugin reads.

    `inputs` and `outputs` are value names in the order of `form.input_names` and `form.output_names`.
    """
    return form_node(NAME, form, inputs, outputs, name=name)


def page_write_function(form: PageWriteForm) -> onnx.FunctionProto:
    """The function body, the same for all forms: sizes are read off the pool."""
    body = Body(f"{NAME}/")
    num_heads, page_positions, head_dim = body.split(body.op("Shape", "pages", start=2), 3, axis=0)  # [1] each
    heads = body.op("Range", body.scalar(0), body.op("Squeeze", num_heads, body.axes(0)), body.scalar(1))  # [K]
    page, position = (
        body.op("Unsqueeze", body.op(op, "slots", page_positions), body.axes(1, 2)) for op in ("Div", "Mod")
    )  # [T, 1, 1]
    which = body.constant(np.array([[[0], [1]]], np.int64))  # [1, 2, 1]: keys, values
    every = body.op("Concat", body.op("Shape", "slots"), body.axes(2), num_heads, axis=0)
    index = (body.op("Expand", part, every) for part in (page, which, heads, position))
    at = body.op("Concat", *(body.op("Unsqueeze", part, body.axes(3)) for part in index), axis=3)  # [T, 2, K, 4]
    shape = body.op("Concat", body.axes(-1, 1), num_heads, head_dim, axis=0)
    both = body.op("Concat", *(body.op("Reshape", x, shape) for x in ("keys", "values")), axis=1)  # [T, 2, K, H]
    body.op("ScatterND", "pages", at, both, output="written")
    return form_function(NAME, form, body.nodes)

"""A float32 target that measures itself: beside each Linear layer its quantised twin, which reads the same activations.

What goes on through the graph is float32, so the error of a layer is its own and not that of the layers before it.
Shape letter: `T` packed tokens.
"""

from __future__ import annotations

from dspark_trt.graphs.builder import GraphBuilder
from dspark_trt.graphs.linears import Linears
from dspark_trt.graphs.weights import TensorSource


class SurveyedLinears(Linears):
    """Linear layers in float32, each compared with eight-bit activations and weights by rows."""

    def __init__(self, builder: GraphBuilder, source: TensorSource) -> None:
        super().__init__(builder, source, None, "float32", is_read_again=True)  # memory-mapped: they are used once
        self._twins = Linears(builder, source, "rows", "float32")
        self._errors: dict[str, str] = {}

    def __call__(self, x: str, weight: str, *, bias: str | None = None, output: str | None = None) -> str:
        builder = self._builder
        exact = super().__call__(x, weight, bias=bias, output=output)
        difference = builder.op("Sub", self._twins(x, weight, bias=bias), exact)
        last = builder.vector(-1)
        sums = (builder.op("ReduceSumSquare", each, last, keepdims=0) for each in (difference, exact))
        self._errors[weight] = builder.op("Unsqueeze", builder.op("Div", *sums), builder.vector(0))
        return exact

    @property
    def weights(self) -> tuple[str, ...]:
        """The Linear layers of the graph, in its order, by the canonical names of their weights."""
        return tuple(self._errors)

    def emit_errors(self, output: str) -> None:
        """Squared error of each token's output, relative to that output: [number of layers, T]."""
        self._builder.op("Concat", *self._errors.values(), axis=0, output=output)

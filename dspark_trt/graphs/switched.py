"""An int8 target with a switch for each of its Linear layers: activations of eight bits or of sixteen.

Both forms have the same first integer, and sixteen bits add a second one that counts `low_step` of the first. So the
step is an input of this graph: 0 gives exactly the form of eight bits.
"""

from __future__ import annotations

from dspark_trt.contract import bindings
from dspark_trt.graphs.builder import GraphBuilder
from dspark_trt.graphs.linears import Linears
from dspark_trt.graphs.weights import TensorSource


class SwitchedLinears(Linears):
    """Linear layers by rows, each of sixteen bits by its element of bindings.LOW_STEPS."""

    def __init__(self, builder: GraphBuilder, source: TensorSource) -> None:
        super().__init__(builder, source, "rows", "float32")
        self.weights: list[str] = []
        """The Linear layers of the graph, in its order, by the canonical names of their weights."""

    def _is_wide(self, weight: str) -> bool:
        return True

    def _low_step(self, weight: str) -> str:
        self.weights.append(weight)
        return self._builder.op("Gather", bindings.LOW_STEPS, self._builder.scalar(len(self.weights) - 1), axis=0)

"""Mixtures of experts in place of a layer's MLP: the router, the experts it chooses, and a shared one.

Two forms. On ONNX Runtime `com.microsoft.MoE`, whose CPU kernel is float32 throughout: it reads the experts that some
token chose and no others. With quantised weights `QMoE`; beside eight bits it quantises activations to eight bits
too, as all Linear layers do at these precisions, beside four it does not.
TensorRT has no kernel for either on most GPUs (its own layer is for a few architectures), so there the plain form:
batched products of all experts with all tokens, weighted by zero where an expert was not chosen. It is exact and
compiles everywhere, and a step reads every expert.

Shape letters: `T` packed tokens, `D` hidden, `E` experts, `I` width of one, `A` active experts of a token.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dspark_trt.checkpoints.layout import EXPERTS_DOWN, EXPERTS_UP
from dspark_trt.checkpoints.spec import ExpertsSpec
from dspark_trt.contract.dims import PORTABLE, Attention
from dspark_trt.errors import ExportError
from dspark_trt.graphs.builder import CONTRIB_DOMAIN, GraphBuilder
from dspark_trt.graphs.linears import Linears
from dspark_trt.graphs.numbers import Numbers
from dspark_trt.graphs.quantize import BLOCK_SIZE, LinearBits
from dspark_trt.graphs.weights import TensorSource

_NUM_UNUSED_INPUTS = 6  # of QMoE, before router_weights: fc3 with scales and bias, zero points of all three


class Experts:
    """`mlp` of the layers that have experts."""

    def __init__(
        self,
        builder: GraphBuilder,
        spec: ExpertsSpec,
        source: TensorSource,
        numbers: Numbers,
        *,
        bits: LinearBits,
        attention: Attention,
    ) -> None:
        """`attention`: the form that was asked for, which says for what the graph is."""
        self._builder = builder
        self._spec = spec
        self._source = source
        self._numbers = numbers
        self._bits = bits
        self._is_plain = attention in PORTABLE
        self._linear = Linears(builder, source, bits, numbers.model)
        self._exact_linear = Linears(builder, source, None, numbers.model)  # a router decides, in full precision

    def mlp(self, layer: int, x: str) -> str:
        """[T, D] -> [T, D], `x` already normalised."""
        module = f"layers.{layer}.mlp"
        scores = self._exact_linear(x, f"{module}.gate.weight")  # [T, E]
        if self._is_plain:
            mixed = self._all(layer, x, scores)
        elif self._bits is None:
            mixed = self._chosen(layer, x, scores)
        else:
            mixed = self._chosen_of_blocks(layer, x, scores)
        return mixed if self._spec.shared_intermediate_size is None else self._with_shared(module, x, mixed)

    def _chosen(self, layer: int, x: str, scores: str) -> str:
        builder = self._builder
        up, down = (self._stack(layer, name) for name in (EXPERTS_UP, EXPERTS_DOWN))
        return builder.op("MoE", x, scores, up, "", down, domain=CONTRIB_DOMAIN, **self._attributes())

    def _chosen_of_blocks(self, layer: int, x: str, scores: str) -> str:
        """QMoE normalises in any case, unless it is given what to weight the experts by."""
        spec, builder = self._spec, self._builder
        bits = self._bits if isinstance(self._bits, int) else 8  # no operator has experts quantised by rows
        inputs = [x, scores]
        for name in (EXPERTS_UP, EXPERTS_DOWN):
            weight = f"layers.{layer}.{name}"
            if self._source.shape(weight)[-1] % BLOCK_SIZE:
                raise ExportError(
                    f"{weight}: experts in {bits} bits need rows of a multiple of {BLOCK_SIZE}, found "
                    f"{list(self._source.shape(weight))}; choose --precision fp32"
                )
            blocks, scales = self._source.blocks(weight, bits)
            inputs += [builder.initializer(blocks), builder.initializer(scales), ""]
        if not spec.is_normalised:
            inputs += [""] * _NUM_UNUSED_INPUTS + [builder.op("Softmax", scores, axis=-1)]
        return builder.op(
            "QMoE",
            *inputs,
            domain=CONTRIB_DOMAIN,
            expert_weight_bits=bits,
            block_size=BLOCK_SIZE,
            **self._attributes(),
        )

    def _attributes(self) -> dict[str, Any]:
        return {
            "k": self._spec.num_active,
            "activation_type": "swiglu",
            "swiglu_fusion": 1,  # gate and up in turn
            "activation_alpha": 1.0,
            "activation_beta": 0.0,
            "normalize_routing_weights": int(self._spec.is_normalised),
        }

    def _all(self, layer: int, x: str, scores: str) -> str:
        """Every expert for every token, then the sum that the router weights."""
        builder, spec = self._builder, self._spec
        up, down = (
            builder.op("Transpose", self._stack(layer, name), perm=[0, 2, 1]) for name in (EXPERTS_UP, EXPERTS_DOWN)
        )
        products = builder.op("MatMul", builder.op("Unsqueeze", x, builder.vector(0)), up)  # [E, T, 2I]
        shape = builder.vector(0, 0, spec.intermediate_size, 2)
        pairs = builder.op("Reshape", products, shape)
        gate, lifted = (builder.op("Gather", pairs, builder.scalar(which), axis=3) for which in (0, 1))
        activated = builder.op("Mul", gate, builder.op("Sigmoid", gate))
        outputs = builder.op("MatMul", builder.op("Mul", activated, lifted), down)  # [E, T, D]
        weights = builder.op("Transpose", self._router_weights(scores), perm=[1, 0])  # [E, T]
        weighted = builder.op("Mul", outputs, builder.op("Unsqueeze", weights, builder.vector(2)))
        return builder.op("ReduceSum", weighted, builder.vector(0), keepdims=0)

    def _router_weights(self, scores: str) -> str:
        """[T, E], zero for experts that were not chosen; computed in float32."""
        builder, spec, numbers = self._builder, self._spec, self._numbers
        probs = builder.op("Softmax", numbers.cast(builder, scores, numbers.model, "float32"), axis=-1)
        values, chosen = builder.multi_op("TopK", probs, builder.vector(spec.num_active), outputs=(None, None), axis=-1)
        if spec.is_normalised:
            total = builder.op("ReduceSum", values, builder.vector(-1), keepdims=1)
            values = builder.op("Div", values, total)
        experts = builder.constant(np.arange(spec.num_experts, dtype=np.int64))
        is_chosen = builder.op("Equal", builder.op("Unsqueeze", chosen, builder.vector(2)), experts)  # [T, A, E]
        zero = builder.constant(np.zeros((), np.float32))
        spread = builder.op("Where", is_chosen, builder.op("Unsqueeze", values, builder.vector(2)), zero)
        weights = builder.op("ReduceSum", spread, builder.vector(1), keepdims=0)
        return numbers.cast(builder, weights, "float32", numbers.model)

    def _with_shared(self, module: str, x: str, mixed: str) -> str:
        builder = self._builder
        shared = f"{module}.shared_expert"
        gate, lifted = (self._linear(x, f"{shared}.{which}_proj.weight") for which in ("gate", "up"))
        activated = builder.op("Mul", gate, builder.op("Sigmoid", gate))
        output = self._linear(builder.op("Mul", activated, lifted), f"{shared}.down_proj.weight")
        openness = builder.op("Sigmoid", self._exact_linear(x, f"{module}.shared_expert_gate.weight"))  # [T, 1]
        return builder.op("Add", mixed, builder.op("Mul", openness, output))

    def _stack(self, layer: int, name: str) -> str:
        return self._builder.initializer(self._source.tensor(f"layers.{layer}.{name}", self._numbers.model))

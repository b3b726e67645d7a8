"""What target and drafter share: norms, and the parts of a decoder layer.

Shape letters: `T` packed tokens, `D` hidden, `N`/`K` query/KV heads, `H` head dim.
"""

from __future__ import annotations

import numpy as np

from dspark_trt.checkpoints.spec import DecoderSpec
from dspark_trt.contract.dims import FloatType
from dspark_trt.graphs.attention import AttentionEmitter
from dspark_trt.graphs.builder import GraphBuilder
from dspark_trt.graphs.experts import Experts
from dspark_trt.graphs.linears import Linears
from dspark_trt.graphs.numbers import NUMPY_TYPES, Numbers
from dspark_trt.graphs.rotary import Rotary
from dspark_trt.graphs.weights import TensorSource


class DecoderParts:
    """Decoder layers and their parts; attention, the seam of the backends, is given."""

    def __init__(
        self,
        builder: GraphBuilder,
        spec: DecoderSpec,
        source: TensorSource,
        numbers: Numbers,
        linear: Linears,
        *,
        positions: str,
        num_positions: int,
        experts: Experts | None = None,
    ) -> None:
        """`positions` [T] of the packed tokens, all below `num_positions`; `linear`: the Linear layers of `source`.

        `experts`: where the spec has some.
        """
        self._builder = builder
        self._spec = spec
        self._source = source
        self._numbers = numbers
        self._experts = experts
        self._linear = linear
        self._projections: dict[tuple[int, str, str], str] = {}
        shapes = [spec.shape_of(layer) for layer in range(spec.num_layers)]
        forms = dict.fromkeys((shape.rope, shape.head_dim) for shape in shapes)
        rotaries = {form: Rotary(builder, *form, numbers, positions, num_positions) for form in forms}
        self._rotaries = [rotaries[shape.rope, shape.head_dim] for shape in shapes]

    def embedded(self, x: str) -> str:
        """Rows of the embedding [T, D] -> what goes into the first layer."""
        if self._spec.gemma is None:
            return x
        scale = np.full(1, self._spec.hidden_size**0.5, np.float32)
        return self._builder.op("Mul", x, self._builder.constant(self._numbers.table(scale)))

    def layer(self, layer: int, x: str, attention: AttentionEmitter) -> str:
        """One whole decoder layer: its raw output, [T, D] -> [T, D]."""
        with self._builder.scope(f"layers.{layer}"):
            normed = self.norm(x, f"layers.{layer}.input_layernorm")
            attended = attention.attend(layer, self.query_key(layer, normed), self.value(layer, normed))
            return self.layer_output(layer, x, attended)

    def layer_output(self, layer: int, x: str, attended: str, *, stream: FloatType | None = None) -> str:
        """What the layer makes of its residual stream [T, D], once attention [T, N * H] is there: [T, D].
        `stream`: the element type of the residual stream (None: the model's)."""
        if self._spec.gemma is not None:
            return self._gemma_halves(layer, x, attended, stream)
        x = self._add(x, self.attention_output(layer, attended), stream)
        mlp = self.mlp(layer, self.norm(x, f"layers.{layer}.post_attention_layernorm", source=stream))
        return self._add(x, mlp, stream)

    def _add(self, x: str, output: str, stream: FloatType | None) -> str:
        """An output of the model's type to the residual stream."""
        model = self._numbers.model
        return self._builder.op("Add", x, self._numbers.cast(self._builder, output, model, stream or model))

    def _gemma_halves(self, layer: int, x: str, attended: str, stream: FloatType | None) -> str:
        """Both halves of a layer, each with a norm before and behind, and the scale of the layer's output."""
        name = f"layers.{layer}"
        output = self.norm(self.attention_output(layer, attended), f"{name}.post_attention_layernorm")
        x = self._add(x, output, stream)
        mlp = self.mlp(layer, self.norm(x, f"{name}.pre_feedforward_layernorm", source=stream))
        x = self._add(x, self.norm(mlp, f"{name}.post_feedforward_layernorm"), stream)
        scale = self._builder.initializer(self._source.tensor(f"{name}.layer_scalar", stream or self._numbers.model))
        return self._builder.op("Mul", x, scale)

    def linear(self, x: str, weight: str) -> str:
        """A product with a matrix that is not of a layer, without a bias."""
        return self._linear(x, weight)

    def norm(self, x: str, module: str, *, source: FloatType | None = None) -> str:
        """RMS norm over the last dimension, computed in float32, of `x` in the nominal type `source` (None:
        the model's)."""
        weight = self._builder.initializer(self._source.tensor(f"{module}.weight", "float32"))
        return self._norm_by(x, weight, source)

    def _norm_by(self, x: str, weight: str, source: FloatType | None = None) -> str:
        numbers = self._numbers
        wide = numbers.cast(self._builder, x, source or numbers.model, "float32")
        normed = self._builder.op("RMSNormalization", wide, weight, axis=-1, epsilon=self._spec.rms_norm_eps)
        return numbers.cast(self._builder, normed, "float32", numbers.model)

    def query_key(self, layer: int, x: str) -> str:
        """[T, D] -> [T, (N + K) * H], normalised per head where the family does so, and rotated."""
        num_heads, num_kv_heads = self._spec.num_heads, self._spec.shape_of(layer).num_kv_heads
        query = self._head_norm(layer, "q", self._project(layer, "q", x), num_heads)
        key = self._head_norm(layer, "k", self._project(layer, "k", x), num_kv_heads)
        both = self._builder.op("Concat", query, key, axis=1)
        return self._rotaries[layer].rotate(both, num_heads + num_kv_heads)

    def key(self, layer: int, x: str) -> str:
        """[T, D] -> [T, K * H], normalised per head where the family does so, and rotated."""
        num_kv_heads = self._spec.shape_of(layer).num_kv_heads
        normed = self._head_norm(layer, "k", self._project(layer, "k", x), num_kv_heads)
        return self._rotaries[layer].rotate(normed, num_kv_heads)

    def value(self, layer: int, x: str) -> str:
        """[T, D] -> [T, K * H]."""
        shape = self._spec.shape_of(layer)
        projected = self._project(layer, "k" if shape.is_value_of_key else "v", x)
        if self._spec.gemma is None:
            return projected
        heads = self._builder.op("Reshape", projected, self._builder.vector(0, shape.num_kv_heads, shape.head_dim))
        normed = self._norm_by(heads, self._builder.constant(np.ones(shape.head_dim, np.float32)))
        return self._builder.op("Reshape", normed, self._builder.vector(0, shape.num_kv_heads * shape.head_dim))

    def attention_output(self, layer: int, attended: str) -> str:
        """[T, N * H] -> [T, D]."""
        module = f"layers.{layer}.self_attn.o_proj"
        return self._linear(attended, f"{module}.weight", bias=f"{module}.bias" if self._spec.has_o_bias else None)

    def mlp(self, layer: int, x: str) -> str:
        """[T, D] -> [T, D]: down(activation(gate(x)) * up(x)), or that of experts; x already normalised."""
        if self._experts is not None and self._spec.experts_of(layer) is not None:
            return self._experts.mlp(layer, x)
        gate = self._mlp_linear(layer, "gate_proj", x)
        if self._spec.gemma is not None:
            activated = self._builder.op("Gelu", gate, approximate="tanh")
        else:  # not the operator Swish: ONNX Runtime expands it into four nodes, this pair becomes one
            activated = self._builder.op("Mul", gate, self._builder.op("Sigmoid", gate))
        gated = self._builder.op("Mul", activated, self._mlp_linear(layer, "up_proj", x))
        return self._mlp_linear(layer, "down_proj", gated)

    def _project(self, layer: int, which: str, x: str) -> str:
        key = (layer, which, x)
        if key not in self._projections:
            module = f"layers.{layer}.self_attn.{which}_proj"
            bias = f"{module}.bias" if self._spec.has_qkv_bias else None
            self._projections[key] = self._linear(x, f"{module}.weight", bias=bias)
        return self._projections[key]

    def _mlp_linear(self, layer: int, which: str, x: str) -> str:
        module = f"layers.{layer}.mlp.{which}"
        return self._linear(x, f"{module}.weight", bias=f"{module}.bias" if self._spec.has_mlp_bias else None)

    def _head_norm(self, layer: int, which: str, x: str, num_heads: int) -> str:
        if not self._spec.has_qk_norm:
            return x
        head_dim = self._spec.shape_of(layer).head_dim
        heads = self._builder.op("Reshape", x, self._builder.vector(0, num_heads, head_dim))
        normed = self.norm(heads, f"layers.{layer}.self_attn.{which}_norm")
        return self._builder.op("Reshape", normed, self._builder.vector(0, num_heads * head_dim))


def softcapped(
    builder: GraphBuilder, logits: str, cap: float, element_type: FloatType, output: str | None = None
) -> str:
    """Logits of that element type brought into (-cap, cap): cap * tanh(logits / cap)."""
    scale = builder.constant(np.array(cap, NUMPY_TYPES[element_type]))
    return builder.op("Mul", builder.op("Tanh", builder.op("Div", logits, scale)), scale, output=output)

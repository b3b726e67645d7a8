"""What target and drafter share: norms, and the parts of a decoder layer.

Shape letters: `T` packed tokens, `D` hidden, `N`/`K` query/KV heads, `H` head dim.
"""

from __future__ import annotations

from dspark_trt.checkpoints.spec import DecoderSpec
from dspark_trt.contract.dims import FloatType
from dspark_trt.graphs.attention import AttentionEmitter
from dspark_trt.graphs.builder import GraphBuilder
from dspark_trt.graphs.experts import Experts
from dspark_trt.graphs.linears import Linears
from dspark_trt.graphs.numbers import Numbers
from dspark_trt.graphs.quantize import LinearBits
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
        *,
        bits: LinearBits,
        positions: str,
        num_positions: int,
        experts: Experts | None = None,
        is_read_again: bool = False,
    ) -> None:
        """`positions` [T] of the packed tokens, all below `num_positions`; `is_read_again` as in `Linears`.

        `experts`: where the spec has some.
        """
        self._builder = builder
        self._spec = spec
        self._source = source
        self._numbers = numbers
        self._experts = experts
        self._linear = Linears(builder, source, bits, numbers.model, is_read_again=is_read_again)
        self._rotary = Rotary(builder, spec, numbers, positions, num_positions)

    def layer(self, layer: int, x: str, attention: AttentionEmitter) -> str:
        """One whole decoder layer: its raw output, [T, D] -> [T, D]."""
        with self._builder.scope(f"layers.{layer}"):
            normed = self.norm(x, f"layers.{layer}.input_layernorm")
            attended = attention.attend(layer, self.query_key(layer, normed), self.value(layer, normed))
            x = self._builder.op("Add", x, self.attention_output(layer, attended))
            mlp = self.mlp(layer, self.norm(x, f"layers.{layer}.post_attention_layernorm"))
            return self._builder.op("Add", x, mlp)

    def norm(self, x: str, module: str, *, source: FloatType | None = None) -> str:
        """RMS norm over the last dimension, computed in float32, of `x` in the nominal type `source` (None:
        the model's)."""
        numbers = self._numbers
        weight = self._builder.initializer(self._source.tensor(f"{module}.weight", "float32"))
        wide = numbers.cast(self._builder, x, source or numbers.model, "float32")
        normed = self._builder.op("RMSNormalization", wide, weight, axis=-1, epsilon=self._spec.rms_norm_eps)
        return numbers.cast(self._builder, normed, "float32", numbers.model)

    def query_key(self, layer: int, x: str) -> str:
        """[T, D] -> [T, (N + K) * H], normalised per head where the family does so, and rotated."""
        spec = self._spec
        query = self._head_norm(layer, "q", self._project(layer, "q", x), spec.num_heads)
        key = self._head_norm(layer, "k", self._project(layer, "k", x), spec.num_kv_heads)
        return self._rotary.rotate(self._builder.op("Concat", query, key, axis=1), spec.num_heads + spec.num_kv_heads)

    def key(self, layer: int, x: str) -> str:
        """[T, D] -> [T, K * H], normalised per head where the family does so, and rotated."""
        normed = self._head_norm(layer, "k", self._project(layer, "k", x), self._spec.num_kv_heads)
        return self._rotary.rotate(normed, self._spec.num_kv_heads)

    def value(self, layer: int, x: str) -> str:
        """[T, D] -> [T, K * H]."""
        return self._project(layer, "v", x)

    def attention_output(self, layer: int, attended: str) -> str:
        """[T, N * H] -> [T, D]."""
        module = f"layers.{layer}.self_attn.o_proj"
        return self._linear(attended, f"{module}.weight", bias=f"{module}.bias" if self._spec.has_o_bias else None)

    def mlp(self, layer: int, x: str) -> str:
        """[T, D] -> [T, D]: down(silu(gate(x)) * up(x)), or that of experts; x already normalised."""
        if self._experts is not None and self._spec.experts_of(layer) is not None:
            return self._experts.mlp(layer, x)
        gate = self._mlp_linear(layer, "gate_proj", x)
        # not the operator Swish: ONNX Runtime expands it into four nodes, this pair becomes one
        activated = self._builder.op("Mul", gate, self._builder.op("Sigmoid", gate))
        gated = self._builder.op("Mul", activated, self._mlp_linear(layer, "up_proj", x))
        return self._mlp_linear(layer, "down_proj", gated)

    def _project(self, layer: int, which: str, x: str) -> str:
        module = f"layers.{layer}.self_attn.{which}_proj"
        return self._linear(x, f"{module}.weight", bias=f"{module}.bias" if self._spec.has_qkv_bias else None)

    def _mlp_linear(self, layer: int, which: str, x: str) -> str:
        module = f"layers.{layer}.mlp.{which}"
        return self._linear(x, f"{module}.weight", bias=f"{module}.bias" if self._spec.has_mlp_bias else None)

    def _head_norm(self, layer: int, which: str, x: str, num_heads: int) -> str:
        if not self._spec.has_qk_norm:
            return x
        head_dim = self._spec.head_dim
        heads = self._builder.op("Reshape", x, self._builder.vector(0, num_heads, head_dim))
        normed = self.norm(heads, f"layers.{layer}.self_attn.{which}_norm")
        return self._builder.op("Reshape", normed, self._builder.vector(0, num_heads * head_dim))

"""What target and drafter share: Linear layers, norms, and the parts of a decoder layer.
Llama and Qwen3 dense families.

Shape letters: `T` packed tokens, `D` hidden, `N`/`K` query/KV heads, `H` head dim.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from dspark_trt.checkpoints.spec import DecoderSpec
from dspark_trt.contract.dims import FloatType
from dspark_trt.graphs.attention import AttentionEmitter
from dspark_trt.graphs.builder import CONTRIB_DOMAIN, GraphBuilder
from dspark_trt.graphs.numbers import Numbers
from dspark_trt.graphs.quantize import ACCURACY_LEVEL, BLOCK_SIZE, LinearBits
from dspark_trt.graphs.rotary import Rotary
from dspark_trt.graphs.weights import TensorSource


class Linears:
    """Linear layers on packed tokens, from one source of weights and in one precision."""

    def __init__(
        self,
        builder: GraphBuilder,
        source: TensorSource,
        bits: LinearBits,
        element_type: FloatType,
        *,
        is_read_again: bool = False,
    ) -> None:
        """`element_type` of weights and biases; that of block scales and of what goes in and out.

        is_read_again: several nodes of the graph read each weight. ONNX Runtime would pack it once for each of them, as
        many copies in memory; float32 weights that can be overridden stay memory-mapped, as they are.
        """
        self._builder = builder
        self._source = source
        self._bits = bits
        self._element_type = element_type
        self._is_overridable = is_read_again and element_type == "float32"  # in 16 bits TensorRT takes it for an input

    def __call__(self, x: str, weight: str, *, bias: str | None = None, output: str | None = None) -> str:
        """x [T, in], weight [out, in] -> [T, out]. Weights keep the checkpoint's layout, so that none is copied."""
        extra = [] if bias is None else [self._tensor(bias)]
        if self._bits is None:
            return self._product(x, self._tensor(weight), *extra, output=output)
        if self._bits == "rows":
            product = self._by_rows(x, weight, output=None if extra else output)
            return self._builder.op("Add", product, *extra, output=output) if extra else product
        blocks, scales = self._source.blocks(weight, self._bits)
        out_features, in_features = self._source.shape(weight)
        product = self._builder.op(
            "MatMulNBits",
            x,
            self._builder.initializer(blocks),
            self._builder.initializer(scales),
            domain=CONTRIB_DOMAIN,
            K=in_features,
            N=out_features,
            bits=self._bits,
            block_size=BLOCK_SIZE,
            accuracy_level=ACCURACY_LEVEL,
            output=None if extra else output,
        )
        return self._builder.op("Add", product, *extra, output=output) if extra else product

    def _product(self, *inputs: str, output: str | None) -> str:
        """Summed in float32, also in a float16 graph: a compiler is free to sum in the type of what goes in.

        TensorRT takes Casts around a product of float16 as that wish, and makes one kernel of all of it, which reads
        float16 (its documentation, precision control). Sums of bfloat16 are float32 in any case.
        """
        builder = self._builder
        if self._element_type != "float16":
            return builder.op("Gemm", *inputs, transB=1, output=output)
        wide = [builder.op("Cast", each, to=TensorProto.FLOAT) for each in inputs]
        return builder.op("Cast", builder.op("Gemm", *wide, transB=1), to=TensorProto.FLOAT16, output=output)

    def _by_rows(self, x: str, weight: str, *, output: str | None) -> str:
        """Activations of each row in eight bits around 128, integer product, then the scales of output and row.

        Not `DynamicQuantizeMatMul`, which takes one scale for the whole tensor: a row would depend on its neighbours.
        """
        builder = self._builder
        integers, scales = self._source.rows(weight)
        largest = builder.op("ReduceMax", builder.op("Abs", x), builder.vector(-1), keepdims=1)
        row_scale = builder.op("Div", builder.op("Max", largest, _float(builder, 1e-12)), _float(builder, 127))
        shifted = builder.op("Add", builder.op("Round", builder.op("Div", x, row_scale)), _float(builder, 128))
        product = builder.op(
            "MatMulIntegerToFloat",
            builder.op("Cast", shifted, to=TensorProto.UINT8),
            builder.initializer(integers),
            _float(builder, 1),
            builder.initializer(scales),
            builder.constant(np.array(128, np.uint8)),
            domain=CONTRIB_DOMAIN,
        )
        return builder.op("Mul", product, row_scale, output=output)

    def _tensor(self, name: str) -> str:
        tensor = self._source.tensor(name, self._element_type)
        return self._builder.initializer(tensor, can_be_overridden=self._is_overridable and len(tensor.dims) > 1)


def _float(builder: GraphBuilder, value: float) -> str:
    return builder.constant(np.array(value, np.float32))


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
        is_read_again: bool = False,
    ) -> None:
        """`positions` [T] of the packed tokens, all below `num_positions`; `is_read_again` as in `Linears`."""
        self._builder = builder
        self._spec = spec
        self._source = source
        self._numbers = numbers
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
        """[T, D] -> [T, D]: down(silu(gate(x)) * up(x)), x already normalised."""
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

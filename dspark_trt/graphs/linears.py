"""Linear layers of a graph, in float or with quantised weights. Shape letter: `T` packed tokens."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from dspark_trt.contract.dims import FloatType
from dspark_trt.graphs.builder import CONTRIB_DOMAIN, GraphBuilder
from dspark_trt.graphs.quantize import ACCURACY_LEVEL, BLOCK_SIZE, LinearBits
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
            return self._builder.op("Gemm", x, self._tensor(weight), *extra, transB=1, output=output)
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

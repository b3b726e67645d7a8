"""Linear layers of a graph, in float or with quantised weights. Shape letter: `T` packed tokens."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from dspark_trt.contract.dims import FloatType
from dspark_trt.graphs.builder import CONTRIB_DOMAIN, GraphBuilder
from dspark_trt.graphs.quantize import ACCURACY_LEVEL, BLOCK_SIZE, LinearBits, largest_integer, low_step
from dspark_trt.graphs.weights import TensorSource

_ZERO_POINT = np.array(128, np.uint8)


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
        wide_inputs: Collection[str] = (),
    ) -> None:
        """`element_type` of weights and biases; that of block scales and of what goes in and out.

        is_read_again: several nodes of the graph read each weight. ONNX Runtime would pack it once for each of them, as
        many copies in memory; float32 weights that can be overridden stay memory-mapped, as they are.
        wide_inputs: of weights quantised by rows, those whose activations get sixteen bits in place of eight.
        """
        self._builder = builder
        self._source = source
        self._bits = bits
        self._element_type = element_type
        self._is_overridable = is_read_again and element_type == "float32"  # in 16 bits TensorRT takes it for an input
        self._wide_inputs = wide_inputs
        self._quantised: dict[tuple[str, bool], _QuantisedRows] = {}  # by activations and whether they are wide

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
        """Activations of each row in eight bits, integer product, then the scales of output and row.

        Not `DynamicQuantizeMatMul`, which takes one scale for the whole tensor: a row would depend on its neighbours.
        """
        builder = self._builder
        integers, scales = self._source.rows(weight)
        rows = self._rows_of(x, self._is_wide(weight))
        product = builder.op(
            "MatMulIntegerToFloat",
            rows.integers,
            builder.initializer(integers),
            _float(builder, 1),
            builder.initializer(scales),
            builder.constant(_ZERO_POINT),
            domain=CONTRIB_DOMAIN,
        )
        if self._is_wide(weight):
            high, low = builder.multi_op("Split", product, outputs=(None, None), axis=0, num_outputs=2)
            product = builder.op("Add", high, builder.op("Mul", low, self._low_step(weight)))
        return builder.op("Mul", product, rows.scale, output=output)

    def _is_wide(self, weight: str) -> bool:
        return weight in self._wide_inputs

    def _low_step(self, weight: str) -> str:
        return _float(self._builder, low_step())

    def _rows_of(self, x: str, is_wide: bool) -> _QuantisedRows:
        """`x` [T, in] in integers, once for all weights that read it."""
        if (x, is_wide) not in self._quantised:
            self._quantised[x, is_wide] = _quantised_rows(self._builder, x, is_wide)
        return self._quantised[x, is_wide]

    def _tensor(self, name: str) -> str:
        tensor = self._source.tensor(name, self._element_type)
        return self._builder.initializer(tensor, can_be_overridden=self._is_overridable and len(tensor.dims) > 1)


def _float(builder: GraphBuilder, value: float) -> str:
    return builder.constant(np.array(value, np.float32))


@dataclass(frozen=True, slots=True)
class _QuantisedRows:
    integers: str  # uint8 [T, in] around the zero point; of wide ones [2T, in], all high parts before all low ones
    scale: str  # float32 [T, 1]


def _quantised_rows(builder: GraphBuilder, x: str, is_wide: bool) -> _QuantisedRows:
    """Each row of `x` [T, in] by its own largest magnitude, rounded half to even.

    Nothing of it looks at another row, and what is summed is integers: a row is the same in any batch, bit for bit.
    Wide: what rounding left of the first integer, in a second one that counts `low_step` of the first.
    """
    largest = builder.op("ReduceMax", builder.op("Abs", x), builder.vector(-1), keepdims=1)
    scale = builder.op("Div", builder.op("Max", largest, _float(builder, 1e-12)), _float(builder, largest_integer()))
    scaled = builder.op("Div", x, scale)
    zero_point = builder.constant(_ZERO_POINT)
    integers = builder.op("QuantizeLinear", scaled, _float(builder, 1), zero_point)
    if is_wide:
        left = builder.op("Sub", scaled, builder.op("Round", scaled))
        low = builder.op("QuantizeLinear", left, _float(builder, low_step()), zero_point)
        integers = builder.op("Concat", integers, low, axis=0)
    return _QuantisedRows(integers, scale)

"""What an engine computes in besides weights, caches and outputs: estimated from a graph and its profiles.

All contexts of all engines share one piece of memory (tensorrt/runtime), so the largest profile counts. Estimates are
held against what TensorRT-RTX said of real builds (tests/unit/engines/test_scratch.py): they are not below it.

Shape letters as in `bindings`, besides: `D` hidden, `F` widest output of a Linear layer, `N` query heads, `H` head dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import onnx
from dspark_trt_plugins.operation import workspace_offsets
from dspark_trt_plugins.registry import operations_in
from dspark_trt_plugins.row_attention.launches import RowAttentionOperation

from dspark_trt.checkpoints.layout import EXPERTS_UP, SINK
from dspark_trt.contract import bindings
from dspark_trt.contract.dims import MASK_SCOPE, NATIVE_HEAD_DIMS, DrafterDims, TargetDims
from dspark_trt.contract.page_plan import MOST_ELEMENTS
from dspark_trt.engines.tensorrt.compiler.profiles import Profile
from dspark_trt.errors import EngineBuildError

ELEMENT_BYTES: dict[bindings.ElementType, int] = {"int64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
_PRODUCTS_BYTES = 32 << 20  # of the compiler's own matrix products: 8 to 16 MB were seen for each graph
_WIDE_TENSORS = 3  # [T, F] that live at once: gate, up and their product
_HIDDEN_TENSORS = 4  # [T, D]
_SCORE_BYTES = 8  # of a query and a position: a mask or scores, and what comes of them


def scratch_bytes(model: onnx.ModelProto, dims: TargetDims | DrafterDims, profile: Profile) -> int:
    """Scratch memory of one profile of a graph with plugins."""
    size, extents = ELEMENT_BYTES[dims.element_type], {name: each.largest for name, each in profile.extents.items()}
    blocks = extents.get("R", 0) * (_slots(dims) if isinstance(dims, DrafterDims) else 0)
    num_tokens = extents.get("T", blocks)
    widths = _widths(model)
    normed = num_tokens * dims.hidden_size * ELEMENT_BYTES["float32"]
    wide = _WIDE_TENSORS * max((width for width in widths if width != dims.vocab_size), default=0)
    rows = num_tokens * (wide + _HIDDEN_TENSORS * dims.hidden_size) * size + normed
    logits = extents.get("L", blocks) * dims.vocab_size * size if dims.vocab_size in widths else 0
    attended = num_tokens * _attention_width(model, dims) * size
    padded = sum(prod(shape) for shape in _padded(model, dims, extents)) * size
    workspace = max((_workspace(operation, extents) for operation in operations_in(model)), default=0)
    masked, experts = _masked_bytes(model, dims, extents), _expert_bytes(model, num_tokens, size)
    return rows + logits + attended + padded + workspace + masked + experts + _PRODUCTS_BYTES


def check_elements(
    graph: str,
    inputs: Sequence[bindings.Binding],
    model: onnx.ModelProto,
    dims: TargetDims | DrafterDims,
    profile: Profile,
) -> None:
    """Raises EngineBuildError where a tensor of a profile has more elements than TensorRT counts."""
    extents = {name: each.largest for name, each in profile.extents.items()}
    shapes = {each.name: profile.shapes(each)[2] for each in inputs}
    shapes["logits"] = (extents.get("L", extents.get("R", 0)), dims.vocab_size)
    shapes |= {f"padded rows {index}": shape for index, shape in enumerate(_padded(model, dims, extents))}
    for name, shape in shapes.items():
        if prod(shape) > MOST_ELEMENTS:
            raise EngineBuildError(
                f"{graph}, profile {profile.name}: {name}: expected {MOST_ELEMENTS} elements or fewer, which is what "
                f"TensorRT counts, found {prod(shape)} in {list(shape)}; lower --max-batch-tokens, --max-requests or "
                "--max-seq-len"
            )


def _widths(model: onnx.ModelProto) -> set[int]:
    """Outputs of the Linear layers."""
    cast = {node.output[0]: node.input[0] for node in model.graph.node if node.op_type == "Cast"}
    weights = {node.input[1] for node in model.graph.node if node.op_type == "Gemm"}
    weights = {cast.get(name, name) for name in weights}
    return {tensor.dims[0] for tensor in model.graph.initializer if tensor.name in weights and len(tensor.dims) == 2}


def _attention_width(model: onnx.ModelProto, dims: TargetDims | DrafterDims) -> int:
    """Numbers of a token: queries and their answers, twice keys and values."""
    heads = [each.form.num_heads for each in operations_in(model) if isinstance(each, RowAttentionOperation)]
    return (2 * max(heads, default=0) + 4 * dims.cache.num_kv_heads) * dims.cache.head_dim


def _padded(
    model: onnx.ModelProto, dims: TargetDims | DrafterDims, extents: dict[str, int]
) -> Iterator[tuple[int, ...]]:
    """Where no kernel attends: queries and answers, new keys and values of every row group, [B, heads, S, H]; rows that
    are copied out of pages, [B, K, C, H], keys and values; and masks [B, S, C]."""
    cache, is_paged = dims.cache, bool(dims.cache.page_positions)
    gathered = {node.input[0] for node in model.graph.node if node.op_type == "Gather" and "kv_cache." in node.input[0]}
    layers = [int(name.removesuffix(".out").rpartition(".")[2]) for name in gathered]
    if not is_paged:
        layers = list(range(cache.num_layers))
    if not layers:
        return
    num_kv_heads, capacity, head_dim = max((cache.row_shape_of(layer) for layer in layers), key=prod)
    groups = [name.removeprefix("B_") for name in extents if name.startswith("B_")] or ["R"]
    num_heads = _num_rotated_heads(model)
    for group in groups:
        rows = extents.get(f"B_{group}", extents.get("R", 1))
        length = extents.get(f"S_{group}", _slots(dims) if isinstance(dims, DrafterDims) else 1)
        if is_paged:
            yield from [(rows, num_kv_heads, capacity, head_dim)] * 2
            yield rows, length, capacity
        yield from [(rows, num_heads, length, head_dim)] * 2


def _masked_bytes(model: onnx.ModelProto, dims: TargetDims | DrafterDims, extents: dict[str, int]) -> int:
    """Attention under a mask over whole rows: TensorRT copies keys and values of a layer, and makes the mask for all
    queries of a KV head. Products of matrices copy keys as float32, and have the scores besides."""
    if not any(f"{MASK_SCOPE}/" in node.name for node in model.graph.node):
        return 0
    size, num_bytes = ELEMENT_BYTES[dims.element_type], 0
    has_sinks = any(tensor.name.endswith(SINK.removeprefix("layers.{}")) for tensor in model.graph.initializer)
    rotated = _num_rotated_heads(model)
    for group in (name.removeprefix("B_") for name in extents if name.startswith("B_")):
        rows, length = (
            extents[f"B_{group}"],
            extents.get(f"S_{group}", _slots(dims) if isinstance(dims, DrafterDims) else 1),
        )
        of_layers = []
        for layer in range(dims.cache.num_layers):
            num_kv_heads, capacity, head_dim = dims.cache.row_shape_of(layer)
            is_product, num_heads = has_sinks or head_dim not in NATIVE_HEAD_DIMS, rotated - num_kv_heads
            num_copied = num_heads if num_kv_heads == 1 and not is_product else num_kv_heads
            copies = num_copied * capacity * head_dim * (size + (4 if is_product else size))
            scores = _SCORE_BYTES * (num_heads if is_product else num_heads // num_kv_heads) * length * capacity
            of_layers.append(rows * (copies + scores))
        num_bytes += max(of_layers)
    return num_bytes


def _expert_bytes(model: onnx.ModelProto, num_tokens: int, size: int) -> int:
    """Of a layer in the plain form, every expert for every token: gate and up, their product, and what leaves."""
    stacks = {tensor.name: tensor.dims for tensor in model.graph.initializer if len(tensor.dims) == 3}
    widths = [
        num_experts * (outputs + outputs // 2 + inputs)
        for name, (num_experts, outputs, inputs) in stacks.items()
        if name.endswith(EXPERTS_UP)
    ]
    return max(widths, default=0) * num_tokens * size


def _num_rotated_heads(model: onnx.ModelProto) -> int:
    """Of queries and keys together; of keys alone where nothing attends."""
    nodes = [node for node in model.graph.node if node.op_type == "RotaryEmbedding"]
    return max((_int_attribute(node, "num_heads") for node in nodes), default=0)


def _int_attribute(node: onnx.NodeProto, name: str) -> int:
    return int(next(attribute.i for attribute in node.attribute if attribute.name == name))


def _slots(dims: DrafterDims) -> int:
    """Positions of a request in a call of the draft graph."""
    return 1 if dims.is_slot_by_slot else dims.block_length


def _workspace(operation: object, extents: dict[str, int]) -> int:
    # of a language model's pass each draw is a request to MarkovHead
    sizes = dict.fromkeys("SBDEX", 0) | {"R": extents.get("L", 0)} | extents
    return workspace_offsets(operation.workspace, sizes)[1]  # type: ignore[attr-defined]

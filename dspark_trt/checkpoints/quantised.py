"""Which format quantised weights are in, so that those that nothing here reads are refused by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dspark_trt.errors import CheckpointError

# endings of tensor names that come together, by format; the first that is found counts
_TENSORS: Mapping[str, tuple[str, ...]] = {
    "GPTQ": (".qweight", ".g_idx"),
    "AWQ": (".qweight", ".qzeros"),
    "compressed-tensors": (".weight_packed",),
    "block-scaled FP8": (".weight_scale_inv",),
    "FP8 or INT8 with scales": (".weight_scale",),
    "bitsandbytes 4-bit": (".weight.absmax",),
    "bitsandbytes 8-bit": (".SCB",),
    "MLX": (".scales", ".biases"),
}
_REMEDY = "use the unquantised checkpoint, or a GGUF file of the target"


def refuse_quantised(values: Mapping[str, Any], names: Iterable[str], where: str) -> None:
    """Raises CheckpointError that names the format, from config.json's `values` or from the names of the tensors.

    Some folders lost the key of config.json that says so; their tensors tell.
    """
    stated = values.get("quantization_config") or values.get("compression_config")
    if isinstance(stated, Mapping) and (method := stated.get("quant_method")):
        raise CheckpointError(
            f"{where}: quantization_config: weights quantised by {str(method)[:40]!r} are not supported; {_REMEDY}"
        )
    if isinstance(values.get("quantization"), Mapping):
        raise CheckpointError(f"{where}: quantization: weights quantised by MLX are not supported; {_REMEDY}")
    endings = {ending for each in _TENSORS.values() for ending in each}
    found = {ending for name in names for ending in endings if name.endswith(ending)}
    for kind, needed in _TENSORS.items():
        if found.issuperset(needed):
            raise CheckpointError(
                f"{where}: the tensors *{' and *'.join(needed)} are those of weights in {kind} form, which is not "
                f"supported; {_REMEDY}"
            )

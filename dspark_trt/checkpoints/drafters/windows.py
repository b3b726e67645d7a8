"""What each layer of a block drafter sees, from the keys layer_types, sliding_window, causal and those of vLLM.

The rule of those who serve DFlash drafters: `is_causal`, or `causal`, holds for all layers; without it a sliding layer
is causal inside the block and a full one is not. vLLM's keys, which NVIDIA's and Xiaomi's exports have in
`dflash_config`: `use_swa` lets the layers that layer_types calls sliding, or else all of them, slide over
`swa_window_size` positions; `attention_sink_bias` says that every layer has a tensor of that name, a logit for each
head. Source: vLLM, SGLang and TensorRT-LLM, their DFlash models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from dspark_trt.checkpoints.drafters.description import without
from dspark_trt.checkpoints.families import FULL, SLIDING
from dspark_trt.checkpoints.spec import PLAIN_ATTENTION, BlockAttention
from dspark_trt.errors import CheckpointError

WINDOW_KEYS = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers")
CAUSAL_KEYS = ("is_causal", "causal")
SERVING_KEYS = ("use_swa", "swa_window_size", "attention_sink_bias")
_MAX_LAYERS = 1024


def read_windows(
    values: Mapping[str, Any],
    where: str,
    *,
    is_sliding_causal: bool,
    window_from: Literal["slot", "anchor"] = "slot",
) -> tuple[tuple[BlockAttention, ...], dict[str, Any]]:
    """Attention of every layer, and the configuration without the keys that said so.

    Args:
        is_sliding_causal: whether a sliding layer is causal where no key says it.
        window_from: how this dialect's trainer measures a window.

    Raises CheckpointError for contradicting keys and layer types that are neither full nor sliding.
    """
    has_sinks = _truth(values, "attention_sink_bias", where)
    slides = _truth(values, "use_swa", where)
    if slides:
        values = _with_window(values, where)
    values = without(values, "attention_sink_bias", *(SERVING_KEYS if slides else ()))
    layers, plain = _read_layers(values, where, is_sliding_causal=is_sliding_causal, window_from=window_from)
    if has_sinks:
        num_layers = values.get("num_hidden_layers")
        count = min(num_layers, _MAX_LAYERS) if isinstance(num_layers, int) else 0
        layers = tuple(replace(each, has_sink=True) for each in layers or (PLAIN_ATTENTION,) * count)
    return layers, plain


def _truth(values: Mapping[str, Any], key: str, where: str) -> bool:
    value = values.get(key)
    if not isinstance(value, bool | None):
        raise CheckpointError(f"{where}: {key}: expected true or false, found {value!r}; correct it")
    return bool(value)


def _with_window(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """use_swa and swa_window_size under the names of transformers."""
    window, other = values.get("swa_window_size"), values.get("sliding_window")
    if other is not None and other != window:
        raise CheckpointError(
            f"{where}: use_swa with swa_window_size = {window!r}, but sliding_window = {other!r}; remove the wrong one"
        )
    if all(values.get(key) is None for key in CAUSAL_KEYS):
        raise CheckpointError(
            f"{where}: use_swa without causal: loaders take its absence for opposite values; set causal in "
            "dflash_config as the drafter was trained"
        )
    types, num_layers = values.get("layer_types"), values.get("num_hidden_layers")
    if types is None or (isinstance(types, list) and SLIDING not in types):
        # a copy of the target's configuration calls all layers full, and is overruled
        types = [SLIDING] * min(num_layers, _MAX_LAYERS) if isinstance(num_layers, int) else None
    return {**values, "layer_types": types, "sliding_window": window, "use_sliding_window": True}


def _read_layers(
    values: Mapping[str, Any], where: str, *, is_sliding_causal: bool, window_from: Literal["slot", "anchor"]
) -> tuple[tuple[BlockAttention, ...], dict[str, Any]]:
    is_causal = _stated_causal(values, where)
    types = values.get("layer_types")
    if types is None:  # a window that is in use without them is refused where the decoder is read
        num_layers = values.get("num_hidden_layers")
        layers = num_layers if isinstance(num_layers, int) and is_causal else 0
        return (BlockAttention(is_causal=True),) * min(layers, _MAX_LAYERS), without(values, *CAUSAL_KEYS)
    if not isinstance(types, list) or len(types) != values.get("num_hidden_layers"):
        found = f"{len(types)} entries" if isinstance(types, list) else repr(types)
        raise CheckpointError(
            f"{where}: layer_types: expected one entry for each of the {values.get('num_hidden_layers')} layers "
            f"(num_hidden_layers), found {found}; correct one of them"
        )
    if unknown := sorted({str(each) for each in types} - {FULL, SLIDING}):
        raise CheckpointError(
            f"{where}: layer_types has {unknown}, which is not implemented; expected {FULL} or {SLIDING}"
        )
    window = _window(values, where) if SLIDING in types else None
    of_type = {
        FULL: PLAIN_ATTENTION if not is_causal else BlockAttention(is_causal=True),
        SLIDING: BlockAttention(
            is_causal=is_sliding_causal if is_causal is None else is_causal, window=window, window_from=window_from
        ),
    }
    return tuple(of_type[each] for each in types), without(values, *WINDOW_KEYS, *CAUSAL_KEYS)


def _stated_causal(values: Mapping[str, Any], where: str) -> bool | None:
    stated = {key: values[key] for key in CAUSAL_KEYS if values.get(key) is not None}
    if any(not isinstance(value, bool) for value in stated.values()):
        raise CheckpointError(f"{where}: {stated}: expected true or false; correct it")
    if len(set(stated.values())) > 1:
        raise CheckpointError(f"{where}: is_causal and causal contradict each other; remove the wrong one")
    return next(iter(stated.values()), None)


def _window(values: Mapping[str, Any], where: str) -> int:
    window = values.get("sliding_window")
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise CheckpointError(
            f"{where}: layer_types has sliding_attention, so sliding_window has to be a number of positions, found "
            f"{window!r}; take it from the training configuration"
        )
    if values.get("use_sliding_window") not in (None, True):
        raise CheckpointError(
            f"{where}: layer_types has sliding_attention, but use_sliding_window is not true: transformers drops "
            "the window then, and engines keep it. Set use_sliding_window to true if the drafter was trained with it"
        )
    return window

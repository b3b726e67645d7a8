"""Writes the target's graph. At int8 it is measured first which activations need sixteen bits (activation_bits.py).

What was chosen and why, and how far the finished graph is from float32 on prompts that had no part in the choice, is in
target_form.json.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dspark_trt.building.activation_bits import (
    MAX_TOKENS,
    SHARE_OF_ROUNDING,
    Choice,
    Distance,
    Reference,
    choose,
    prompts,
)
from dspark_trt.building.context import Context
from dspark_trt.contract.protocol import EngineLimits
from dspark_trt.graphs.target import write_switched_graph, write_target_graph
from dspark_trt.log import Progress, get_logger
from dspark_trt.text import TextCodec

logger = get_logger(__name__)

FORM_FILE = "target_form.json"


def write_target(context: Context, folder: Path, progress: Progress) -> None:
    """target.onnx and its weights, and at int8 target_form.json."""
    if context.precision != "int8":
        _write(context, folder)
        return
    from dspark_trt.engines.onnxruntime.engines import OnnxRuntimeSettings, OnnxRuntimeTargetEngine
    from dspark_trt.engines.onnxruntime.switched import SwitchedTargetEngine

    settings = OnnxRuntimeSettings(num_threads=context.recipe.num_threads)
    encode = TextCodec.load(context.output / "checkpoints" / "tokenizer").encode_prompt
    most = min(context.limits.max_batch_tokens, context.limits.max_seq_len, MAX_TOKENS)
    limits = EngineLimits(max_requests=1, max_seq_len=most, max_batch_tokens=most)
    gamma = context.draft_source.gamma
    with tempfile.TemporaryDirectory(dir=folder) as name:
        exact, switched = Path(name) / "exact", Path(name) / "switched"
        exact.mkdir()
        switched.mkdir()
        write_target_graph(
            context.target,
            exact,
            taps=(),
            limits=limits,
            gamma=gamma,
            precision="fp32",
            attention="gqa",
            is_mapped=True,
        )
        engine = OnnxRuntimeTargetEngine(exact, settings)
        fit, held_out = (Reference(prompts(encode, split, most), engine) for split in ("fit", "held_out"))
        del engine  # the weights of one at a time are enough
        progress(0.2)
        layers = write_switched_graph(context.target, switched, limits=limits, gamma=gamma)
        choice = choose(
            layers,
            SwitchedTargetEngine(switched, len(layers), settings),
            fit,
            lambda fraction: progress(0.2 + 0.6 * fraction),
        )
    _write(context, folder, choice.wide_inputs)
    progress(0.9)
    report = _report(choice, held_out.distance(OnnxRuntimeTargetEngine(folder, settings)))
    logger.info("target: %s", described(report))
    (folder / FORM_FILE).write_text(json.dumps(report, indent=1) + "\n")


def described(report: dict[str, Any]) -> str:
    """target_form.json in a line."""
    found, wide = report["distance_from_float32"], report["sixteen_bits"]
    counts = f"{report['num_wide_layers']} of {report['num_layers']} Linear layers"
    needed = f" (above all {'; '.join(wide[-3:])})" if wide else ""  # they are in the order of their need
    kl, before = found["kl"], report["eight_bits_everywhere"]["kl"]
    agreement = f"{100 * found['top1_agreement']:.1f} % of {found['num_tokens']} positions of held-out prompts"
    return (
        f"{counts} read activations of 16 bits{needed}, the others of 8; KL against float32 {kl:.4f} (8 bits "
        f"everywhere {before:.4f}), the same most likely token at {agreement}"
    )


def _write(context: Context, folder: Path, wide_inputs: Collection[str] = ()) -> None:
    drafter = context.drafter
    write_target_graph(
        context.target,
        folder,
        taps=context.draft_source.target_layer_ids,
        norm_last_tap=drafter is not None and drafter.spec.is_last_tap_normed,
        limits=context.limits,
        gamma=context.draft_source.gamma,
        precision=context.precision,
        attention="paged" if context.is_on_device else "gqa",
        wide_inputs=wide_inputs,
    )


def _report(choice: Choice, found: Distance) -> dict[str, Any]:
    return {
        "precision": "int8",
        "num_layers": choice.num_layers,
        "num_wide_layers": len(choice.wide_inputs),
        "sixteen_bits": list(choice.wide),
        "distance_from_float32": _rounded(found),
        "share_of_rounding": SHARE_OF_ROUNDING,
        "sixteen_bits_everywhere": _rounded(choice.sixteen_everywhere),
        "eight_bits_everywhere": _rounded(choice.eight_everywhere),
        "kl_added_by_eight_bits": {name: round(value, 6) for name, value in choice.added_kl.items()},
    }


def _rounded(distance: Distance) -> dict[str, float]:
    return {name: round(value, 6) for name, value in asdict(distance).items()}

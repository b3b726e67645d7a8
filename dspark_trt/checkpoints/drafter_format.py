"""Which drafter format a config.json is, so that every format but DeepSpec's is refused by its name.

The formats differ in things that no tensor shows: whether slot 0 of the block predicts (anchor first) or stands for the
anchor (mask first), and whether a tap id counts a layer's output or its input. A wrong guess drafts badly without an
error.
"""

from __future__ import annotations

from typing import Any

from dspark_trt.checkpoints.config import architectures_of
from dspark_trt.errors import CheckpointError, abridged

ARCHITECTURE = "Qwen3DSparkModel"
_USE = (
    f"expected DeepSpec's format (architectures [{ARCHITECTURE!r}], for example deepseek-ai/dspark_qwen3_8b_block7): "
    "use such a drafter, or export yours in that format"
)


def refuse_other_formats(values: dict[str, Any], where: str) -> None:
    """Raises CheckpointError that names the format, unless it is DeepSpec's Qwen3DSparkModel, anchor first."""
    if name := _other_format(values):
        raise CheckpointError(f"{where}: this drafter is in {name}, which is not supported; {_USE}")
    if values.get("sample_from_anchor") is False or values.get("dspark_bonus_anchor") is True:
        raise CheckpointError(
            f"{where}: sample_from_anchor is false (slot 0 of the block is the anchor itself); only anchor-first "
            "drafters are supported, where slot 0 predicts the token after the anchor"
        )
    if (draft_vocab := values.get("draft_vocab_size")) not in (None, values.get("vocab_size")):
        raise CheckpointError(
            f"{where}: draft_vocab_size = {abridged(draft_vocab)} is not vocab_size = "
            f"{abridged(values.get('vocab_size'))}; a reduced draft vocabulary (d2t, t2d) is not "
            "supported, use a drafter of the full vocabulary"
        )
    if (runtime := values.get("runtime_block_size")) not in (None, values.get("block_size")):
        raise CheckpointError(
            f"{where}: runtime_block_size = {abridged(runtime)} is not block_size = "
            f"{abridged(values.get('block_size'))}; remove it to draft whole blocks"
        )


def _other_format(values: dict[str, Any]) -> str | None:
    architecture = " ".join(architectures_of(values) or ["none"])
    if "speculators_model_type" in values or "speculators_config" in values or "DSparkSpeculator" in architecture:
        return "the speculators format (layer ids counted from the embedding, reduced draft vocabulary)"
    if "Eagle" in architecture or "ttt_length" in values:
        return f"the EAGLE-3 format ({architecture})"
    if "dflash_config" in values:
        settings = values["dflash_config"]
        is_specforge = isinstance(settings, dict) and settings.get("projector_type") == "dspark"
        return "SpecForge's DSpark format (dflash_config)" if is_specforge else "z-lab's DFlash format (mask first)"
    if architecture == "DFlashDraftModel":
        return "z-lab's DFlash format (mask first)"
    if "Gemma4" in architecture:
        return f"DeepSpec's Gemma 4 form ({architecture}), another decoder layer"
    if "dspark_block_size" in values or "DeepseekV4" in architecture:
        return f"the DeepSeek-V4 form ({architecture}), a drafter inside its target"
    if architecture != ARCHITECTURE:
        return f"the format {architecture}"
    if values.get("model_type") != "qwen3":
        return f"{ARCHITECTURE} with model_type {abridged(values.get('model_type'))} (expected 'qwen3')"
    return None

"""Which dialect a drafter's config.json is written in. Every other format is refused by its name.

A wrong guess drafts badly without an error, so nothing is guessed.
"""

from __future__ import annotations

from typing import Any

from dspark_trt.checkpoints.config import architectures_of
from dspark_trt.checkpoints.drafters import deepspec, dflash, speculators
from dspark_trt.checkpoints.drafters.block import BlockReader
from dspark_trt.checkpoints.drafters.description import Description
from dspark_trt.errors import CheckpointError

_USE = (
    "expected a block drafter (DSpark or DFlash) of DeepSpec, speculators, SpecForge, NeMo or z-lab, an EAGLE-3 "
    "drafter of DeepSpec, speculators, SpecForge, AngelSlim or EAGLE, DART, PARD, Medusa or a small model, for "
    "example deepseek-ai/dspark_qwen3_8b_block7"
)
_GEMMA4_TYPES = ("gemma4_text", "gemma4_unified_text")
_SPECULATORS = {"dspark": speculators.read, "dflash": speculators.read}
_ARCHITECTURES: dict[str, BlockReader] = {
    deepspec.ARCHITECTURE: deepspec.read,
    deepspec.GEMMA4_ARCHITECTURE: deepspec.read_gemma4,
    "DFlashDraftModel": dflash.read_zlab,
    "DSparkDraftModel": dflash.read_specforge,
    "Qwen3DFlashDraftModel": dflash.read_nemo,
}


def block_reader(values: dict[str, Any], where: str) -> BlockReader:
    """What reads this configuration. Raises CheckpointError that names its format where nothing here does."""
    if name := _other_format(values):
        raise CheckpointError(f"{where}: this drafter is in {name}, which is not supported; {_USE}")
    kind = values.get("speculators_model_type")
    return _SPECULATORS[kind] if kind is not None else _ARCHITECTURES[_architecture(values)]


def read_description(values: dict[str, Any], where: str) -> Description:
    """What the configuration of a block drafter says. Raises CheckpointError as `block_reader` and the dialects do."""
    return block_reader(values, where)(values, where)


def _architecture(values: dict[str, Any]) -> str:
    return " ".join(architectures_of(values) or ["none"])


def _other_format(values: dict[str, Any]) -> str | None:
    architecture, kind = _architecture(values), values.get("speculators_model_type")
    projector = (values["dflash_config"] or {}) if isinstance(values.get("dflash_config"), dict) else {}
    if str(kind).startswith("peagle") or "PEagle" in architecture:
        return f"the P-EAGLE format ({architecture})"
    if str(kind).startswith("eagle"):
        return f"the form of EAGLE-1 or 2 ({architecture})"
    if "Eagle" in architecture or "ttt_length" in values:
        return f"an EAGLE form that is not read ({architecture})"
    if "Medusa" in architecture or kind == "medusa":
        return f"a Medusa form that is not read ({architecture}; expected medusa_num_heads, or MedusaModel of vLLM)"
    if "Hydra" in architecture or kind == "hydra" or "hydra_num_heads" in values:
        return "the Hydra format (heads that see the drafts before them)"
    if "pard_token" in values or "Pard" in architecture or str(kind).startswith("pard"):
        return f"a PARD form that is not read ({architecture}; expected a target family's, as LlamaForCausalLM)"
    if "Assistant" in architecture or str(values.get("model_type")).endswith("_assistant"):
        return (
            f"the form of a Gemma 4 assistant ({architecture}), an MTP module that reads its target's keys and values"
        )
    if "MTP" in architecture or "NextN" in architecture or str(kind) in ("mtp", "fast_mtp", "fastmtp"):
        return f"the form of an MTP module ({architecture})"
    has_modules = _number(values, "num_nextn_predict_layers") or _number(values, "mtp_num_hidden_layers")
    if has_modules and architecture not in _ARCHITECTURES:  # a drafter's configuration may be a copy of its target's
        return f"the form of a target with MTP modules inside ({architecture})"
    if kind is not None:
        return None if isinstance(kind, str) and kind in _SPECULATORS else f"the speculators format of type {kind!r}"
    if "speculators_config" in values or architecture.endswith("Speculator"):
        return "the speculators format without speculators_model_type, the key that says which drafter it is"
    if "dspark_config" in values:
        return "SGLang's form with dspark_config"
    if "DFlash2" in architecture or "selector_rank" in projector:
        return f"the DFlash2 format ({architecture})"
    if "Domino" in architecture or projector.get("projector_type") == "domino":
        return f"the Domino format ({architecture})"
    if architecture == "DFlashDraftModel" and projector.get("projector_type") == "dspark":
        return "DFlashDraftModel with projector_type 'dspark' (SpecForge's name for that is DSparkDraftModel)"
    if "dspark_block_size" in values or "DeepseekV4" in architecture:
        return f"the DeepSeek-V4 form ({architecture}), a drafter inside its target"
    if architecture not in _ARCHITECTURES:
        return f"the format {architecture}"
    expected = _GEMMA4_TYPES if architecture == deepspec.GEMMA4_ARCHITECTURE else ("qwen3", "dspark")
    if values.get("model_type") not in expected:
        return f"{architecture} with model_type {values.get('model_type')!r} (expected {expected[0]!r})"
    return None


def _number(values: dict[str, Any], key: str) -> bool:
    value = values.get(key)
    return isinstance(value, int) and value > 0

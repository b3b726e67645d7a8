"""Every drafter format that is known and not supported is refused by its name, and the README names it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dspark_trt.checkpoints.drafter import read_drafter, read_drafter_spec
from dspark_trt.checkpoints.spec import TargetCheckpoint
from dspark_trt.checkpoints.target import read_target
from dspark_trt.errors import CheckpointError
from tests.support.drafter_dialects import write_dialect
from tests.support.factories import write_target

README = Path(__file__).parents[3] / "README.md"
# (keys laid over a DeepSpec configuration, how the refusal names the format, how the README does)
FORMATS: list[tuple[dict[str, Any], str, str]] = [
    ({"architectures": ["EagleSpeculator"], "speculators_model_type": "eagle"}, "EAGLE-1 or 2", "EAGLE-1 and 2"),
    ({"architectures": ["PEagleSpeculator"], "speculators_model_type": "peagle"}, "the P-EAGLE format", "P-EAGLE"),
    ({"architectures": ["Eagle2ForCausalLM"]}, "an EAGLE form that is not read", "EAGLE-1 and 2"),
    ({"architectures": ["HydraForCausalLM"]}, "the Hydra format", "Hydra"),
    ({"hydra_num_heads": 4}, "the Hydra format", "Hydra"),
    ({"architectures": ["MedusaForCausalLM"]}, "a Medusa form", "inside their target"),
    ({"architectures": ["PardForCausalLM"], "pard_token": 90}, "a PARD form", "PARD-2"),
    ({"architectures": ["Qwen3MTPModel"]}, "an MTP module", "MTP modules"),
    ({"architectures": ["MiMoV2MTPModel"], "model_type": "mimo_v2_mtp"}, "an MTP module", "MiMo-V2"),
    ({"architectures": ["DeepseekV3ForCausalLMNextN"]}, "an MTP module", "DeepSeek"),
    ({"architectures": ["MTPSpeculator"], "speculators_model_type": "mtp"}, "an MTP module", "MTP modules"),
    (
        {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_nextn_predict_layers": 1},
        r"a target with MTP modules inside \(DeepseekV3ForCausalLM\)",
        "DeepSeek-V3",
    ),
    (
        {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "num_nextn_predict_layers": 1},
        r"a target with MTP modules inside \(Glm4MoeForCausalLM\)",
        "GLM-4-MoE",
    ),
    (
        {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5", "mtp_num_hidden_layers": 1},
        r"a target with MTP modules inside \(Qwen3_5ForCausalLM\)",
        "Qwen3-Next",
    ),
    (
        {"architectures": ["Gemma4UnifiedAssistantForCausalLM"], "model_type": "gemma4_unified_assistant"},
        "a Gemma 4 assistant .* reads its target's keys and values",
        "Gemma 4's assistants",
    ),
    ({"architectures": ["X"], "speculators_model_type": "mlp"}, "the speculators format of type 'mlp'", ""),
    ({"architectures": ["DSparkSpeculator"]}, "speculators format without speculators_model_type", ""),
    ({"architectures": ["DFlash2DraftModel"]}, "DFlash2", "DFlash2"),
    ({"architectures": ["DFlashDraftModel"], "dflash_config": {"selector_rank": 4}}, "DFlash2", "DFlash2"),
    ({"architectures": ["DominoDraftModel"]}, "Domino", "Domino"),
    ({"architectures": ["DFlashDraftModel"], "dflash_config": {"projector_type": "domino"}}, "Domino", "Domino"),
    ({"architectures": ["DFlashDraftModel"], "dflash_config": {"projector_type": "dspark"}}, "DSparkDraftModel", ""),
    ({"dspark_config": {"block_size": 7}}, "SGLang's form with dspark_config", "`dspark_config`"),
    ({"architectures": ["Gemma4DSparkModel"]}, "Gemma4DSparkModel with model_type .qwen3.", ""),
    ({"architectures": ["DeepseekV4ForCausalLM"], "dspark_block_size": 5}, "DeepSeek-V4", "DeepSeek-V4"),
    ({"architectures": ["DeepseekV4DSparkModel"]}, "DeepSeek-V4", "DeepSeek-V4"),
    ({"architectures": ["KimiK3DSparkModel"]}, "the format KimiK3DSparkModel", "Kimi"),
    ({"architectures": ["Glm5_2DSparkModel"]}, "the format Glm5_2DSparkModel", "GLM-5"),
    ({"architectures": ["Lfm2DSparkDraftModel"]}, "the format Lfm2DSparkDraftModel", "LFM2"),
    ({"architectures": ["LagunaDFlashModel"]}, "the format LagunaDFlashModel", ""),
    ({"architectures": None}, "the format none", ""),
    ({"model_type": "llama"}, "model_type 'llama'", ""),
]


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(target_folder: Path) -> TargetCheckpoint:
    return read_target(str(target_folder))


@pytest.mark.parametrize(("extra", "name", "in_readme"), FORMATS)
def test_every_other_format_is_refused_by_its_name(
    tmp_path: Path, target_folder: Path, target: TargetCheckpoint, extra: dict[str, Any], name: str, in_readme: str
) -> None:
    folder = write_dialect(tmp_path / "drafter", target_folder, "deepspec", extra=extra)
    with pytest.raises(CheckpointError, match=f"{name}.*not supported"):
        read_drafter(str(folder), target)
    with pytest.raises(CheckpointError, match=f"{name}.*not supported"):
        read_drafter_spec(str(folder), target.spec)
    _, _, refused = README.read_text().partition("Refused by name: EAGLE-1")
    assert in_readme in "EAGLE-1" + refused.partition("\n\n## Use it")[0]


@pytest.mark.parametrize(
    ("quantization", "name"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}, "modelopt"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ({"quantization": {"group_size": 64, "bits": 4}}, "MLX"),
    ],
)
def test_quantised_drafters_are_refused_by_the_name_of_their_format(
    tmp_path: Path, target_folder: Path, target: TargetCheckpoint, quantization: dict[str, Any], name: str
) -> None:
    folder = write_dialect(tmp_path / "drafter", target_folder, "deepspec", extra=quantization)
    with pytest.raises(CheckpointError, match=name):
        read_drafter(str(folder), target)

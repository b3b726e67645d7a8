"""EAGLE-3, Medusa and a language model on engines that TensorRT compiled here, with CUDA graphs, against the float32
oracles. Nothing of this has run yet: the tests beside it were written without a GPU too."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark_trt.checkpoints.drafter import read_drafter
from dspark_trt.checkpoints.spec import DrafterCheckpoint, TargetCheckpoint
from dspark_trt.checkpoints.target import read_target
from dspark_trt.engines.device.engines import DeviceEngines
from dspark_trt.engines.settings import ENGINE_FOLDER, EngineSettings
from dspark_trt.engines.tensorrt.compiler.build import CompileSettings, compile_graphs
from dspark_trt.engines.tensorrt.engines import open_tensorrt_engines
from dspark_trt.engines.tensorrt.library import LIBRARIES, SUPPORTED_SMS, Library
from dspark_trt.reference.engines import open_reference_engines
from tests.engine.test_onnxruntime_drafter import Contexts
from tests.support.device_cases import LIMITS, VOCABULARY
from tests.support.eagle3_dialects import write_eagle3
from tests.support.factories import write_target
from tests.support.family_checks import check_a_model_that_drafts_for_itself, check_first_drafts
from tests.support.medusa_forms import MedusaOracle, random_heads, write_medusa
from tests.support.rtx_graphs import export

pytestmark = pytest.mark.gpu
LIBRARY: Library = "tensorrt" if find_spec("tensorrt") else "tensorrt_rtx"
SM = 10 * torch.cuda.get_device_capability()[0] + torch.cuda.get_device_capability()[1]
if SM not in SUPPORTED_SMS[LIBRARY]:
    pytest.skip(f"{LIBRARY} makes no code for SM {SM}", allow_module_level=True)

LARGEST_ERROR = 0.05  # of bfloat16
SIZES: dict[str, Any] = {"hidden": 128, "intermediate": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "layers": 3}


def open_pair(folder: Path, target: Path, drafter: Path) -> tuple[DeviceEngines, TargetCheckpoint, DrafterCheckpoint]:
    graphs, engines = folder / "graphs", folder / ENGINE_FOLDER
    export(target, drafter, graphs, LIMITS, "bf16")
    engines.mkdir()
    sms = (SM,) if LIBRARIES[LIBRARY].takes_sms else ()
    compile_graphs(graphs, engines, CompileSettings(LIBRARY, sms=sms))
    opened = open_tensorrt_engines(folder, EngineSettings(backend=LIBRARY, sms=(SM,)))
    checkpoint = read_target(str(target))
    return opened, checkpoint, read_drafter(str(drafter), checkpoint)


def test_eagle3_drafts_are_near_the_oracles(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", family="qwen3", **SIZES)
    engines, *pair = open_pair(
        tmp_path, target, write_eagle3(tmp_path / "drafter", target, "deepspec", layer_ids=(0, 2))
    )
    oracle = open_reference_engines(*pair, limits=LIMITS)[1]
    contexts = Contexts(engines.drafter, oracle, tap_width=2 * SIZES["hidden"], seed=3)
    check_first_drafts(engines, oracle, contexts, LARGEST_ERROR)


def test_medusa_drafts_are_near_the_oracles(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", family="qwen3", **SIZES)
    heads = random_heads(target, num_heads=3)
    engines, *_ = open_pair(tmp_path, target, write_medusa(tmp_path / "drafter", heads))
    oracle = MedusaOracle(heads, LIMITS)
    contexts = Contexts(engines.drafter, oracle, tap_width=SIZES["hidden"], seed=3)
    check_first_drafts(engines, oracle, contexts, LARGEST_ERROR)


def test_a_target_that_drafts_for_itself_accepts_nearly_every_draft(tmp_path: Path) -> None:
    """All of them, but where two logits tie in bfloat16."""
    target = write_target(tmp_path / "target", family="qwen3", vocab_size=VOCABULARY, **SIZES)
    engines, *_ = open_pair(tmp_path, target, target)
    check_a_model_that_drafts_for_itself(engines, 0.9)

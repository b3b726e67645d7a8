"""A finished build directory, opened: engines, step table, temperatures and text codec,
ready to make a decoding loop."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dspark_trt.building.finished import read_finished
from dspark_trt.building.manifest import check_outputs
from dspark_trt.building.recipe import BuildRecipe
from dspark_trt.building.reprofile import table_for_here
from dspark_trt.calibration.file import CALIBRATION_FILE, load_calibration
from dspark_trt.checkpoints.spec import DraftSource, TargetSpec
from dspark_trt.checkpoints.spec_json import read_draft_source, target_spec_from_json
from dspark_trt.contract.acceptance import AcceptEngine
from dspark_trt.contract.calibration import Calibration
from dspark_trt.contract.lookup import LookupAcceptance
from dspark_trt.contract.protocol import DraftEngine, PageLimits, StepEngine, TargetEngine
from dspark_trt.contract.scheduler import DEFAULT_MAX_STRETCH, SchedulerConfig
from dspark_trt.engines.open import check_device, open_engines
from dspark_trt.runtime.loop import DecodingLoop, OnVerified
from dspark_trt.runtime.request import SamplingParams
from dspark_trt.steptable.table import StepTable
from dspark_trt.text import TextCodec


@dataclass(frozen=True, slots=True)
class Deployment:
    """One process's engines. They belong to one loop at a time."""

    recipe: BuildRecipe
    target_spec: TargetSpec
    drafter_spec: DraftSource
    target: TargetEngine
    drafter: DraftEngine | None  # None: drafts are copied from each request's own text
    step: StepEngine | None
    acceptance: AcceptEngine | None  # None: the runtime accepts, slot by slot
    pages: PageLimits | None  # of engines whose rows share pages
    step_table: StepTable
    calibration: Calibration
    lookup: LookupAcceptance | None  # None: no drafts are copied from a request's own text
    codec: TextCodec

    @property
    def gamma(self) -> int:
        """Drafts of a request that a step verifies at most."""
        return self.drafter_spec.gamma

    def make_loop(
        self,
        scheduler: SchedulerConfig,
        *,
        target: TargetEngine | None = None,
        drafter: DraftEngine | None = None,
        prefix_cache: bool = False,
        on_verified: OnVerified | None = None,
        max_stretch: float = DEFAULT_MAX_STRETCH,
    ) -> DecodingLoop:
        """A loop over the deployment's engines, or over wrappers of them (a measurement, a trace),
        which then see every call. `prefix_cache`: only for a loop that has the engines to itself."""
        is_wrapped = target is not None or drafter is not None
        return DecodingLoop(
            target=target or self.target,
            drafter=drafter or self.drafter,
            step_engine=None if is_wrapped else self.step,
            acceptance=self.acceptance,
            step_table=self.step_table,
            calibration=self.calibration,
            lookup=self.lookup,
            keeps_trajectories=self.drafter_spec.kind == "lookahead",
            eos_token_ids=self.target_spec.eos_token_ids,
            decode=self.codec.decode,
            scheduler=scheduler,
            pages=self.pages,
            prefix_cache=prefix_cache,
            on_verified=on_verified,
            max_stretch=max_stretch,
        )

    def sampling_params(self, **given: Any) -> SamplingParams:
        """What was given, over the checkpoint's generation_config.json, over the runtime's defaults; None: not given.

        top_k -1 and top_p 0 mean "off" to clients of TensorRT-LLM and vLLM. A stop string that is a special token ends
        the text as that token, which no text shows.
        """
        values = {name: value for name, value in given.items() if value is not None}
        if values.get("top_k") == -1:
            values["top_k"] = 0
        if values.get("top_p") == 0.0:
            values["top_p"] = 1.0
        special_ids = [self.codec.special_token_id(word) for word in values.get("stop_strings", ())]
        if stop_ids := tuple(token_id for token_id in special_ids if token_id is not None):
            values["stop_token_ids"] = (*values.get("stop_token_ids", ()), *stop_ids)
        return SamplingParams(**asdict(self.target_spec.generation_defaults) | values)


def load_deployment(folder: Path, *, step_table: Path | None = None) -> Deployment:
    """Open the build in `folder` after checking its chain (sizes and times, not bytes)
    and that its engines are for this machine.

    step_table: the file of the table that prices steps; None: the build's own, or one that was measured beside it.

    Raises ManifestError when the build is unfinished, edited or mixed from several builds; EnvironmentMissingError when
    the engine's package or GPU is missing; EngineBuildError when an engine cannot be opened.
    """
    summary, stages = read_finished(folder)
    check_device(folder)  # before the files of an engine of many gigabytes are looked at
    for name, manifest in stages.items():
        if name != "triton_model_repo":  # an operator may edit its config.pbtxt
            check_outputs(folder / name, manifest)
    checkpoints = folder / "checkpoints"
    table = table_for_here(folder, summary) if step_table is None else StepTable.load(step_table)
    engines = open_engines(
        folder,
        use_cuda_graphs=summary.recipe.uses_cuda_graphs,
        gpu_memory_utilization=summary.recipe.gpu_memory_utilization,
    )
    engines.pad_calls(table.padded_tokens)
    source = read_draft_source(folder)
    calibration = load_calibration(folder / "calibration" / CALIBRATION_FILE, gamma=source.gamma)
    return Deployment(
        recipe=summary.recipe,
        target_spec=target_spec_from_json(json.loads((checkpoints / "target.json").read_text())),
        drafter_spec=source,
        target=engines.target,
        drafter=engines.drafter,
        step=engines.step,
        acceptance=engines.acceptance,
        pages=engines.pages,
        step_table=table,
        calibration=calibration.calibration,
        lookup=calibration.lookup_acceptance if summary.recipe.lookup == "auto" else None,
        codec=TextCodec.load(checkpoints / "tokenizer"),
    )

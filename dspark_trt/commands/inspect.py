"""`dspark-trt inspect DIR`: everything a build directory says about itself,
read from its manifests and JSON files only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from dspark_trt.building.finished import read_finished
from dspark_trt.building.manifest import check_outputs
from dspark_trt.calibration.file import CALIBRATION_FILE
from dspark_trt.commands.options import AsJson, BuildFolder, command
from dspark_trt.contract.precision import Precision
from dspark_trt.engines.settings import read_engine_settings
from dspark_trt.errors import ManifestError
from dspark_trt.steptable.table import StepTable

_DEPENDS = "exact with respect to its own verification distribution; greedy text can depend on the schedule"
NUMERIC_NOTES: dict[Precision | None, str] = {
    "fp32": "float32: logits differ by about 4e-5 between steps of one and of eight tokens; greedy output is stable",
    "int8": "8-bit weights, activations of each token in 8 or 16 bits: exact with respect to its own verification "
    "distribution; a token's logits are the same, bit for bit, in steps of any size; greedy output is stable",
    "bf16": f"bfloat16: logits differ by about 0.5 between steps of one and of eight tokens; {_DEPENDS}",
    "fp16": f"float16: {_DEPENDS}",
    "int4": f"4-bit weights: {_DEPENDS}",
}


@command()
def inspect(
    folder: BuildFolder,
    as_json: AsJson = False,
    verify: Annotated[bool, typer.Option("--verify", help="Hash every file again.")] = False,
) -> None:
    """Say what a build directory holds and whether its chain is intact."""
    from dspark_trt.commands import report

    description = inspect_build(folder, verify=verify)
    if as_json:
        report.print_json(description)
    else:
        report.print_build(description)


def inspect_build(folder: Path, *, verify: bool = False) -> dict[str, Any]:
    """A JSON-ready description of the build in `folder`.

    Raises ManifestError when the directory is not a finished build, or a file or a link of the chain does not match.
    """
    summary, stages = read_finished(folder)
    for name, manifest in stages.items():
        check_outputs(folder / name, manifest, verify=verify)
    StepTable.load(folder / "steptable" / "step_table.json")  # refuses what no measurement gives
    engine = read_engine_settings(folder)
    return {
        "folder": str(folder),
        "recipe": summary.recipe.model_dump(mode="json"),
        "numerics": numerics_of(folder, summary.recipe.precision),
        "target": _read_json(folder / "checkpoints" / "target.json"),
        "drafter": _read_json(folder / "checkpoints" / "drafter.json"),
        "engine": engine.model_dump(mode="json"),
        "device": engine.device,
        "step_table": _read_json(folder / "steptable" / "step_table.json"),
        "calibration": _read_json(folder / "calibration" / CALIBRATION_FILE),
        "stages": {
            name: {
                "key": manifest.key,
                "created": manifest.created,
                "versions": manifest.versions,
                "predecessors": manifest.predecessors,
                "inputs": {path: record.sha256 for path, record in manifest.inputs.items()},
                "outputs": {
                    path: {"bytes": record.size, "sha256": record.sha256} for path, record in manifest.outputs.items()
                },
            }
            for name, manifest in stages.items()
        },
        "hashes_verified": verify,
    }


def numerics_of(folder: Path, precision: Precision | None) -> str:
    """What the precision of a build means for its output and, where its target has a form, which and how exact."""
    from dspark_trt.building.target_form import FORM_FILE, described

    form = folder / "graphs" / FORM_FILE
    if not form.exists():  # an int8 build of the time before there was a choice depends on the schedule
        return f"8-bit weights: {_DEPENDS}" if precision == "int8" else NUMERIC_NOTES[precision]
    return f"{NUMERIC_NOTES[precision]}. {described(_read_json(form))}"


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ManifestError(f"{path} cannot be read ({error}); run `dspark-trt build` again") from None

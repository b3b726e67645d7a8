"""`dspark-trt calibrate`: the calibration of a build, measured again for longer, or taken from a file."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from dspark_trt.commands.options import AsJson, BuildFolder, command, from_home
from dspark_trt.commands.ray_options import RayAddress, RecordsFile, check_records
from dspark_trt.errors import RecipeError

SECONDS = 600.0
MAX_TOKENS = 256


@command()
def calibrate(
    folder: BuildFolder,
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help='JSON lines {"prompt"}  [default: packaged prompts]', parser=from_home),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(metavar="N", help=f"Record for so long, at most  [default: {SECONDS:.0f}]")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(metavar="N", help=f"Of an answer  [default: {MAX_TOKENS}]")] = None,
    samples: Annotated[
        int | None, typer.Option(metavar="N", help="Answers of each prompt that are sampled  [default: 1]")
    ] = None,
    report_file: Annotated[
        Path | None,
        typer.Option("--report", metavar="FILE", help="Write .html (with diagrams) or .md.", parser=from_home),
    ] = None,
    import_file: Annotated[
        Path | None,
        typer.Option(
            "--import",
            metavar="FILE",
            help="Take a build's calibration.json, or temperatures of TensorRT-LLM, SGLang or vllm-ascend.",
            parser=from_home,
        ),
    ] = None,
    ray: RayAddress = None,
    records: RecordsFile = None,
    as_json: AsJson = False,
) -> None:
    """Fit what turns confidences into probabilities: on more prompts and for longer than a build does, or by a file.

    The build's calibration is replaced when the new one is there. A server that runs keeps the one it started with.
    """
    if import_file is not None and (prompts, seconds, max_tokens, samples, ray, records) != (None,) * 6:
        raise RecipeError(
            "--import: nothing is recorded, so it goes without --prompts, --seconds, --max-tokens, --samples, --ray, "
            "--records"
        )
    check_records(records, ray)
    budget_s, tokens, answers = seconds or SECONDS, max_tokens or MAX_TOKENS, samples or 1
    if seconds is not None and not 0 < seconds < float("inf"):
        raise RecipeError(f"--seconds: expected a number above 0, found {seconds}")
    for option, value, least in (("--max-tokens", max_tokens, 2), ("--samples", samples, 1)):
        if value is not None and value < least:
            raise RecipeError(f"{option}: expected at least {least}, found {value}")
    from dspark_trt.building.recalibrate import import_calibration, recalibrate
    from dspark_trt.calibration.prompts import packaged_prompts, read_prompts
    from dspark_trt.commands import report
    from dspark_trt.commands.calibration_report import as_text, check_report_path, write_report
    from dspark_trt.commands.ray_calibration import record_over_ray

    if report_file is not None:
        check_report_path(report_file)
    if import_file is not None:
        found = import_calibration(folder, import_file)
    else:
        chosen = packaged_prompts() if prompts is None else read_prompts(prompts)
        effort: dict[str, Any] = {"budget_s": budget_s, "max_tokens": tokens, "num_samples": answers}
        record = None if ray is None else partial(record_over_ray, ray, folder, chosen, **effort, records=records)
        with report.Bars() as bars:
            found = recalibrate(
                folder,
                chosen,
                **effort,
                record=record,
                progress=lambda done: bars.update("calibrate", min(done, 1.0)),
            )
    if report_file is not None:
        write_report(report_file, found, folder.absolute().name)
    if as_json:
        report.print_json(found.model_dump(mode="json"))
        return
    for line in as_text(found):
        report.print_line(line)
    report.print_note(f"{folder}: calibration replaced; a server that runs takes it when it starts again")

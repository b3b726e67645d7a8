"""The step table that a server prices by: the build's own, or one that is measured here before the server listens.

The build is never written to, whoever owns it: a new table goes to the server's private folder, and to the user's cache
for the next start. It is measured by a process of its own, whose engines are gone when those of the server are opened.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from dspark_trt.building.finished import read_finished
from dspark_trt.building.reprofile import differences, keep_table, kept_table, own_table
from dspark_trt.errors import EngineBuildError
from dspark_trt.server.options import ServeOptions
from dspark_trt.steptable.table import StepTable


def step_table_for(build_dir: Path, options: ServeOptions, on_event: Callable[[str], None]) -> StepTable:
    """The build's own table where it was measured here as things are now, or where it is to be kept; one that an
    earlier start has measured; else one that is measured now. Where that fails, the build's own, and an event.

    Raises ManifestError.
    """
    summary, _ = read_finished(build_dir)
    own = own_table(build_dir)
    odd = differences(own, summary.recipe, build_dir)
    if not odd:
        return own
    said = f"the step table was not measured here as things are now ({'; '.join(odd)})"
    if options.step_table == "keep":
        on_event(f"{said} and is kept: drafts may be chosen badly; `dspark-trt profile {build_dir}` measures again")
        return own
    if kept := kept_table(build_dir, summary):
        on_event(f"{said}: steps are priced by the table of {kept.provenance['measured_at']}, measured here beside it")
        return kept
    on_event(f"{said}: it is measured before the server listens, within about {options.step_table_budget_s:g} s")
    started = time.monotonic()
    try:
        table = _measure(build_dir, options)
    except EngineBuildError as error:
        on_event(f"the step table could not be measured ({error}): steps are priced by the build's own")
        return own
    on_event(f"the step table was measured in {time.monotonic() - started:.0f} s")
    if doubts := table.provenance["doubts"]:
        on_event(f"it is doubtful, and is measured again at the next start: {'; '.join(doubts)}")
    else:
        keep_table(build_dir, summary, table)
    return table


def _measure(build_dir: Path, options: ServeOptions) -> StepTable:
    """By `dspark-trt profile --output`, whose progress is seen where the log is for people. Raises EngineBuildError."""
    with tempfile.TemporaryDirectory(prefix="dspark-trt-table-") as folder:
        path = Path(folder) / "step_table.json"
        command = [
            sys.executable,
            "-P",
            "-m",
            "dspark_trt",
            "--log-level",
            "error",
            "profile",
            str(build_dir),
            "--json",
        ]
        command += ["--output", str(path), "--budget", str(options.step_table_budget_s)]
        is_for_people = options.log_format == "text"
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=None if is_for_people else subprocess.PIPE, text=True
        )
        try:
            _, errors = process.communicate()
        finally:
            if process.poll() is None:  # this process was asked to end
                process.terminate()
                process.wait()
        if process.returncode:
            lines = (errors or "its messages are above").strip().splitlines()
            raise EngineBuildError(f"`dspark-trt profile` ended with {process.returncode}: {lines[-1]}")
        return StepTable.load(path)

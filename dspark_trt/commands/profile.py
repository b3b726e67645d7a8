"""`dspark-trt profile`: measure the step table of a build again, alone."""

from __future__ import annotations

from dspark_trt.commands.options import AsJson, BuildFolder, command


@command()
def profile(folder: BuildFolder, as_json: AsJson = False) -> None:
    """Measure the step table again: on another machine, after an update, or when this one was busy."""
    from dspark_trt.building.reprofile import reprofile
    from dspark_trt.commands import report

    with report.Bars() as bars:
        table = reprofile(folder, progress=lambda done: bars.update("profile", done))
    if as_json:
        report.print_json({"provenance": table.provenance})
        return
    report.print_line(f"{folder}: step table measured")
    for doubt in table.provenance["doubts"]:
        report.print_note(f"doubtful: {doubt}; measure again when the machine is quiet")

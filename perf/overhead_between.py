"""Whether a change slows a step: `perf/overhead.py` before and after it, in turns, on builds of the demonstration pair.

    python perf/overhead_between.py BEFORE AFTER --target TARGET --drafter DRAFTER --report FILE [--rounds 3]

BEFORE and AFTER are commits of this repository. Each is checked out and builds the pair with its own code (some
minutes), then both measure in turns with their own `perf/overhead.py`. What is compared is the time outside the
engines, and the whole step, of the same mode, setting and number of requests. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark_trt.machine.cpu import cpu_model, num_cores

REPOSITORY = Path(__file__).resolve().parents[1]
_PACKAGES = {"dspark_trt": "dspark_trt", "plugins": "dspark_trt_plugins", "triton_model_repo": "dspark_trt_model_repo"}

Key = tuple[str, str, int]  # mode, setting, requests


@dataclass(frozen=True, slots=True)
class Version:
    """One commit, checked out, with packages that are imported from there and a build that it made."""

    name: str
    folder: Path

    def run(self, *arguments: str | Path) -> str:
        environment = {**os.environ, "PYTHONPATH": str(self.folder / "packages")}
        command = [sys.executable, *map(str, arguments)]
        done = subprocess.run(command, env=environment, cwd=self.folder, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"{self.name}: {' '.join(command)} failed:\n{done.stderr[-2000:]}")
        return done.stdout

    def measure(self) -> dict[Key, tuple[float, float]]:
        """Milliseconds outside the engines and of the step."""
        rows = json.loads(self.run("source/perf/overhead.py", "build").splitlines()[-1])["rows"]
        return {(row["mode"], row["setting"], row["requests"]): (row["outside_ms"], row["step_ms"]) for row in rows}


@contextmanager
def checked_out(commit: str, place: Path) -> Iterator[Version]:
    name = _git("rev-parse", "--short", commit)
    folder = place / name
    (folder / "packages").mkdir(parents=True)
    _git("worktree", "add", "--detach", str(folder / "source"), commit)
    try:
        for source, package in _PACKAGES.items():
            (folder / "packages" / package).symlink_to(folder / "source" / source)
        yield Version(name, folder)
    finally:
        _git("worktree", "remove", "--force", str(folder / "source"))


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout.strip()


def write_report(names: Sequence[str], rounds: Sequence[Sequence[Mapping[Key, tuple[float, float]]]]) -> str:
    """`rounds`: of each round, what both versions measured. Ratios are taken within a round."""
    keys = [key for key in rounds[0][0] if key in rounds[0][1]]
    lines = [
        f"# Step of the decoding loop, {names[0]} against {names[1]}",
        "",
        f"{cpu_model()}, {num_cores()} cores; {len(rounds)} rounds, both versions in turns, each on a build of its "
        "own; medians, ratios after ÷ before within a round, in brackets their range.",
        "",
        "| mode | setting | requests | outside ms, before | after | ratio | step ms, before | after | ratio |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for key in keys:
        cells: list[str] = []
        for part in (0, 1):
            pairs = [(before[key][part], after[key][part]) for before, after in rounds]
            ratios = [after / max(before, 1e-9) for before, after in pairs]
            cells += [f"{statistics.median(values):.2f}" for values in zip(*pairs, strict=True)]
            cells.append(f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]")
        lines.append(f"| {' | '.join(map(str, key))} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-requests", default="32", help="of the builds  [default: 32]")
    parser.add_argument("--report", type=Path, required=True, help="Markdown")
    options: Any = parser.parse_args(arguments)
    with (
        tempfile.TemporaryDirectory(prefix="overhead-") as place,
        checked_out(options.before, Path(place)) as before,
        checked_out(options.after, Path(place)) as after,
    ):
        for version in (before, after):
            print(f"{version.name} builds", file=sys.stderr, flush=True)
            pair = ["--target", options.target.resolve(), "--drafter", options.drafter.resolve()]
            version.run("-m", "dspark_trt", "build", *pair, "--output", "build", "--max-requests", options.max_requests)
        rounds = []
        for number in range(options.rounds):
            print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
            both = (before, after) if number % 2 == 0 else (after, before)
            found = {version.name: version.measure() for version in both}
            rounds.append([found[before.name], found[after.name]])
        text = write_report([before.name, after.name], rounds)
    options.report.write_text(text)
    print(text)


if __name__ == "__main__":
    main(sys.argv[1:])

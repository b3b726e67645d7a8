"""How the command line shows a build, the findings of `doctor` and a finished generation to a person."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from dspark_trt.checkpoints.spec import FAMILY_NAMES, SOURCES_OF_COPIES
from dspark_trt.commands.logs import console as errors
from dspark_trt.engines.tensorrt.compiler.facts import ENGINE_SUFFIX

if TYPE_CHECKING:
    from dspark_trt.building.build import StageResult
    from dspark_trt.building.plan import BuildPlan
    from dspark_trt.commands.doctor import Finding
    from dspark_trt.commands.prompt_file import FileSummary

TABLE_WIDTH = 120  # characters; a narrower terminal wraps the lines and loses no digit
MARKS = {"ok": "[green]ok[/]", "missing": "[red]missing[/]", "optional": "[yellow]optional[/]"}


class Bars:
    """Progress bars on standard error, shown from the first progress on: what is refused before has none."""

    def __init__(self) -> None:
        columns = (
            TextColumn("{task.description:<18}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
        )
        self._bars = Progress(*columns, console=errors)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Bars:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._tasks:
            self._bars.stop()

    def update(self, name: str, fraction: float) -> None:
        if not self._tasks:
            self._bars.start()
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=1.0)
        self._bars.update(self._tasks[name], completed=fraction)


def ask(prompt: str) -> str:
    """A line that was typed. Raises EOFError, KeyboardInterrupt."""
    return input(prompt if sys.stdin.isatty() else "")


def print_line(text: str) -> None:
    print(text, flush=True)


def print_piece(index: int, text: str) -> None:
    """A piece of the text of prompt `index`, as it comes."""
    print(text, end="", flush=True)


def print_json(value: Any) -> None:
    print(json.dumps(value))


def print_note(text: str) -> None:
    """What is no result: it stands beside the output, not in it."""
    errors.print(escape(text), style="dim", highlight=False, soft_wrap=True)


def print_error(text: str) -> None:
    print(f"error: {text}", file=sys.stderr)


def print_generation(result: dict[str, Any], *, is_streamed: bool) -> None:
    print("" if is_streamed else result["text"])
    print_note(
        f"{len(result['token_ids'])} tokens in {result['num_steps']} steps, accepted_len "
        f"{result['accepted_len']:.2f}, mean verify_len {result['mean_verify_len']:.2f}, "
        f"{result['timings_ms']['total']:.0f} ms ({result['finish_reason']})"
    )


def print_file_summary(summary: FileSummary, results_file: Path) -> None:
    kept = f", {summary.num_kept} kept" if summary.num_kept else ""
    failed = f", {summary.num_failed} failed (see `error` in their lines)" if summary.num_failed else ""
    print(f"{results_file}: {summary.num_finished} generated{kept}{failed}")


def print_choice(plan: BuildPlan) -> None:
    recipe = plan.recipe
    print_note(f"backend {recipe.backend}, precision {recipe.precision}: {plan.reason}")


def print_plan(plan: BuildPlan) -> None:
    for name, value in plan.facts().items():
        print(f"{name:<10} {value}")


def print_stages(results: Sequence[StageResult], output: Path, numerics: str | None) -> None:
    for result in results:
        print(f"{result.stage:<18} {'built' if result.was_built else 'kept':<6} {result.seconds:7.2f} s")
    if numerics:
        print(f"\n{numerics}")
    print(
        f"\nserve it:  dspark-trt serve {output}\n     or:  tritonserver --model-repository={output}/triton_model_repo"
    )


def print_findings(findings: list[Finding], is_ready: bool, console: Console | None = None) -> None:
    console = console or Console()
    table = Table(box=None, pad_edge=False)
    for column in ("", "", "found", "what to do"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        table.add_row(finding.name, MARKS[finding.status], escape(finding.found), escape(finding.fix))
    console.print(table)
    console.print("This machine can build and generate." if is_ready else "Not ready: see the missing lines above.")


def print_build(description: dict[str, Any], console: Console | None = None) -> None:
    console = console or Console()
    recipe, target, drafter = description["recipe"], description["target"], description["drafter"]
    facts = {
        "target": f"{recipe['target']} ({_decoder(target)})",
        **_drafter(recipe["drafter"], drafter),
        "engine": _engine(description),
        "numerics": description["numerics"],
        "limits": f"{recipe['max_requests']} requests, {recipe['max_seq_len']} positions, "
        f"{recipe['max_batch_tokens']} tokens a step",
        "calibration": _calibration(description["calibration"]),
        "step table": _trust(description["step_table"]["provenance"]),
    }
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in facts.items():
        table.add_row(name, escape(value))
    console.print(table)
    wide = Console(file=console.file, width=max(console.width, TABLE_WIDTH))
    wide.print(_step_table(description["step_table"]))
    for name, stage in description["stages"].items():
        size = sum(output["bytes"] for output in stage["outputs"].values())
        console.print(f"{name:<18} {stage['key'][:16]}  {size / 1e6:9.1f} MB  {stage['created']}", highlight=False)
    console.print("chain intact" + (", every file hashed again" if description["hashes_verified"] else ""))


def _trust(provenance: dict[str, Any]) -> str:
    """When the table was measured, and what speaks against it."""
    doubts = provenance.get("doubts", ())
    measured = f"measured {provenance['measured_at']}" if "measured_at" in provenance else "measured"
    if not doubts:
        return measured
    return f"{measured}, doubtful: {'; '.join(doubts)}; run `dspark-trt profile DIR` when the machine is quiet"


def _engine(description: dict[str, Any]) -> str:
    """Backend with its version, precision, what it is for and, where there are any, the compiled files."""
    engine = description["engine"]
    backend = " ".join(part for part in (engine["backend"], engine["library_version"]) if part)
    outputs = description["stages"]["engines"]["outputs"]
    files = [
        f"{name} {output['bytes'] / 1e6:.1f} MB" for name, output in outputs.items() if name.endswith(ENGINE_SUFFIX)
    ]
    return "; ".join([f"{backend}, {description['recipe']['precision']}, for {description['device']}", *files])


def _calibration(data: dict[str, Any]) -> str:
    """Its kind and, where it was measured, the error of the first position."""
    if not data["after"]:
        return str(data["kind"])
    before, after = data["before"][0]["ece"], data["after"][0]["ece"]
    blocks = f" on {data['num_fit_blocks']} blocks" if data["kind"] == "fitted" else ""
    return f"{data['kind']}{blocks}; ECE at position 1: {before:.1%} before, {after:.1%} after"


def _decoder(spec: dict[str, Any]) -> str:
    decoder = spec["decoder"]
    return f"{decoder['num_layers']} layers, hidden {decoder['hidden_size']}, vocabulary {decoder['vocab_size']}"


def _drafter(source: str, drafter: dict[str, Any]) -> dict[str, str]:
    if (copies := SOURCES_OF_COPIES.get(drafter.get("kind", ""))) is not None:
        return {"drafter": f"{source} (no model)", "drafting": f"up to {drafter['gamma']} drafts {copies}"}
    taps = list(drafter["target_layer_ids"])
    kind = drafter.get("kind", "block")  # builds before there were families
    parts = [f"gamma {drafter['gamma']}", _way(kind, drafter)]
    if ids := drafter.get("draft_vocab_size"):
        parts.append(f"a head for {ids} ids")
    return {
        "drafter": f"{source} ({FAMILY_NAMES[kind]}, {_decoder(drafter)})",
        "drafting": ", ".join([*parts, f"taps {taps}" if taps else "no taps"]),
    }


def _way(kind: str, drafter: dict[str, Any]) -> str:
    """How a block comes about."""
    if kind == "block":
        return _head(drafter)
    if (mask := drafter.get("mask_token_id")) is not None:
        return f"all in one pass, mask token {mask}"
    if drafter.get("is_masked"):
        return "all in one pass (DART)"
    if drafter.get("is_module"):
        return "one token after the other (MTP module)"
    return "a head for each draft" if kind == "medusa" else "one token after the other"


def _head(drafter: dict[str, Any]) -> str:
    markov = (
        f"{drafter['markov_head_type']} Markov head of rank {drafter['markov_rank']}"
        if drafter["markov_rank"]
        else "no Markov head"
    )
    parts = [markov, "confidence head" if drafter["has_confidence_head"] else "no confidence head"]
    if drafter.get("is_mask_first"):
        parts.append("mask first")
    if limited := [each for each in drafter.get("block_attention", ()) if each["is_causal"] or each["window"]]:
        parts.append(f"{len(limited)} of {len(drafter['block_attention'])} layers causal or with a window")
    return ", ".join(parts)


def _step_table(data: dict[str, Any]) -> Table:
    """Steps with 0, 1, 2, 4 ... extra tokens at the first context depth, and blocks of every slot count."""
    shown = [at for at, extra in enumerate(data["extra_tokens"]) if extra & (extra - 1) == 0]
    depth = data["context_tokens"][0]
    table = Table(title=f"step table: milliseconds at {depth} positions", title_justify="left", box=None)
    table.add_column("requests", justify="right")
    for at in shown:
        table.add_column(f"+{data['extra_tokens'][at]}" if data["extra_tokens"][at] else "plain", justify="right")
    for slots in data["num_slots"]:
        table.add_column(f"draft {slots}", justify="right")
    rows = zip(data["num_requests"], data["step_ms"][0], data["draft_ms"][0], strict=True)
    for requests, steps, drafts in rows:
        cells = ["" if steps[at] is None else f"{steps[at]:.1f}" for at in shown]
        table.add_row(str(requests), *cells, *(f"{ms:.1f}" for ms in drafts))
    return table

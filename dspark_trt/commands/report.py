"""How the command line shows a build, the findings of `doctor` and a finished generation to a person."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dspark_trt.commands.doctor import Finding
from dspark_trt.engines.tensorrt.compiler.facts import ENGINE_SUFFIX

TABLE_WIDTH = 120  # characters; a narrower terminal wraps the lines and loses no digit
MARKS = {"ok": "[green]ok[/]", "missing": "[red]missing[/]", "optional": "[yellow]optional[/]"}


def print_findings(findings: list[Finding], is_ready: bool, console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("", "", "found", "what to do"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        table.add_row(finding.name, MARKS[finding.status], escape(finding.found), escape(finding.fix))
    console.print(table)
    console.print("This machine can build and generate." if is_ready else "Not ready: see the missing lines above.")


def print_build(description: dict[str, Any], console: Console) -> None:
    recipe, target, drafter = description["recipe"], description["target"], description["drafter"]
    facts = {
        "target": f"{recipe['target']} ({_decoder(target)})",
        "drafter": f"{recipe['drafter']} ({_decoder(drafter)})",
        "drafting": f"gamma {drafter['gamma']}, {_head(drafter)}, taps {list(drafter['target_layer_ids'])}",
        "engine": _engine(description),
        "numerics": description["numerics"],
        "limits": f"{recipe['max_slots']} slots, {recipe['max_seq_len']} positions, "
        f"{recipe['max_batch_tokens']} tokens a step",
        "calibration": description["calibration"]["kind"],
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


def _engine(description: dict[str, Any]) -> str:
    """Backend with its version, precision, what it is for and, where there are any, the compiled files."""
    engine = description["engine"]
    backend = " ".join(part for part in (engine["backend"], engine["library_version"]) if part)
    outputs = description["stages"]["engines"]["outputs"]
    files = [
        f"{name} {output['bytes'] / 1e6:.1f} MB" for name, output in outputs.items() if name.endswith(ENGINE_SUFFIX)
    ]
    return "; ".join([f"{backend}, {description['recipe']['precision']}, for {description['device']}", *files])


def _decoder(spec: dict[str, Any]) -> str:
    decoder = spec["decoder"]
    return f"{decoder['num_layers']} layers, hidden {decoder['hidden_size']}, vocabulary {decoder['vocab_size']}"


def _head(drafter: dict[str, Any]) -> str:
    markov = (
        f"{drafter['markov_head_type']} Markov head of rank {drafter['markov_rank']}"
        if drafter["markov_rank"]
        else "no Markov head"
    )
    return markov + (", confidence head" if drafter["has_confidence_head"] else ", no confidence head")


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

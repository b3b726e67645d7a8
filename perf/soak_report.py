"""What a soak found, and how it is written down."""

from __future__ import annotations

import platform
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from soak_watch import Growth

from dspark_trt.machine.cpu import cpu_model, num_cores

_MIB = 2**20


@dataclass(frozen=True)
class SoakResult:
    """Of one soak. Without `failures` every answer was right and nothing grew."""

    build: str
    loaded_s: float  # the time in which the server was started again left out
    concurrency: int
    num_rows: int
    num_cases: int
    outage_s: float  # from the kill to the first answer after it
    counts: Counter[tuple[str, str]]  # (way, outcome)
    num_tokens: int  # of answers that came to their end
    first_piece_s: Sequence[float]
    running: Sequence[float]  # requests in rows, once a second
    growth: Sequence[Growth]
    failures: Sequence[str]

    def num(self, outcome: str) -> int:
        return sum(count for (_, found), count in self.counts.items() if found == outcome)


def write_report(result: SoakResult) -> str:
    """Markdown, for a file of perf/results/."""
    total = sum(result.counts.values())
    first = sorted(result.first_piece_s)
    median_s, slow_s = statistics.median(first), first[int(0.95 * (len(first) - 1))]
    tokens_per_s = result.num_tokens / result.loaded_s
    lines = [
        f"# Soak of {result.build}: {'failed' if result.failures else 'passed'}",
        "",
        f"{cpu_model()}, {num_cores()} cores; Python {platform.python_version()}. {result.concurrency} clients on "
        f"{result.num_rows} rows for {result.loaded_s:.0f} s; {result.num_cases} different requests, their answers "
        "decoded offline by the same build without drafts. One kill of the process that decodes, at half time.",
        "",
        f"- {total} requests, {result.num_tokens} tokens in whole answers ({tokens_per_s:.0f}/s)",
        f"- first response after {median_s:.2f} s (median), {slow_s:.2f} s (95 %)",
        f"- rows taken: {statistics.median(result.running):.0f} of {result.num_rows} (median of the seconds)",
        f"- service was back {result.outage_s:.1f} s after the kill",
        f"- lost, wrong or reordered tokens, hanging or failed requests, growth: {len(result.failures)}",
        *(f"  - {failure}" for failure in result.failures),
        "",
        *_table(result.counts),
        "",
        "Memory: medians of the second and of the last quarter of the time after the kill; the rest without load, "
        "before and after.",
        "",
        "| | before | after | |",
        "|---|---|---|---|",
        *(_row(growth) for growth in result.growth),
        "",
    ]
    return "\n".join(lines)


def _table(counts: Counter[tuple[str, str]]) -> list[str]:
    outcomes = ("answered", "cancelled", "refused", "ended by the kill")
    ways = sorted({way for way, _ in counts})
    rows = [f"| {way} | {' | '.join(str(counts[way, outcome]) for outcome in outcomes)} |" for way in ways]
    return [f"| way | {' | '.join(outcomes)} |", "|---" * (len(outcomes) + 1) + "|", *rows]


def _row(growth: Growth) -> str:
    is_memory = "memory" in growth.what and "regions" not in growth.what
    before, after = (
        f"{value / _MIB:.1f} MiB" if is_memory else f"{value:g}" for value in (growth.before, growth.after)
    )
    return f"| {growth.what} | {before} | {after} | {'ok' if growth.is_acceptable else 'grew'} |"

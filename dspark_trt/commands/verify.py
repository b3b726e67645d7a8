"""`dspark-trt verify`: shows on the user's own engines that drafting does not change what the target says."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from dspark_trt.commands.options import AsJson, BuildFolder, command
from dspark_trt.contract.scheduler import parse_scheduler
from dspark_trt.errors import EXIT_CHECK_FAILED, RecipeError

if TYPE_CHECKING:
    from dspark_trt.commands.exactness import Exactness, ModeReport

MODES = "off,fixed,threshold:0.5,early_stop,lagged_budget,auto"


@command()
def verify(
    folder: BuildFolder,
    prompts: Annotated[int, typer.Option(metavar="N", help="Packaged prompts to use.")] = 8,
    samples: Annotated[int, typer.Option(metavar="N", help="Sampled texts of each prompt.")] = 4,
    max_tokens: Annotated[int, typer.Option(help="Of a text.")] = 32,
    modes: Annotated[str, typer.Option(metavar="MODE,...", help="Modes to check.")] = MODES,
    as_json: AsJson = False,
) -> None:
    """Check that output with drafts is the target's own: greedy texts equal, sampled ones fair (chi-square).

    Exit code 4 when a check fails.
    """
    if min(prompts, samples) < 1 or max_tokens < 2:
        raise RecipeError("--prompts, --samples: expected at least 1; --max-tokens: at least 2")
    wanted = tuple(mode.strip() for mode in modes.split(","))
    for mode in wanted:
        parse_scheduler(mode)
    from dspark_trt.commands import report
    from dspark_trt.commands.bench_run import bench_prompts
    from dspark_trt.commands.exactness import check_exactness
    from dspark_trt.deployment import load_deployment

    deployment = load_deployment(folder)
    room = deployment.target.limits.max_seq_len - max_tokens
    texts = [prompt.ids for prompt in bench_prompts(deployment.codec, None) if len(prompt.ids) <= room][:prompts]
    if not texts:
        raise RecipeError(f"--max-tokens: no packaged prompt fits beside {max_tokens} tokens; give fewer")
    with report.Bars() as bars:
        found = check_exactness(
            deployment,
            texts,
            wanted,
            num_tokens=max_tokens,
            num_samples=samples,
            progress=lambda done: bars.update("verify", done),
        )
    if as_json:
        report.print_json({**asdict(found), "has_passed": found.has_passed})
    else:
        for line in describe(found):
            report.print_line(line)
    if not found.has_passed:
        raise typer.Exit(EXIT_CHECK_FAILED)


def describe(found: Exactness) -> list[str]:
    """Lines for a person."""
    return [
        *(line for mode in found.modes for line in _describe_mode(mode)),
        f"float noise of this target: {found.noise:.2g} nats (the same texts alone and in a batch)",
        f"a right build fails the chi-square tests with probability {found.false_failure:.0e}, all of them together",
        "passed: output with drafts is the target's own" if found.has_passed else "FAILED: see above",
    ]


def _describe_mode(mode: ModeReport) -> list[str]:
    verdict = "ok" if mode.has_passed else "FAILED"
    lines = [
        f"{mode.mode:<14} {verdict:<6} greedy {mode.num_greedy_tokens} tokens, {len(mode.differences)} texts differ; "
        f"sampled {mode.num_sampled_tokens} tokens, chi-square {mode.chi_square:.1f}, p {mode.p_value:.3g}; drafts "
        f"{mode.num_drafts_accepted} of {mode.num_drafts_verified} accepted"
    ]
    for each in mode.differences:
        why = "closer than float noise: either is right" if each.is_noise else "not float noise"
        lines.append(f"    prompt {each.prompt}, token {each.token}: gap {each.gap:.2g} nats, {why}")
    return lines

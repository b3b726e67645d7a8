"""The command line. Each command hands over to one function; only this module prints.

Exit codes: 0 ok, 2 user error, 3 environment missing, 4 a check failed.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from dspark_trt import __version__
from dspark_trt.errors import EXIT_ENVIRONMENT_MISSING, EXIT_OK, DSparkError, RecipeError
from dspark_trt.log import attach

app = typer.Typer(
    name="dspark-trt",
    help="Serve DSpark speculative decoding on compiled engines under Triton Inference Server.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console(stderr=True)

BuildFolder = Annotated[Path, typer.Argument(metavar="DIR", help="A directory made by `dspark-trt build`.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


@app.callback()
def options(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what the library does.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit(EXIT_OK)
    attach(RichHandler(console=console, show_path=False), logging.INFO if verbose else logging.WARNING)


@app.command()
def build(
    output: Annotated[Path, typer.Option(help="Directory of the build; made, completed or kept.")],
    target: Annotated[str | None, typer.Option(help="Hugging Face folder or hub id, or a GGUF file.")] = None,
    drafter: Annotated[str | None, typer.Option(help="DSpark checkpoint: Hugging Face folder or hub id.")] = None,
    recipe: Annotated[Path | None, typer.Option(help="YAML file with any of these options; options win.")] = None,
    backend: Annotated[str | None, typer.Option(help="auto | onnxruntime  [default: auto]")] = None,
    precision: Annotated[str | None, typer.Option(help="fp32 | int8 | int4  [default: fp32]")] = None,
    target_revision: Annotated[str | None, typer.Option(help="Commit, tag or branch of the hub id.")] = None,
    drafter_revision: Annotated[str | None, typer.Option(help="Commit, tag or branch of the hub id.")] = None,
    chat_template_kwargs: Annotated[
        str | None, typer.Option(help="JSON handed to the chat template, e.g. '{\"enable_thinking\": false}'.")
    ] = None,
    engine_model_name: Annotated[
        str | None, typer.Option(help="dspark | tensorrt_llm: name of the engine model in Triton  [default: dspark]")
    ] = None,
    max_slots: Annotated[int | None, typer.Option(help="Requests decoded at once  [default: 32]")] = None,
    max_seq_len: Annotated[int | None, typer.Option(help="Positions of a request  [default: 4096]")] = None,
    max_batch_tokens: Annotated[int | None, typer.Option(help="Packed tokens of a step  [default: 512]")] = None,
    num_threads: Annotated[int | None, typer.Option(help="Threads of an engine  [default: the cores here]")] = None,
    verify: Annotated[bool, typer.Option(help="Hash what is kept again.")] = False,
) -> None:
    """Turn a target and a drafter into engines, a step table and a Triton model repository."""
    from dspark_trt.build import build as run_build
    from dspark_trt.recipe import load_recipe

    overrides: dict[str, Any] = {
        "target": target,
        "drafter": drafter,
        "backend": backend,
        "precision": precision,
        "target_revision": target_revision,
        "drafter_revision": drafter_revision,
        "chat_template_kwargs": _parse_json("--chat-template-kwargs", chat_template_kwargs),
        "engine_model_name": engine_model_name,
        "max_slots": max_slots,
        "max_seq_len": max_seq_len,
        "max_batch_tokens": max_batch_tokens,
        "num_threads": num_threads,
    }
    resolved = load_recipe(recipe, overrides)
    columns = (
        TextColumn("{task.description:<18}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bars:
        tasks: dict[str, Any] = {}

        def progress(stage: str, fraction: float) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=1.0)
            bars.update(tasks[stage], completed=fraction)

        results = run_build(resolved, output, verify=verify, progress=progress)
    for result in results:
        print(f"{result.stage:<18} {'built' if result.was_built else 'kept':<6} {result.seconds:7.2f} s")
    print(
        f"\nserve it:  dspark-trt serve {output}\n     or:  tritonserver --model-repository={output}/triton_model_repo"
    )


@app.command()
def inspect(
    folder: BuildFolder,
    as_json: AsJson = False,
    verify: Annotated[bool, typer.Option(help="Hash every file again.")] = False,
) -> None:
    """Say what a build directory holds and whether its chain is intact."""
    from dspark_trt.inspection import inspect_build
    from dspark_trt.report import print_build

    description = inspect_build(folder, verify=verify)
    if as_json:
        print(json.dumps(description))
    else:
        print_build(description, Console())


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Say what this machine can do and what is missing."""
    from dataclasses import asdict

    from dspark_trt.doctor import can_build_and_generate, examine
    from dspark_trt.report import print_findings

    findings = examine()
    is_ready = can_build_and_generate(findings)
    if as_json:
        print(json.dumps({"ready": is_ready, "findings": [asdict(finding) for finding in findings]}))
    else:
        print_findings(findings, is_ready, Console())
    raise typer.Exit(EXIT_OK if is_ready else EXIT_ENVIRONMENT_MISSING)


def _parse_json(option: str, text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise RecipeError(
            f"{option}: not valid JSON ({error}); expected an object such as '{{\"key\": true}}'"
        ) from None
    if not isinstance(value, dict):
        raise RecipeError(f"{option}: expected a JSON object, found {type(value).__name__}")
    return value


def main() -> None:
    """Entry point: one message and the right exit code for every error that a user can cause."""
    try:
        app(standalone_mode=True)
    except DSparkError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)

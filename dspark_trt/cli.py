"""The command line. Each command hands over to one function; only this module prints.

Exit codes: 0 ok, 2 user error, 3 environment missing, 4 a check failed. The file is long because the options of every
command, which are the public surface, stand in one place.
"""

from __future__ import annotations

import io
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
from dspark_trt.errors import EXIT_ENVIRONMENT_MISSING, EXIT_OK, EXIT_USER_ERROR, DSparkError, RecipeError, RequestError
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
    backend: Annotated[
        str | None, typer.Option(help="auto | onnxruntime | tensorrt | tensorrt_rtx  [default: auto]")
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(help="onnxruntime: fp32 | int8 | int4  [default: fp32]; tensorrt*: bf16 | fp16  [default: bf16]"),
    ] = None,
    compute_capability: Annotated[
        list[int] | None,
        typer.Option(help="tensorrt_rtx: SM to compile for, e.g. 89; several times  [default: the GPU here]"),
    ] = None,
    target_revision: Annotated[str | None, typer.Option(help="Commit, tag or branch of the hub id.")] = None,
    drafter_revision: Annotated[str | None, typer.Option(help="Commit, tag or branch of the hub id.")] = None,
    chat_template_kwargs: Annotated[
        str | None, typer.Option(help="JSON handed to the chat template, e.g. '{\"enable_thinking\": false}'.")
    ] = None,
    engine_model_name: Annotated[
        str | None, typer.Option(help="dspark | tensorrt_llm: name of the engine model in Triton  [default: dspark]")
    ] = None,
    max_slots: Annotated[int | None, typer.Option(help="Requests decoded at once  [default: 32]")] = None,
    max_seq_len: Annotated[
        int | None, typer.Option(help="Positions of a request  [default: 4096, or the target's limit]")
    ] = None,
    max_batch_tokens: Annotated[int | None, typer.Option(help="Packed tokens of a step  [default: 512]")] = None,
    num_threads: Annotated[
        int | None, typer.Option(help="onnxruntime: threads of an engine  [default: the cores here]")
    ] = None,
    markov_top_n: Annotated[
        int | None, typer.Option(help="Draft from the N largest base logits of a slot  [default: 0, from all]")
    ] = None,
    verify: Annotated[bool, typer.Option(help="Hash what is kept again.")] = False,
) -> None:
    """Turn a target and a drafter into engines, a step table and a Triton model repository."""
    from dspark_trt.building.build import build as run_build
    from dspark_trt.building.manifest import read_summary
    from dspark_trt.building.recipe import load_recipe
    from dspark_trt.commands.inspect import NUMERIC_NOTES

    overrides: dict[str, Any] = {
        "target": target,
        "drafter": drafter,
        "backend": backend,
        "precision": precision,
        "compute_capabilities": compute_capability or None,
        "target_revision": target_revision,
        "drafter_revision": drafter_revision,
        "chat_template_kwargs": _parse_json("--chat-template-kwargs", chat_template_kwargs),
        "engine_model_name": engine_model_name,
        "max_slots": max_slots,
        "max_seq_len": max_seq_len,
        "max_batch_tokens": max_batch_tokens,
        "num_threads": num_threads,
        "markov_top_n": markov_top_n,
    }
    build_recipe = load_recipe(recipe, overrides)
    columns = (
        TextColumn("{task.description:<18}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
    )
    bars = Progress(*columns, console=console)
    tasks: dict[str, Any] = {}

    def progress(stage: str, fraction: float) -> None:
        if not tasks:
            bars.start()
        if stage not in tasks:
            tasks[stage] = bars.add_task(stage, total=1.0)
        bars.update(tasks[stage], completed=fraction)

    try:
        results = run_build(build_recipe, output, verify=verify, progress=progress)
    finally:
        if tasks:  # a build that was refused has no bars, and no empty line in their place
            bars.stop()
    for result in results:
        print(f"{result.stage:<18} {'built' if result.was_built else 'kept':<6} {result.seconds:7.2f} s")
    precision_built = read_summary(output).recipe.precision
    if precision_built != "fp32":
        print(f"\n{precision_built}: {NUMERIC_NOTES[precision_built]}")
    print(
        f"\nserve it:  dspark-trt serve {output}\n     or:  tritonserver --model-repository={output}/triton_model_repo"
    )


@app.command()
def generate(
    folder: BuildFolder,
    prompt: Annotated[list[str], typer.Option(help="Give it several times to decode several prompts in one batch.")],
    chat: Annotated[bool, typer.Option("--chat", help="Apply the chat template; the prompt is one user turn.")] = False,
    chat_template_kwargs: Annotated[str | None, typer.Option(help="JSON over the build's own.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate, at most.")] = 128,
    min_tokens: Annotated[int, typer.Option(help="No end before so many tokens.")] = 0,
    temperature: Annotated[float | None, typer.Option(help="0: greedy  [default: the checkpoint's]")] = None,
    top_k: Annotated[int | None, typer.Option(help="0: off  [default: the checkpoint's]")] = None,
    top_p: Annotated[float | None, typer.Option(help="1: off  [default: the checkpoint's]")] = None,
    min_p: Annotated[float | None, typer.Option(help="0: off  [default: the checkpoint's]")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed and same verify lengths: same output.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="1: off  [default: the checkpoint's]")] = None,
    presence_penalty: Annotated[float, typer.Option(help="0: off")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="0: off")] = 0.0,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be given several times.")] = None,
    bad_word: Annotated[list[str] | None, typer.Option(help="Word never to produce; several times.")] = None,
    logit_bias: Annotated[list[str] | None, typer.Option(help="TOKEN_ID=BIAS; several times.")] = None,
    log_probs: Annotated[int | None, typer.Option(help="Log probabilities, with N alternatives.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on behind EOS.")] = False,
    no_draft: Annotated[bool, typer.Option("--no-draft", help="Plain decoding.")] = False,
    verify_len: Annotated[
        int | None, typer.Option(help="Verify so many drafts a step, as far as the token budget holds them.")
    ] = None,
    scheduler: Annotated[
        str | None, typer.Option(help="early_stop | lagged_budget | threshold  [default: early_stop]")
    ] = None,
    threshold: Annotated[float | None, typer.Option(help="With --scheduler threshold: cut below it.")] = None,
    as_json: AsJson = False,
) -> None:
    """Generate text from a build. With --json, one object on one line for each prompt."""
    from dspark_trt.commands import generate as generation
    from dspark_trt.deployment import load_deployment

    config = generation.scheduler_from_options(
        no_draft=no_draft, verify_len=verify_len, mode=scheduler, threshold=threshold
    )
    biases = generation.parse_logit_bias(logit_bias or ())
    template_kwargs = _parse_json("--chat-template-kwargs", chat_template_kwargs) or {}
    deployment = load_deployment(folder)
    sampling = deployment.sampling_params(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        stop_strings=tuple(stop or ()),
        bad_words=deployment.codec.encode_words(bad_word or ()),
        logit_bias=biases,
        num_log_probs=log_probs,
        ignore_eos=ignore_eos,
    )
    codec = deployment.codec
    if not all(prompt):
        raise RequestError("--prompt: the prompt is empty; give some text")
    prompts = [
        codec.encode_chat([{"role": "user", "content": text}], **template_kwargs) if chat else codec.encode(text)
        for text in prompt
    ]
    is_streaming = not as_json and len(prompts) == 1

    def on_text(index: int, text: str) -> None:
        if is_streaming:
            print(text, end="", flush=True)

    results = generation.generate(deployment, prompts, sampling, config, on_text)
    for result in results:
        if as_json:
            print(json.dumps(result))
        else:
            print("" if is_streaming else result["text"])
            console.print(
                f"{len(result['token_ids'])} tokens in {result['num_steps']} steps, accepted_len "
                f"{result['accepted_len']:.2f}, mean verify_len {result['mean_verify_len']:.2f}, "
                f"{result['timings_ms']['total']:.0f} ms ({result['finish_reason']})",
                style="dim",
            )


@app.command()
def serve(
    folder: BuildFolder,
    http_port: Annotated[int, typer.Option(help="HTTP endpoint.")] = 8000,
    grpc_port: Annotated[int, typer.Option(help="gRPC endpoint.")] = 8001,
    metrics_port: Annotated[int, typer.Option(help="Prometheus metrics.")] = 8002,
    address: Annotated[str, typer.Option(help="Address that all three bind to.")] = "127.0.0.1",
    scheduler: Annotated[
        str | None,
        typer.Option(
            help="early_stop | lagged_budget | off | fixed | fixed:K | threshold:C  "
            "[default: the build's: early_stop, on a GPU lagged_budget]"
        ),
    ] = None,
) -> None:
    """Serve a build with Triton Inference Server until interrupted."""
    from dspark_trt.server.serve import ServeOptions, TritonServer
    from dspark_trt.server.serve import serve as run_server

    def on_ready(server: TritonServer) -> None:
        print(f"ready: {server.http_url} (HTTP), {server.grpc_address} (gRPC), {server.metrics_url}", flush=True)

    run_server(folder, ServeOptions(http_port, grpc_port, metrics_port, address, scheduler), on_ready)


@app.command()
def inspect(
    folder: BuildFolder,
    as_json: AsJson = False,
    verify: Annotated[bool, typer.Option(help="Hash every file again.")] = False,
) -> None:
    """Say what a build directory holds and whether its chain is intact."""
    from dspark_trt.commands.inspect import inspect_build
    from dspark_trt.commands.report import print_build

    description = inspect_build(folder, verify=verify)
    if as_json:
        print(json.dumps(description))
    else:
        print_build(description, Console())


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Say what this machine can do and what is missing."""
    from dataclasses import asdict

    from dspark_trt.commands.doctor import can_build_and_generate, examine
    from dspark_trt.commands.report import print_findings

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
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character does not end the generation
    try:
        app(standalone_mode=True)
    except DSparkError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:  # a full disk, a folder that may not be written
        logging.getLogger("dspark_trt").info("the operating system refused", exc_info=True)
        print(f"error: {error}; make room or give a place that can be read and written", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)

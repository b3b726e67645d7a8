"""`dspark-trt generate`: text for prompts from the command line, from standard input or from a file of many."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspark_trt.commands.generation_options import GenerationOptions, generation_options
from dspark_trt.commands.options import AsJson, BuildFolder, command, from_home
from dspark_trt.commands.scheduler_choice import SchedulerText, scheduler_config
from dspark_trt.errors import RequestError

if TYPE_CHECKING:
    from dspark_trt.commands.generation import Prompt
    from dspark_trt.deployment import Deployment


@command(GenerationOptions)
def generate(
    folder: BuildFolder,
    prompt: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Several times: decoded in one batch. -: standard input, the default."),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Apply the chat template; the prompt is one user turn.")] = False,
    prompts_file: Annotated[
        Path | None,
        typer.Option(
            "--input",
            metavar="FILE",
            help='JSON lines, each {"prompt": TEXT} or {"messages": [...]} and any of these options by name.',
            parser=from_home,
        ),
    ] = None,
    results_file: Annotated[
        Path | None,
        typer.Option(
            "--output", metavar="FILE", help="JSON lines for --input; finished lines of it are kept.", parser=from_home
        ),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="HOST:PORT of a Ray cluster, or auto: its nodes share --input; DIR is at the same path on all.",
        ),
    ] = None,
    scheduler: SchedulerText = None,
    as_json: AsJson = False,
    *,
    given: dict[str, Any],
) -> None:
    """Generate text from a build. With --json, one object on one line for each prompt."""
    options = generation_options(given)
    if (prompts_file is None) != (results_file is None):
        raise RequestError(
            "--input and --output go together: prompts are read from one file, results are written to the other"
        )
    if ray is not None and prompts_file is None:
        raise RequestError("--ray: expected with --input and --output only; give a file of prompts")
    if prompts_file is not None and results_file is not None:
        if prompt:
            raise RequestError("--prompt and --input exclude each other; give one of them")
        _generate_file(folder, prompts_file, results_file, scheduler, given, is_chat=chat, ray=ray)
    else:
        texts = [_read_stdin() if text == "-" else text for text in prompt or ["-"]]
        _generate_texts(folder, texts, scheduler, options, is_chat=chat, as_json=as_json)


def _read_stdin() -> str:
    if sys.stdin.isatty():
        raise RequestError("no prompt: give --prompt TEXT, or pipe one in; `dspark-trt chat` is for a conversation")
    return sys.stdin.read().removesuffix("\n")


def _generate_texts(
    folder: Path, texts: list[str], scheduler: str | None, options: GenerationOptions, *, is_chat: bool, as_json: bool
) -> None:
    from dspark_trt.commands import report
    from dspark_trt.commands.generation import generate as run
    from dspark_trt.deployment import load_deployment

    if not all(texts):
        raise RequestError("--prompt: the prompt is empty; give some text")
    config = scheduler_config(scheduler)
    deployment = load_deployment(folder)
    prompts = [as_prompt(deployment, text, options, is_chat=is_chat) for text in texts]
    is_streaming = not as_json and len(prompts) == 1
    results = run(
        deployment,
        [prompt.ids for prompt in prompts],
        prompts[0].sampling,
        config or scheduler_config(deployment.recipe.scheduler, is_build=True),
        report.print_piece if is_streaming else lambda index, text: None,
        max_verify_len=options.verify_limit,
    )
    for result in results:
        if as_json:
            report.print_json(result)
        else:
            report.print_generation(result, is_streamed=is_streaming)


def as_prompt(
    deployment: Deployment, text: str | list[dict[str, Any]], options: GenerationOptions, *, is_chat: bool
) -> Prompt:
    """`text` may be the messages of a chat. Raises RequestError."""
    from dspark_trt.commands.generation import Prompt

    if isinstance(text, str) and not is_chat and options.system is None:
        ids = deployment.codec.encode(text)
    else:
        messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
        system = [] if options.system is None else [{"role": "system", "content": options.system}]
        ids = deployment.codec.encode_chat([*system, *messages], **options.chat_template_kwargs)
    return Prompt(tuple(ids), options.sampling_params(deployment), options.verify_limit)


def _generate_file(
    folder: Path,
    prompts_file: Path,
    results_file: Path,
    scheduler: str | None,
    given: dict[str, Any],
    *,
    is_chat: bool,
    ray: str | None,
) -> None:
    from dspark_trt.commands import report
    from dspark_trt.commands.prompt_file import generate_lines, unfinished
    from dspark_trt.commands.ray_generation import generate_over_ray
    from dspark_trt.deployment import load_deployment

    config = scheduler_config(scheduler)
    work = unfinished(prompts_file, results_file)
    with report.Bars() as bars:

        def progress(done: float) -> None:
            bars.update("prompts", done)

        if ray is not None:
            summary = generate_over_ray(
                ray, folder, work, results_file, config, given, is_chat=is_chat, progress=progress
            )
        else:
            deployment = load_deployment(folder)
            config = config or scheduler_config(deployment.recipe.scheduler, is_build=True)
            summary = generate_lines(deployment, work, results_file, config, given, is_chat=is_chat, progress=progress)
    report.print_file_summary(summary, results_file)

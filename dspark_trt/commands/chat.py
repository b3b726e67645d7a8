"""`dspark-trt chat`: a conversation with a build, answers as they come."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dspark_trt.commands.generation_options import GenerationOptions, generation_options
from dspark_trt.commands.options import BuildFolder, command
from dspark_trt.commands.scheduler_choice import SchedulerText, scheduler_config
from dspark_trt.errors import RequestError

if TYPE_CHECKING:
    from dspark_trt.contract.scheduler import SchedulerConfig
    from dspark_trt.deployment import Deployment
    from dspark_trt.runtime.loop import DecodingLoop

HELP = """\
/help            this list
/reset           forget the conversation
/system TEXT     set the system message and start anew; without TEXT: take it away
/history         the conversation so far
/set NAME VALUE  change an option, as in: /set temperature 0.7
/quit            leave; Ctrl-D, too. Ctrl-C ends an answer"""

OnPiece = Callable[[str], None]


@dataclass
class Conversation:
    """The messages so far, and how the next answer is made."""

    deployment: Deployment
    scheduler: SchedulerConfig
    given: dict[str, Any]
    messages: list[dict[str, str]] = field(default_factory=list)
    loop: DecodingLoop | None = None  # of the turns so far: the next one begins behind what it has read

    def options(self) -> GenerationOptions:
        return generation_options(self.given)

    def answer(self, text: str, on_piece: OnPiece) -> dict[str, Any]:
        """One turn. An answer that is broken off, or refused, leaves the conversation as it was.

        Raises RequestError when the prompt does not fit or an option is not acceptable; KeyboardInterrupt.
        """
        from dspark_trt.commands.generate import as_prompt
        from dspark_trt.commands.generation import generate

        turns = [*self.messages, {"role": "user", "content": text}]
        options = self.options()
        prompt = as_prompt(self.deployment, [dict(turn) for turn in turns], options, is_chat=True)
        loop = self.loop or self.deployment.make_loop(self.scheduler, prefix_cache=self.deployment.recipe.prefix_cache)
        self.loop = None  # one that was broken off within a step cannot go on
        (result,) = generate(
            self.deployment,
            [prompt.ids],
            prompt.sampling,
            self.scheduler,
            lambda index, piece: on_piece(piece),
            max_verify_len=prompt.max_verify_len,
            loop=loop,
        )
        self.loop = loop
        self.messages = [*turns, {"role": "assistant", "content": result["text"]}]
        return result

    def obey(self, line: str) -> str | None:
        """What a `/` command has to say; None: leave. Raises RequestError for an unknown one."""
        name, _, argument = line[1:].strip().partition(" ")
        match name:
            case "quit" | "exit" | "bye":
                return None
            case "help" | "?":
                return HELP
            case "reset" | "clear":
                self.messages = []
                return "The conversation is forgotten."
            case "system":
                return self._set_system(argument.strip())
            case "history":
                return "\n".join(f"{turn['role']}: {turn['content']}" for turn in self.messages) or "Nothing yet."
            case "set":
                return self._set(argument)
        raise RequestError(f"/{name}: no such command; /help lists them")

    def _set_system(self, text: str) -> str:
        self.given = {name: value for name, value in self.given.items() if name != "system"}
        self.messages = []
        if not text:
            return "No system message from now on; the conversation starts anew."
        self.given["system"] = text
        return "The conversation starts anew with this system message."

    def _set(self, argument: str) -> str:
        name, _, value = argument.partition(" ")
        name = name.strip().lstrip("-").replace("-", "_")
        if name not in GenerationOptions.model_fields or not value.strip():
            raise RequestError(f"/set: expected NAME VALUE, found {argument!r}; names: {_settable()}")
        changed = self.given | {name: value.strip()}
        generation_options(changed)
        self.given = changed
        return f"{name} is {value.strip()} from now on."


def _settable() -> str:
    """Options of one plain value."""
    return ", ".join(
        name
        for name, each in GenerationOptions.model_fields.items()
        if each.annotation not in (dict[str, Any], tuple[str, ...])
    )


@command(GenerationOptions)
def chat(folder: BuildFolder, scheduler: SchedulerText = None, *, given: dict[str, Any]) -> None:
    """Talk to a build: answers stream, the conversation is kept; /help lists what else can be typed."""
    generation_options(given)
    config = scheduler_config(scheduler)
    from dspark_trt.commands import report
    from dspark_trt.deployment import load_deployment

    deployment = load_deployment(folder)
    config = config or scheduler_config(deployment.recipe.scheduler, is_build=True)
    given.setdefault("max_tokens", min(1024, deployment.recipe.max_seq_len or 1024))
    conversation = Conversation(deployment, config, given)
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)  # Ctrl-C ends an answer, not the conversation
    try:
        report.print_note(f"{folder}: type a message; /help lists what else can be typed, /quit leaves")
        _talk(conversation)
    finally:
        signal.signal(signal.SIGINT, previous)


def _talk(conversation: Conversation) -> None:
    from dspark_trt.commands import report

    while True:
        try:
            line = report.ask("> ").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            report.print_note("\n/quit or Ctrl-D leaves")
            continue
        if not line:
            continue
        try:
            if line.startswith("/"):
                said = conversation.obey(line)
                if said is None:
                    return
                report.print_note(said)
            else:
                result = conversation.answer(line, lambda piece: report.print_piece(0, piece))
                report.print_generation(result, is_streamed=True)
        except RequestError as error:
            report.print_error(str(error))
        except KeyboardInterrupt:
            report.print_note("\n(broken off; this turn is forgotten)")

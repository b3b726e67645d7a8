"""What chat completions and completions have in common: ids, usage, the whole answer, its events.

`Format` is what differs; chat.py and completions.py each have one.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from dspark_trt.server.openai.errors import ApiError, internal
from dspark_trt.server.openai.jobs import Prompt
from dspark_trt.server.openai.pieces import Tally
from dspark_trt.server.openai.triton import Piece

Decode = Callable[[Sequence[int]], str]
Pieces = AsyncGenerator[tuple[int, Piece], None]
DONE = b"data: [DONE]\n\n"


class Format(Protocol):
    """How one kind of answer is written."""

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def whole(self, index: int, tally: Tally) -> dict[str, Any]:
        """The choice of a finished answer."""
        ...

    def opening(self, index: int) -> dict[str, Any] | None:
        """The choice of the first event of an answer, where there is one before its text."""
        ...

    def delta(self, index: int, piece: Piece, num_characters: int) -> dict[str, Any] | None:
        """The choice of one event; None: nothing to say yet. `num_characters` stand before it."""
        ...


@dataclass(frozen=True, slots=True)
class Header:
    """What all events of an answer repeat."""

    id: str
    created: int  # seconds since 1970
    model: str

    @classmethod
    def new(cls, prefix: str, model: str) -> Header:
        return cls(f"{prefix}-{secrets.token_hex(12)}", int(time.time()), model)

    def fields(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


@dataclass(frozen=True, slots=True)
class Answering:
    """One request that is being answered."""

    format: Format
    header: Header
    prompts: Sequence[Prompt]
    num_answers: int
    gamma: int
    includes_usage: bool  # in a last event, where the answer is streamed

    async def whole(self, pieces: Pieces) -> dict[str, Any]:
        tallies = [Tally() for _ in range(self.num_answers)]
        async with aclosing(pieces):
            async for index, piece in pieces:
                tallies[index].add(piece)
        choices = [self.format.whole(index, tally) for index, tally in enumerate(tallies)]
        return {**self.header.fields(self.format.whole_object), "choices": choices, **self._usage(tallies)}

    async def events(self, pieces: Pieces) -> AsyncGenerator[bytes, None]:
        """Server-sent events. A failure before the first one is raised, a later one is an event of its own."""
        tallies = [Tally() for _ in range(self.num_answers)]
        is_open = False
        try:
            async with aclosing(pieces):
                async for index, piece in pieces:
                    for opened in range(0 if is_open else self.num_answers):
                        yield self._event(self.format.opening(opened))
                    is_open = True
                    num_characters = len(tallies[index].text)
                    tallies[index].add(piece)
                    yield self._event(self.format.delta(index, piece, num_characters))
        except Exception as error:
            if not is_open:
                raise
            yield event((error if isinstance(error, ApiError) else internal(error)).body())
        else:
            if self.includes_usage:
                chunk = self.header.fields(self.format.chunk_object)
                yield event({**chunk, "choices": [], **self._usage(tallies)})
        yield DONE

    def _event(self, choice: dict[str, Any] | None) -> bytes:
        if choice is None:
            return b""
        nothing_yet = {"usage": None} if self.includes_usage else {}
        return event({**self.header.fields(self.format.chunk_object), "choices": [choice], **nothing_yet})

    def _usage(self, tallies: Sequence[Tally]) -> dict[str, Any]:
        num_prompt_tokens = sum(prompt.num_tokens for prompt in self.prompts)
        num_generated = sum(len(tally.token_ids) for tally in tallies)
        usage = {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt_tokens + num_generated,
            "prompt_tokens_details": {"cached_tokens": num_cached(tallies, len(self.prompts))},
        }
        speculation = tallies[0].speculation(self.gamma) if len(tallies) == 1 else None
        return {"usage": usage, "metrics": {"speculative_decoding": speculation} if speculation else None}


def num_cached(tallies: Sequence[Tally], num_prompts: int) -> int:
    """Of all prompts, each counted once: several answers to one prompt share what the first of them reads."""
    num_each = len(tallies) // num_prompts
    return sum(
        min(tally.num_cached_tokens for tally in tallies[first : first + num_each])
        for first in range(0, len(tallies), num_each)
    )


def event(fields: dict[str, Any]) -> bytes:
    return (
        b"data: " + json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n\n"
    )

"""What a client may send and how long it may wait: the limits of every way in, in one place.

Imports nothing of the runtime, so the front end outside Triton checks by the same numbers as the models inside. All
checks are made before anything is tokenised and outside the thread of the decoding loop.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dspark_trt.contract.scheduler import DEFAULT_MAX_STRETCH
from dspark_trt.errors import RecipeError, RequestError

MAX_PROMPT_BYTES_PER_TOKEN = (
    16  # of text, or of messages: a longer prompt cannot fit max_seq_len tokens of ordinary text
)
MAX_STOP_WORDS = 16
MAX_STOP_WORD_CHARACTERS = 256
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARACTERS = 256
MAX_BAD_WORD_IDS = 1024  # token ids of all bad words together, every spelling counted
MAX_LOGIT_BIASES = 1024
MAX_JSON_BYTES = 64 * 1024  # logit_bias, chat_template_kwargs
MAX_ECHO_CHARACTERS = 200  # of a client's own value in a refusal
MAX_CLIENT_ID_CHARACTERS = 256
MAX_TIMEOUT_MS = 24 * 3600 * 1000
MIN_PRIORITY, MAX_PRIORITY = -100, 100


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """What a server does with more work than it has rows for, and with work that does not end. None: no limit."""

    max_queued_requests: int | None = None  # that wait for a row; None: 16 for every row
    max_queue_s: float = 300.0  # that a request waits for a row
    default_timeout_s: float = 3600.0  # from arrival to the last token, where the request has no `timeout_ms`
    max_tokens: int | None = None  # a larger `max_tokens` of a request is cut to it
    max_stretch: float = DEFAULT_MAX_STRETCH  # of a step that reads prompts beside answers

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None and value <= 0:
                raise RecipeError(f"{name}: expected more than 0, found {value}")
        if not 1.0 <= self.max_stretch < math.inf:
            raise RecipeError(f"max_stretch: expected a number of 1 or more, found {self.max_stretch}")

    def queue_size(self, max_requests: int) -> int:
        return 16 * max_requests if self.max_queued_requests is None else self.max_queued_requests


def max_prompt_bytes(max_seq_len: int) -> int:
    """Bytes of UTF-8 that a prompt, or messages as JSON, may have."""
    return MAX_PROMPT_BYTES_PER_TOKEN * max_seq_len


def shorten(value: Any) -> str:
    """A client's value as a refusal shows it: never more than a line, and only that much of it is formatted."""
    if isinstance(value, str | bytes):
        text = repr(value[: MAX_ECHO_CHARACTERS + 1])
    elif isinstance(value, int) and value.bit_length() > 64:
        text = f"a number of {value.bit_length()} bits"
    elif isinstance(value, int | float) or value is None:
        text = repr(value)
    elif isinstance(value, list | tuple):
        inside = ", ".join([shorten(item) for item in value[:8]] + (["…"] if len(value) > 8 else []))
        text = f"({inside})" if isinstance(value, tuple) else f"[{inside}]"
    else:
        text = f"an object of {len(value)} entries" if isinstance(value, Mapping) else f"a {type(value).__name__}"
    return text if len(text) <= MAX_ECHO_CHARACTERS else f"{text[:MAX_ECHO_CHARACTERS]}…"


def check_count(name: str, found: int, limit: int, what: str) -> None:
    """Raises RequestError that names the field, for more of something than the limit."""
    if found > limit:
        raise RequestError(f"{name}: expected at most {limit} {what}, found {found}")


def check_words(name: str, words: Sequence[str], *, max_words: int, max_characters: int) -> None:
    """Raises RequestError for too many words or a word that is too long."""
    check_count(name, len(words), max_words, "words")
    for word in words:
        check_count(name, len(word), max_characters, "characters in a word")


def check_prompt_bytes(name: str, num_bytes: int, max_seq_len: int) -> None:
    """Raises RequestError for a text that cannot fit, before it is tokenised."""
    limit = max_prompt_bytes(max_seq_len)
    if num_bytes > limit:
        raise RequestError(
            f"{name}: the prompt has {num_bytes} bytes, at most {limit} are read ({MAX_PROMPT_BYTES_PER_TOKEN} for "
            f"each of {max_seq_len} tokens); shorten it"
        )


def check_stop_words(words: Sequence[str]) -> None:
    check_words("stop_words", words, max_words=MAX_STOP_WORDS, max_characters=MAX_STOP_WORD_CHARACTERS)


def check_bad_words(words: Sequence[str]) -> None:
    check_words("bad_words", words, max_words=MAX_BAD_WORDS, max_characters=MAX_BAD_WORD_CHARACTERS)


def check_bad_word_ids(sequences: Iterable[Sequence[int]]) -> None:
    check_count(
        "bad_words", sum(map(len, sequences)), MAX_BAD_WORD_IDS, "token ids in all words, every spelling counted"
    )


def check_logit_bias(num_entries: int) -> None:
    check_count("logit_bias", num_entries, MAX_LOGIT_BIASES, "entries")


def retry_hint(seconds: float) -> str:
    """How a refusal says when to come again; `retry_after_s` reads it back, for a Retry-After header."""
    return f"retry after {max(1, round(seconds))} s"


def retry_after_s(message: str) -> int | None:
    """The seconds of a `retry_hint` in a message; None where there is none."""
    _, found, rest = message.rpartition("retry after ")
    number = rest.split(" ", 1)[0]
    return int(number) if found and number.isdecimal() else None

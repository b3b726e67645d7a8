"""Text of a growing token sequence: characters that are complete, up to the stop string.

Tokens are decoded where all tokens of the request are known, never chunk by chunk: a token may hold half a character,
and whether it begins with a space can depend on the token before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

NUM_PROMPT_TOKENS_FOR_CONTEXT = 5
REPLACEMENT_CHARACTER = "\ufffd"  # what a decoder puts for bytes that are no character, or not yet one


class Detokenizer:
    """Text of a growing token sequence, character by complete character.

    The window [_start, _read) has been handed out; it is decoded again with the new tokens, so that the decoder sees
    what stands before them. What it adds to the window's own text is new.
    """

    def __init__(self, decode: Decode, prompt_ids: Sequence[int]) -> None:
        self._decode = decode
        self._tokens = list(prompt_ids[-NUM_PROMPT_TOKENS_FOR_CONTEXT:])
        self._start, self._read = 0, len(self._tokens)
        if decode(self._tokens).endswith(REPLACEMENT_CHARACTER):  # the prompt ends inside a character: not ours
            self._start = self._read

    def push(self, token_id: int) -> str:
        """The text that became certain with this token."""
        self._tokens.append(token_id)
        text, num_known = self._window()
        if len(text) <= num_known or text.endswith(REPLACEMENT_CHARACTER):
            return ""
        self._start, self._read = self._read, len(self._tokens)
        return text[num_known:]

    def flush(self) -> str:
        """What is left: an unfinished character, as the decoder shows it."""
        text, num_known = self._window()
        self._start = self._read = len(self._tokens)
        return text[num_known:]

    def _window(self) -> tuple[str, int]:
        """The window's text with all new tokens, and how many of its characters are handed out."""
        known = self._decode(self._tokens[self._start : self._read])
        return self._decode(self._tokens[self._start :]), len(known)


class TextStream:
    """Text of one request up to its stop string.

    The stop string that is completed first ends the text, however the tokens split it; among those completed by the
    same character, the longest.
    """

    def __init__(
        self, decode: Decode, prompt_ids: Sequence[int], *, stop_strings: Sequence[str], include_stop_string: bool
    ) -> None:
        self._detokenizer = Detokenizer(decode, prompt_ids)
        self._stop_strings = tuple(stop_strings)
        self._include_stop_string = include_stop_string
        self._held = ""  # might be the beginning of a stop string

    def push(self, token_id: int, *, may_stop: bool) -> tuple[str, bool]:
        """(text that may be sent, whether this token completed a stop string)."""
        text = self._held + self._detokenizer.push(token_id)
        matches = [(at + len(stop), at) for stop in self._stop_strings if may_stop and (at := text.find(stop)) >= 0]
        if matches:
            end, start = min(matches)
            self._held = ""
            return text[: end if self._include_stop_string else start], True
        num_held = self._num_held(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], False

    def flush(self) -> str:
        """All that was held back: the request ended for another reason."""
        text = self._held + self._detokenizer.flush()
        self._held = ""
        return text

    def _num_held(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max(map(len, self._stop_strings), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(len(stop) > length and stop.startswith(text[-length:]) for stop in self._stop_strings):
                return length
        return 0

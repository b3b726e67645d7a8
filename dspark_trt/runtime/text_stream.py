"""The text of a growing token sequence, and where a stop string ends it.

Tokens are decoded where all tokens of the request are known, never chunk by chunk: a token may hold half a character,
and whether it begins with a space can depend on the token before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

NUM_PROMPT_TOKENS_FOR_CONTEXT = 5
REPLACEMENT_CHARACTER = "\ufffd"  # what a decoder puts for bytes that are no character, or not yet one
_MAX_UNFINISHED = 3  # bytes of a character that wait for the next one; a decoder shows up to so many of them
_MAX_WINDOW = 24  # tokens that are decoded again with every new one
_MIN_CONTEXT = 8  # tokens that stay in the window: more than a character has bytes


class Detokenizer:
    """Text of a growing token sequence, character by complete character.

    A window of the last tokens is decoded with every new one; of its text so many characters have been handed out. Only
    the last three U+FFFD can still become a character, so a run of bytes that are none costs no more than any other
    text and is handed out as it comes. (`tokenizers.decoders.DecodeStream` waits for its end, and decodes all of it
    each time.)
    """

    def __init__(self, decode: Decode, prompt_ids: Sequence[int]) -> None:
        self._decode = decode
        self._window = list(prompt_ids[-NUM_PROMPT_TOKENS_FOR_CONTEXT:])
        text = decode(self._window)
        self._num_known = len(text)  # characters of the window's text that are handed out
        if text.endswith(REPLACEMENT_CHARACTER):  # the prompt ends inside a character: not ours
            self._window, self._num_known = [], 0

    def push(self, token_id: int) -> str:
        """The text that became certain with this token."""
        self._window.append(token_id)
        text = self._decode(self._window)
        num_unfinished = len(text) - len(text.rstrip(REPLACEMENT_CHARACTER))
        new = self._hand_out(text, len(text) - min(num_unfinished, _MAX_UNFINISHED))
        if len(self._window) > _MAX_WINDOW:
            self._shrink(text)
        return new

    def flush(self) -> str:
        """What is left: an unfinished character, as the decoder shows it."""
        text = self._decode(self._window)
        return self._hand_out(text, len(text))

    def _hand_out(self, text: str, end: int) -> str:
        new = text[self._num_known : end]
        self._num_known = max(self._num_known, end)
        return new

    def _shrink(self, text: str) -> None:
        """Forget the window's first tokens, where what is left still reads the same.

        It does not where it would begin within a character, so a few places are tried; if none fits (a decoder that
        shows valid bytes as invalid for the sake of an earlier one), the one in the middle is taken, and text that
        follows reads as if it began there.
        """
        for begin in range(len(self._window) - _MIN_CONTEXT - 4, len(self._window) - _MIN_CONTEXT + 1):
            rest = self._decode(self._window[begin:])
            if text.endswith(rest):
                break
        num_dropped = len(text) - len(rest)
        self._window = self._window[begin:]
        self._num_known = min(max(self._num_known - num_dropped, 0), len(rest))


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
        self._num_protected = (
            0  # characters of it that came when nothing might stop: a stop string must end behind them
        )

    def push(self, token_id: int, *, may_stop: bool) -> tuple[str, bool]:
        """(text that may be sent, whether this token completed a stop string)."""
        text = self._held + self._detokenizer.push(token_id)
        if not may_stop:
            self._num_protected = len(text)
        matches = [(at + len(stop), at) for stop in self._stop_strings if (at := self._find(text, stop)) >= 0]
        if matches:
            end, start = min(matches)
            self._held = ""
            return text[: end if self._include_stop_string else start], True
        num_sent = len(text) - self._num_held(text)
        self._held = text[num_sent:]
        self._num_protected = max(self._num_protected - num_sent, 0)
        return text[:num_sent], False

    def flush(self) -> str:
        """All that was held back: the request ended for another reason."""
        text = self._held + self._detokenizer.flush()
        self._held = ""
        return text

    def _find(self, text: str, stop: str) -> int:
        """Where the first stop string begins that ends behind what is protected; -1: nowhere."""
        return text.find(stop, max(self._num_protected - len(stop) + 1, 0))

    def _num_held(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max(map(len, self._stop_strings), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(len(stop) > length and stop.startswith(text[-length:]) for stop in self._stop_strings):
                return length
        return 0

"""Text of a token stream: whole characters, no lost space, stop strings wherever the tokens split them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from dspark_trt.runtime.text_stream import Detokenizer, TextStream


def bytes_decode(ids: Sequence[int]) -> str:
    """A byte-level decoder: one token for each byte."""
    return bytes(ids).decode("utf-8", errors="replace")


PIECES = ["▁Hello", "▁world", "▁", "!", "wide", "▁web", "\n"]


def sentencepiece_decode(ids: Sequence[int]) -> str:
    """Drops the space in front of the first word of what it is given."""
    return "".join(PIECES[token] for token in ids).replace("▁", " ").removeprefix(" ")


def stream(*stop_strings: str, prompt: Sequence[int] = (), include: bool = False, decode=bytes_decode) -> TextStream:
    return TextStream(decode, prompt, stop_strings=stop_strings, include_stop_string=include)


def feed(text_stream: TextStream, tokens: Sequence[int], may_stop: bool = True) -> tuple[list[str], bool]:
    chunks = []
    for token in tokens:
        text, is_stopped = text_stream.push(token, may_stop=may_stop)
        chunks.append(text)
        if is_stopped:
            return chunks, True
    return chunks, False


@pytest.mark.parametrize("text", ["é", "日本", "😀", "👩‍👩‍👧", "naïve 😀 done"])
def test_a_character_comes_whole_or_not_at_all(text: str) -> None:
    detokenizer = Detokenizer(bytes_decode, [])
    chunks = [detokenizer.push(byte) for byte in text.encode()]
    assert "".join(chunks) == text
    assert all("\ufffd" not in chunk for chunk in chunks)
    assert detokenizer.flush() == ""


def test_a_space_between_words_is_never_lost() -> None:
    detokenizer = Detokenizer(sentencepiece_decode, [0])
    assert [detokenizer.push(token) for token in (1, 3, 1, 4, 5)] == [" world", "!", " world", "wide", " web"]


def test_the_first_word_after_the_prompt_keeps_its_space() -> None:
    assert Detokenizer(sentencepiece_decode, [0, 1]).push(1) == " world"
    assert Detokenizer(sentencepiece_decode, [6]).push(1) == " world"


def test_an_unfinished_character_is_shown_as_the_decoder_shows_it_when_the_request_ends() -> None:
    detokenizer = Detokenizer(bytes_decode, list(b"x"))
    assert [detokenizer.push(byte) for byte in "a😀".encode()[:-1]] == ["a", "", "", ""]
    assert detokenizer.flush() == bytes_decode("😀".encode()[:-1])
    assert detokenizer.flush() == ""


def test_a_prompt_that_ends_inside_a_character_does_not_swallow_text() -> None:
    detokenizer = Detokenizer(bytes_decode, "😀".encode()[:2])
    tokens = b"ab"
    assert "".join(detokenizer.push(byte) for byte in tokens) == "ab"


def test_tokens_without_text_give_none() -> None:
    def decode(ids: Sequence[int]) -> str:
        return "".join(chr(token) for token in ids if token < 256)

    detokenizer = Detokenizer(decode, [1000])
    assert [detokenizer.push(token) for token in (1000, 97, 1000, 98)] == ["", "a", "", "b"]


def test_stop_strings_at_every_split() -> None:
    """'one STOP two' in all 2^11 divisions into tokens: always the same text, and nothing of the stop string before."""
    text, stop = "one STOP two", "STOP"
    for cuts in itertools.product([False, True], repeat=len(text) - 1):
        bounds = [0, *(at + 1 for at, cut in enumerate(cuts) if cut), len(text)]
        pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]
        found = stream(stop, decode=lambda ids, pieces=pieces: "".join(pieces[token] for token in ids))
        chunks, is_stopped = feed(found, range(len(pieces)))
        assert is_stopped
        assert "".join(chunks) == "one "
        completing = next(at for at, end in enumerate(bounds[1:]) if end >= text.index(stop) + len(stop))
        assert len(chunks) == completing + 1, "the token that completes the stop string ends the request"


def test_text_that_may_become_a_stop_string_is_held_back_and_then_given() -> None:
    found = stream("STOP")
    assert feed(found, b"aSTOx")[0] == ["a", "", "", "", "STOx"]
    assert feed(found, b"ST")[0] == ["", ""]
    assert found.flush() == "ST"


def test_only_what_can_still_become_a_stop_string_is_held_back() -> None:
    assert feed(stream("aab"), b"aaaab")[0] == ["", "", "a", "a", ""]


def test_the_stop_string_is_included_on_request() -> None:
    assert "".join(feed(stream("END", include=True), b"the END.")[0]) == "the END"


def test_the_stop_string_that_is_completed_first_wins() -> None:
    assert feed(stream("abcd", "bc"), b"xabcd") == (["x", "", "", "a"], True)
    whole = stream("abcd", "bc", decode=lambda ids: "xabcd" * len(ids))
    assert whole.push(0, may_stop=True) == ("xa", True)


def test_of_two_completed_together_the_longest_wins() -> None:
    assert "".join(feed(stream("c", "bc"), b"abc")[0]) == "a"


def test_before_min_tokens_a_stop_string_is_text() -> None:
    found = stream("END")
    assert "".join(feed(found, b"ENDx", may_stop=False)[0]) == "ENDx"
    assert feed(found, b"yEND") == (["y", "", "", ""], True)


def test_a_stop_string_may_end_inside_a_multi_byte_text() -> None:
    assert "".join(feed(stream("😀"), "a😀b".encode())[0]) == "a"


def test_run_of_invalid_bytes_streams_as_it_comes_and_decodes_no_more_than_a_window() -> None:
    """sglang#34740: one answer of bytes that are no character made every later step slower, for everyone."""
    longest = 0

    def decode(token_ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(token_ids))
        return bytes(token_ids).decode(errors="replace")

    detokenizer = Detokenizer(decode, [65])
    texts = [detokenizer.push(0xFF) for _ in range(500)]
    assert sum(map(len, texts)) == 497, "the last three may still become a character"
    assert longest < 32
    assert detokenizer.push(0xE4) + detokenizer.push(0xB8) + detokenizer.push(0xAD) == "\ufffd" * 3 + "中"
    assert detokenizer.flush() == ""


def test_long_text_of_any_script_is_the_text_of_all_its_bytes() -> None:
    text = "Grüße, 東京 🦊🦊🦊 and e\u0301 " * 20
    detokenizer = Detokenizer(bytes_decode, [])
    assert "".join(detokenizer.push(byte) for byte in text.encode()) + detokenizer.flush() == text


def test_stop_string_that_ended_within_protected_text_is_not_found_later() -> None:
    """min_tokens protects "ab"; it is held back because it may begin "abc", and must not be searched again for "b"."""
    stream = TextStream(bytes_decode, [], stop_strings=("abc", "b"), include_stop_string=False)
    assert stream.push(ord("a"), may_stop=False) == ("", False)
    assert stream.push(ord("b"), may_stop=False) == ("", False)
    assert stream.push(ord("x"), may_stop=True) == ("abx", False)
    assert stream.push(ord("b"), may_stop=True) == ("", True)
    completed = TextStream(bytes_decode, [], stop_strings=("abc",), include_stop_string=False)
    completed.push(ord("a"), may_stop=False)
    completed.push(ord("b"), may_stop=False)
    assert completed.push(ord("c"), may_stop=True) == ("", True), "completed by text that may stop"

"""Streaming text equals whole-text decoding, for any tokens and any stop strings."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_trt.runtime.text_stream import Detokenizer, TextStream

SETTINGS = settings(max_examples=300, derandomize=True, deadline=None)


def decoder(vocabulary: Sequence[bytes]):
    return lambda ids: b"".join(vocabulary[token] for token in ids).decode("utf-8", errors="replace")


def sentencepiece(ids: Sequence[int]) -> str:
    pieces = ["▁", "▁a", "b", "▁é", "😀", "▁▁"]
    return "".join(pieces[token] for token in ids).replace("▁", " ").removeprefix(" ")


@st.composite
def split_texts(draw) -> tuple[str, list[bytes]]:
    """A text and its UTF-8 bytes, cut anywhere."""
    text = draw(st.text(alphabet=st.sampled_from("aé日😀 \n‍"), max_size=12))
    encoded = text.encode()
    cuts = sorted(draw(st.sets(st.integers(1, max(len(encoded) - 1, 1)), max_size=8)))
    bounds = [0, *[cut for cut in cuts if cut < len(encoded)], len(encoded)]
    return text, [encoded[a:b] for a, b in itertools.pairwise(bounds)]


@SETTINGS
@given(split_texts(), split_texts())
def test_text_arrives_in_whole_characters(prompt: tuple[str, list[bytes]], output: tuple[str, list[bytes]]) -> None:
    vocabulary = prompt[1] + output[1]
    detokenizer = Detokenizer(decoder(vocabulary), range(len(prompt[1])))
    chunks = [detokenizer.push(token) for token in range(len(prompt[1]), len(vocabulary))]
    assert all("\ufffd" not in chunk for chunk in chunks)
    assert "".join(chunks) == output[0]
    assert detokenizer.flush() == ""


@SETTINGS
@given(st.lists(st.binary(min_size=1, max_size=3), max_size=20))
def test_any_bytes_equal_the_decoding_of_the_whole(pieces: list[bytes]) -> None:
    decode = decoder(pieces)
    detokenizer = Detokenizer(decode, [])
    streamed = "".join(detokenizer.push(token) for token in range(len(pieces))) + detokenizer.flush()
    assert streamed == decode(range(len(pieces)))


@SETTINGS
@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.lists(st.integers(0, 5), max_size=12))
def test_spaces_survive_a_decoder_that_strips_the_first_one(prompt: list[int], output: list[int]) -> None:
    detokenizer = Detokenizer(sentencepiece, prompt)
    streamed = "".join(detokenizer.push(token) for token in output) + detokenizer.flush()
    # a decoder that is shown the last tokens of the prompt at most has to find the same text
    tail = prompt[-5:]
    assert streamed == sentencepiece([*tail, *output])[len(sentencepiece(tail)) :]


def first_stop(text: str, stops: list[str], include: bool) -> str | None:
    """What is left of `text` when it is read character by character."""
    for end in range(1, len(text) + 1):
        completed = [stop for stop in stops if text[:end].endswith(stop)]
        if completed:
            return text[:end] if include else text[: end - max(map(len, completed))]
    return None


@SETTINGS
@given(
    st.lists(st.text(alphabet="ab", min_size=0, max_size=4), max_size=8),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3),
    st.booleans(),
)
def test_stop_strings_do_not_depend_on_how_tokens_split_the_text(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    stream = TextStream(
        lambda ids: "".join(pieces[token] for token in ids), [], stop_strings=stops, include_stop_string=include
    )
    sent = ""
    is_stopped = False
    for token in range(len(pieces)):
        text, is_stopped = stream.push(token, may_stop=True)
        sent += text
        if is_stopped:
            break
    if not is_stopped:
        sent += stream.flush()
    expected = first_stop("".join(pieces), stops, include)
    assert is_stopped == (expected is not None)
    assert sent == ("".join(pieces) if expected is None else expected)

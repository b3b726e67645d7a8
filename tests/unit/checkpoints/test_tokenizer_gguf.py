"""Tokenizers rebuilt from GGUF metadata: the splits before BPE, added tokens, and the demonstration target's ids."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from dspark_trt.checkpoints.gguf_target import open_gguf
from dspark_trt.checkpoints.gguf_tokenizer import gguf_end_tokens, gguf_tokenizer
from dspark_trt.checkpoints.tokenizer import write_tokenizer
from dspark_trt.errors import CheckpointError
from dspark_trt.text import TextCodec
from tests.support.gguf_factory import write_tokenizer_gguf

BYTES = sorted(ByteLevel.alphabet())
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
TOKENS = [*BYTES, "Ġa", "ab", "Ġab", "12", "<|start|>", "<think>", "[PAD0]", "<unk>"]
TYPES = [*[NORMAL] * 260, CONTROL, USER_DEFINED, UNUSED, UNKNOWN]
MERGES = ["Ġ a", "a b", "Ġ ab", "1 2"]
TEXTS = [
    "It's 12345 and 3.14",
    "I'LL, we'VE  don't",
    "  two  spaces ",
    "tab\tand\r\n\r\nlines\n",
    "naïve café e\u0301",
    "東京タワー 12月",
    "🦊👩‍👩‍👧 ½ ² Ⅷ ٣٤٥",
    "foo_bar(x)=>{};",
]


def build(path: Path, pre: str | None, **options: object) -> Tokenizer:
    values = {"tokens": TOKENS, "types": TYPES, "merges": MERGES, **options}
    file = write_tokenizer_gguf(path / "t.gguf", pre=pre, **values)
    return gguf_tokenizer(open_gguf(file), file)


def words(tokenizer: Tokenizer, text: str) -> list[str]:
    """The pieces that BPE sees, as text."""
    assert tokenizer.pre_tokenizer is not None
    spans = [span for _, span in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    return [text[start:end] for start, end in spans]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["It", "'s", " ", "1", "2", "3", "4", "5", " and", " ", "3", ".", "1", "4", "\n\n", " x"]),
        ("llama-bpe", ["It", "'s", " ", "123", "45", " and", " ", "3", ".", "14", "\n\n", " x"]),
        ("qwen2", ["It", "'s", " ", "1", "2", "3", "4", "5", " and", " ", "3", ".", "1", "4", "\n\n", " x"]),
        ("default", ["It", "'", "s", " ", "123", "45", " and", " ", "3", ".", "14", "\n\n", " x"]),
    ],
)
def test_text_is_split_as_the_named_tokenizer_splits_it(tmp_path: Path, pre: str, expected: list[str]) -> None:
    assert words(build(tmp_path, pre), "It's 12345 and 3.14\n\n x") == expected


def test_contractions_ignore_case_only_where_the_tokenizer_does(tmp_path: Path) -> None:
    assert words(build(tmp_path, "qwen2"), "we'LL") == ["we", "'LL"]
    assert words(build(tmp_path, "smollm"), "we'LL") == ["we", "'", "LL"]


@pytest.mark.parametrize("pre", ["smollm", "llama-bpe", "qwen2", "default", None])
@pytest.mark.parametrize("text", TEXTS)
def test_decode_undoes_encode(tmp_path: Path, pre: str | None, text: str) -> None:
    import unicodedata

    tokenizer = build(tmp_path, pre)
    expected = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == expected


def test_a_file_that_names_no_split_gets_the_default_one(tmp_path: Path) -> None:
    assert words(build(tmp_path, None), "12345'") == ["123", "45", "'"]


def test_control_and_user_defined_tokens_keep_their_ids_and_are_matched_first(tmp_path: Path) -> None:
    tokenizer = build(tmp_path, "smollm")
    ids = tokenizer.encode("<|start|>ab<think> a").ids
    assert ids == [TOKENS.index(token) for token in ("<|start|>", "ab", "<think>", "Ġa")]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab<think> a"  # user-defined tokens are text


def test_padding_tokens_are_no_text(tmp_path: Path) -> None:
    tokenizer = build(tmp_path, "smollm")
    assert tokenizer.token_to_id("[PAD0]") is None
    assert tokenizer.decode([TOKENS.index("[PAD0]")]) == ""


@pytest.mark.parametrize(
    ("pre", "add_bos", "expected"),
    [
        ("smollm", True, True),
        ("smollm", False, False),
        ("smollm", None, False),
        ("llama-bpe", True, True),
        ("llama-bpe", False, False),
        ("llama-bpe", None, True),
    ],
)
def test_bos_is_added_where_the_file_or_the_kind_says_so(
    tmp_path: Path, pre: str, add_bos: bool | None, expected: bool
) -> None:
    start = TOKENS.index("<|start|>")
    ids = build(tmp_path, pre, add_bos=add_bos, special_ids={"bos": start}).encode("ab").ids
    assert ids == [*([start] if expected else []), TOKENS.index("ab")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pre": "deepseek-llm"}, "'gpt2' with pre-tokenizer 'deepseek-llm' is not known; expected .*'smollm'"),
        ({"pre": "default", "model": "llama"}, "tokenizer 'llama' with pre-tokenizer 'default' is not known"),
        ({"pre": "smollm", "merges": ["no such"]}, "merges do not fit its tokens"),
        ({"pre": "smollm", "types": TYPES[:-1]}, "tokens, token types or merges are missing"),
    ],
)
def test_tokenizer_that_is_not_known_or_damaged_is_refused_by_name(tmp_path: Path, options: dict, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        build(tmp_path, **options)


def test_template_and_special_tokens_come_along(tmp_path: Path) -> None:
    file = write_tokenizer_gguf(
        tmp_path / "t.gguf",
        tokens=TOKENS,
        types=TYPES,
        merges=MERGES,
        pre="smollm",
        chat_template="{{ bos_token }}{{ messages[0].content }}",
        special_ids={"bos": TOKENS.index("<|start|>"), "eos": 2, "eot": 3},
    )
    write_tokenizer(str(file), tmp_path / "tokenizer")
    codec = TextCodec.load(tmp_path / "tokenizer")
    assert codec.render_chat([{"role": "user", "content": "ab"}]) == "<|start|>ab"


@pytest.mark.parametrize(
    ("special_ids", "expected"),
    [({"eos": 2}, (2,)), ({"eos": 2, "eot": 3, "eom": 1}, (2, 3, 1)), ({}, ())],
)
def test_end_tokens_are_all_that_the_file_names(tmp_path: Path, special_ids: dict, expected: tuple[int, ...]) -> None:
    file = write_tokenizer_gguf(
        tmp_path / "t.gguf", tokens=TOKENS, types=TYPES, merges=MERGES, pre="smollm", special_ids=special_ids
    )
    assert gguf_end_tokens(open_gguf(file)) == expected


def test_control_tokens_whose_name_says_it_end_a_text(tmp_path: Path) -> None:
    tokens, types = [*TOKENS, "<|eot_id|>", "<|im_end|>"], [*TYPES, CONTROL, NORMAL]
    file = write_tokenizer_gguf(
        tmp_path / "t.gguf", tokens=tokens, types=types, merges=MERGES, pre="smollm", special_ids={"eos": 2}
    )
    assert gguf_end_tokens(open_gguf(file)) == (2, len(TOKENS))


@pytest.fixture(scope="module")
def demo_codec(demo_target_path: Path, tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    destination = tmp_path_factory.mktemp("demo") / "tokenizer"
    write_tokenizer(str(demo_target_path), destination)
    return TextCodec.load(destination)


@pytest.mark.demo
def test_demonstration_tokenizer_splits_digits(demo_codec: TextCodec) -> None:
    """GGUF loses `Digits(individual_digits)`:
    without it 12345 would become other tokens than the model was trained on."""
    ids = demo_codec.encode("It's 12345 and 3.14")
    assert ids == [1589, 506, 216, 33, 34, 35, 36, 37, 284, 216, 35, 30, 33, 36]
    pieces = [demo_codec.decode([token]) for token in ids]
    assert pieces == ["It", "'s", " ", "1", "2", "3", "4", "5", " and", " ", "3", ".", "1", "4"]


@pytest.mark.demo
@pytest.mark.parametrize("text", TEXTS)
def test_demonstration_tokenizer_loses_nothing(demo_codec: TextCodec, text: str) -> None:
    ids = demo_codec.encode(text)
    assert demo_codec.decode(ids, skip_special_tokens=False) == text
    assert not any(demo_codec.decode([token]) == "" for token in ids)


@pytest.mark.demo
def test_demonstration_chat_ends_with_the_assistant_header(demo_codec: TextCodec) -> None:
    text = demo_codec.render_chat([{"role": "user", "content": "Hi"}])
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    ids = demo_codec.encode_chat([{"role": "user", "content": "Hi"}])
    assert ids.count(1) == 3  # <|im_start|> is one token, three times, and no BOS besides
    assert demo_codec.decode(ids, skip_special_tokens=False) == text

"""Builds a tokenizer from the metadata of a GGUF file.

A GGUF file keeps vocabulary and merges of a byte-level BPE, but only a name (`tokenizer.ggml.pre`) for the way text is
split before them. The splits below are those of the tokenizers that carry the name; another name is refused, since a
wrong split gives other ids for the same text without an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Split
from tokenizers.processors import TemplateProcessing

from dspark_trt.checkpoints.target_text import SpecialTokens, TargetText
from dspark_trt.errors import CheckpointError

_KEYS = gguf.Keys.Tokenizer
_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
_GPT2_WORDS = rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)"
_END_NAMES = frozenset(
    ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>")
)
_GPT4_WORDS = (
    rf"(?i:{_CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{DIGITS}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _Kind:
    """What stands behind one name of `tokenizer.ggml.pre`."""

    splits: Callable[[], list[PreTokenizer]]
    is_nfc: bool = False
    ignore_merges: bool = False  # a word that is a token is not built from merges
    adds_bos: bool = False  # where the file does not say


def _regex(*patterns: str) -> Callable[[], list[PreTokenizer]]:
    """Split by one pattern after the other, then map bytes to characters."""
    return lambda: [
        *(Split(Regex(pattern), behavior="isolated") for pattern in patterns),
        ByteLevel(add_prefix_space=False, use_regex=False),
    ]


_KINDS = {
    "smollm": _Kind(lambda: [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]),
    "llama-bpe": _Kind(_regex(_GPT4_WORDS.replace("{DIGITS}", "{1,3}")), ignore_merges=True, adds_bos=True),
    "qwen2": _Kind(_regex(_GPT4_WORDS.replace("{DIGITS}", "")), is_nfc=True),
    # What llama.cpp does with a file that names no other kind.
    "default": _Kind(_regex(r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]")),
}


def gguf_tokenizer(reader: Any, path: Path) -> Tokenizer:
    """Raises CheckpointError when the file's tokenizer is not a byte-level BPE of a known kind, or is damaged."""
    model, pre = _get(reader, _KEYS.MODEL), _get(reader, _KEYS.PRE) or "default"
    if model != "gpt2" or pre not in _KINDS:
        raise CheckpointError(
            f"{path}: tokenizer {model!r} with pre-tokenizer {pre!r} is not known; expected 'gpt2' with one of "
            f"{', '.join(map(repr, _KINDS))}. Use the model's Hugging Face checkpoint, which has a tokenizer.json"
        )
    tokens, types, merges = _get(reader, _KEYS.LIST), _get(reader, _KEYS.TOKEN_TYPE), _get(reader, _KEYS.MERGES)
    if not tokens or not merges or len(types or ()) != len(tokens):
        raise CheckpointError(f"{path}: the tokenizer's tokens, token types or merges are missing; download it again")
    kind = _KINDS[pre]
    vocabulary = {token: index for index, token in enumerate(tokens) if types[index] != gguf.TokenType.UNUSED}
    try:
        bpe = BPE(vocabulary, [_merge(merge) for merge in merges], fuse_unk=False, ignore_merges=kind.ignore_merges)
    except Exception as error:  # tokenizers raises plain Exception
        raise CheckpointError(
            f"{path}: the tokenizer's merges do not fit its tokens ({error}); download it again"
        ) from None
    tokenizer = Tokenizer(bpe)
    if kind.is_nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(kind.splits())
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, tokens, types)
    bos_id, adds_bos = _get(reader, _KEYS.BOS_ID), _get(reader, _KEYS.ADD_BOS)
    if bos_id is not None and bos_id < len(tokens) and (kind.adds_bos if adds_bos is None else adds_bos):
        tokenizer.post_processor = TemplateProcessing(
            single=f"{tokens[bos_id]} $A", special_tokens=[(tokens[bos_id], bos_id)]
        )
    return tokenizer


def gguf_text(reader: Any, path: Path) -> TargetText:
    """Raises CheckpointError as `gguf_tokenizer` does."""
    return TargetText(gguf_tokenizer(reader, path), _get(reader, _KEYS.CHAT_TEMPLATE), _special_tokens(reader))


def gguf_end_tokens(reader: Any) -> tuple[int, ...]:
    """Those that keys of the file name, then control tokens whose own name says it, as llama.cpp has it."""
    keys = (_KEYS.EOS_ID, _KEYS.EOT_ID, _KEYS.EOM_ID)
    tokens, types = _get(reader, _KEYS.LIST) or [], _get(reader, _KEYS.TOKEN_TYPE) or []
    named = (
        index
        for index, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if token in _END_NAMES and kind == gguf.TokenType.CONTROL
    )
    stated = (token for key in keys if (token := _get(reader, key)) is not None)
    return (*stated, *named)


def _special_tokens(reader: Any) -> SpecialTokens:
    """The variables that a chat template may use."""
    tokens = _get(reader, _KEYS.LIST)
    keys = {
        "bos_token": _KEYS.BOS_ID,
        "eos_token": _KEYS.EOS_ID,
        "unk_token": _KEYS.UNK_ID,
        "pad_token": _KEYS.PAD_ID,
    }
    ids = {name: _get(reader, key) for name, key in keys.items()}
    return {name: tokens[index] for name, index in ids.items() if index is not None and index < len(tokens)}


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Control tokens become special, user-defined ones plain added tokens; both are matched before text is split."""
    by_type = {
        kind: [AddedToken(token, normalized=False) for token, found in zip(tokens, types, strict=True) if found == kind]
        for kind in (gguf.TokenType.CONTROL, gguf.TokenType.UNKNOWN, gguf.TokenType.USER_DEFINED)
    }
    tokenizer.add_special_tokens(by_type[gguf.TokenType.CONTROL] + by_type[gguf.TokenType.UNKNOWN])
    tokenizer.add_tokens(by_type[gguf.TokenType.USER_DEFINED])


def _merge(merge: str) -> tuple[str, str]:
    """Two tokens with a space between; a token may itself start with a space in older files."""
    left, _, right = merge[1:].partition(" ")
    return merge[:1] + left, right


def _get(reader: Any, key: str) -> Any:
    entry = reader.get_field(key)
    return None if entry is None else entry.contents()

"""What the text side of a target says about the model: which tokens end a text, and whether ids fit the embedding."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tokenizers import Tokenizer

from dspark_trt.errors import CheckpointError
from dspark_trt.text import TextCodec, TextSettings

logger = logging.getLogger(__name__)

SpecialTokens = dict[str, str | list[str]]
_ANSWER = "ANSWER"  # stands for the text of a turn
_QUESTION = {"role": "user", "content": "QUESTION"}


@dataclass(frozen=True, slots=True)
class TargetText:
    """The tokenizer, the source of the chat template, and the special tokens by the names that templates use."""

    tokenizer: Tokenizer
    template: str | None
    special_tokens: SpecialTokens


def end_token_ids(stated: Mapping[str, Iterable[int]], text: TargetText | None, where: str) -> tuple[int, ...]:
    """Every token that some source says ends a text, each once: `stated` ones first, in order.

    `stated`: ids by the name of what states them. The tokenizer's own `eos_token` counts too, and the token that ends a
    turn in the chat template. Where a later source adds to the first one, a warning says so.
    """
    sources = {name: tuple(dict.fromkeys(ids)) for name, ids in stated.items()}
    if text is not None:
        sources["eos_token of the tokenizer"] = _eos_token(text)
        sources["chat template (end of a turn)"] = _end_of_turn(text)
    sources = {name: ids for name, ids in sources.items() if ids}
    found = tuple(dict.fromkeys(token for ids in sources.values() for token in ids))
    if sources:
        first, known = next(iter(sources.items()))
        for name, ids in sources.items():
            if added := sorted(set(ids) - set(known)):
                logger.warning(
                    "%s: %s ends texts at %s, %s at %s too; all of them count", where, first, list(known), name, added
                )
    return found


def check_vocabulary(text: TargetText, vocab_size: int, where: str) -> None:
    """Raises CheckpointError when the tokenizer has an id that the embedding has no row for."""
    vocabulary = text.tokenizer.get_vocab(with_added_tokens=True)
    token, largest = max(vocabulary.items(), key=lambda item: item[1], default=("", -1))
    if largest >= vocab_size:
        raise CheckpointError(
            f"{where}: the tokenizer's token {token[:80]!r} has id {largest}, but the embedding has {vocab_size} rows "
            "(vocab_size): a prompt with it could not be read. Use the tokenizer that belongs to these weights, or the "
            "checkpoint whose embedding was enlarged for it"
        )


def _eos_token(text: TargetText) -> tuple[int, ...]:
    name = text.special_tokens.get("eos_token")
    token = text.tokenizer.token_to_id(name) if isinstance(name, str) else None
    return () if token is None else (token,)


def _end_of_turn(text: TargetText) -> tuple[int, ...]:
    """The special token that stands behind an answer, where the template can be rendered and there is one."""
    if text.template is None:
        return ()
    try:
        codec = TextCodec(text.tokenizer, TextSettings(special_tokens=text.special_tokens), text.template)
        chat = [_QUESTION, {"role": "assistant", "content": _ANSWER}]
        behind = codec.render_chat(chat, add_generation_prompt=False).rpartition(_ANSWER)[2].lstrip()
    except Exception:  # whatever a template raises: the build says what is wrong with it
        return ()
    added = text.tokenizer.get_added_tokens_decoder()
    ids = {token.content: token_id for token_id, token in added.items() if behind.startswith(token.content)}
    return (ids[max(ids, key=len)],) if ids else ()

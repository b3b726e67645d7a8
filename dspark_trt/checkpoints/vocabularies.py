"""Whether equal ids are equal tokens to a target and to a language model that drafts for it.

A wrong vocabulary would not change the output, but no draft would ever be accepted, and nothing would say why.
"""

from __future__ import annotations

import logging
from pathlib import Path

from tokenizers import Tokenizer

from dspark_trt.checkpoints.gguf_target import open_gguf
from dspark_trt.checkpoints.gguf_tokenizer import gguf_text
from dspark_trt.checkpoints.locate import locate
from dspark_trt.checkpoints.spec import LanguageModelSpec
from dspark_trt.checkpoints.tokenizer import folder_text
from dspark_trt.errors import CheckpointError, PairingError

logger = logging.getLogger(__name__)


def check_vocabularies(
    target: str, target_revision: str | None, drafter: str, drafter_revision: str | None, spec: LanguageModelSpec
) -> None:
    """Compare the tokenizers of both sources, as far as both have one that can be read.

    Special tokens may differ, which costs drafts of these and is logged as a warning. Raises PairingError where an
    ordinary token differs, and where a smaller vocabulary has no tokenizer to be compared by; CheckpointError,
    EnvironmentMissingError as `locate` does.
    """
    ours = _tokenizer(locate(target, target_revision, with_weights=False))
    theirs = _tokenizer(locate(drafter, drafter_revision, with_weights=False))
    if ours is None or theirs is None:
        lacking = target if ours is None else drafter
        if spec.draft_vocab_size is not None:
            raise PairingError(
                f"vocab_size: the target has {spec.decoder.vocab_size}, the drafter {spec.draft_vocab_size}, and "
                f"{lacking} has no tokenizer that can be read, so nothing says that their first ids are the same "
                "tokens; put the model's tokenizer.json there"
            )
        logger.warning(
            "%s has no tokenizer that can be read: whether the drafter's ids are the target's tokens is not known; if "
            "no draft is accepted, they are not",
            lacking,
        )
        return
    _compare(ours, theirs)


def _compare(ours: Tokenizer, theirs: Tokenizer) -> None:
    of_target, of_drafter = _tokens(ours), _tokens(theirs)
    special = ours.get_added_tokens_decoder().keys() | theirs.get_added_tokens_decoder().keys()
    common = of_target.keys() & of_drafter.keys()
    differing = sorted(token_id for token_id in common if of_target[token_id] != of_drafter[token_id])
    ordinary = [token_id for token_id in differing if token_id not in special]
    if ordinary or not common:
        found = f"none of their ids is the same ({len(of_target)} and {len(of_drafter)} tokens)"
        if ordinary:
            first = ordinary[0]
            found = (
                f"id {first} is {of_target[first][:40]!r} to the target and {of_drafter[first][:40]!r} to the drafter, "
                f"one of {len(ordinary)} that differ out of {len(common)}"
            )
        raise PairingError(
            f"tokenizer: {found}; a language model drafts for targets of its own vocabulary: use a smaller model of "
            "the target's family"
        )
    if differing:
        logger.warning(
            "%d special tokens differ between target and drafter (id %d: %r and %r); drafts of them are not accepted",
            len(differing),
            differing[0],
            of_target[differing[0]],
            of_drafter[differing[0]],
        )


def _tokens(tokenizer: Tokenizer) -> dict[int, str]:
    return {token_id: token for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items()}


def _tokenizer(path: Path) -> Tokenizer | None:
    """None where there is none, or one that cannot be read: of the target's, the build says what is wrong with it."""
    try:
        text = gguf_text(open_gguf(path), path) if path.is_file() else folder_text(path)
    except CheckpointError:
        return None
    return text.tokenizer

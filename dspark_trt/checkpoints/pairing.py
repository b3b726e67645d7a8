"""Do a target and a drafter belong together?

Shapes inside the drafter (the width of fc, the rows of the Markov tables) are held against its own configuration when
it is read; what is left is that this configuration is the target's.
"""

from __future__ import annotations

from dspark_trt.checkpoints.spec import (
    BlockDrafterSpec,
    DecoderSpec,
    DrafterCheckpoint,
    DrafterSpec,
    LanguageModelSpec,
    TargetCheckpoint,
    TargetSpec,
)
from dspark_trt.errors import PairingError

_NEXT = "use the target that the drafter was trained for"


def check_pairing(target: TargetCheckpoint, drafter: DrafterCheckpoint) -> None:
    """Raises PairingError that names the field and both values."""
    check_specs(target.spec, drafter.spec)


def check_specs(target: TargetSpec, drafter: DrafterSpec) -> None:
    """The same, before any weight is there. Raises PairingError."""
    decoder, own = target.decoder, drafter.decoder
    num_layers, taps = decoder.num_layers, drafter.target_layer_ids
    _check_equal("vocab_size", decoder.vocab_size, own.vocab_size)
    if not isinstance(drafter, LanguageModelSpec):  # which reads nothing of the target but tokens
        _check_states(decoder, own)
    if drafter.num_target_layers is not None:
        _check_equal("num_target_layers", num_layers, drafter.num_target_layers)
    for tap in taps:
        if not -1 <= tap < num_layers:
            raise PairingError(
                f"target_layer_ids: the drafter reads layers {list(taps)}, but the target has layers 0 to "
                f"{num_layers - 1} (-1 is the embedding), so {tap} is not one; {_NEXT}"
            )
    if isinstance(drafter, BlockDrafterSpec) and drafter.mask_token_id >= decoder.vocab_size:
        raise PairingError(
            f"mask_token_id: the drafter's is {drafter.mask_token_id}, but the target's vocabulary ends at "
            f"{decoder.vocab_size - 1}; {_NEXT}"
        )


def _check_states(of_target: DecoderSpec, of_drafter: DecoderSpec) -> None:
    """Of drafters that read the target's hidden states, or share its embedding and head."""
    _check_equal("hidden_size", of_target.hidden_size, of_drafter.hidden_size)
    if (of_target.gemma is None) != (of_drafter.gemma is None):
        theirs, ours = (("another family", "Gemma 4"), ("Gemma 4", "another family"))[of_target.gemma is not None]
        raise PairingError(
            f"layers: the target is of {theirs}, the drafter's layers are of {ours}: embeddings and logits of Gemma 4 "
            f"are scaled as no other's are; {_NEXT}"
        )


def _check_equal(field: str, of_target: int, of_drafter: int) -> None:
    if of_target != of_drafter:
        raise PairingError(f"{field}: the target has {of_target}, the drafter expects {of_drafter}; {_NEXT}")

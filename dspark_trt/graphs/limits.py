"""The checks that a graph's limits make sense."""

from __future__ import annotations

from dspark_trt.checkpoints.spec import DecoderSpec
from dspark_trt.contract.protocol import EngineLimits
from dspark_trt.errors import ExportError


def check_limits(limits: EngineLimits, spec: DecoderSpec, *, gamma: int, what: str) -> None:
    """Raises ExportError where a limit contradicts the model or the draft block."""
    if limits.max_seq_len > spec.max_position_embeddings:
        raise ExportError(
            f"max_seq_len {limits.max_seq_len} is beyond the {spec.max_position_embeddings} positions that the {what} "
            "was made for (max_position_embeddings); lower --max-seq-len"
        )
    if limits.max_seq_len <= gamma + 2:
        raise ExportError(
            f"max_seq_len {limits.max_seq_len} has no room for a prompt and a block of {gamma} drafts (gamma of the "
            f"drafter); raise --max-seq-len to {gamma + 3} or more"
        )
    if limits.max_batch_tokens < gamma + 1:
        raise ExportError(
            f"max_batch_tokens {limits.max_batch_tokens} cannot hold an anchor and its {gamma} drafts (gamma of the "
            f"drafter); raise --max-batch-tokens to {gamma + 1} or more"
        )


def window_in_rows(spec: DecoderSpec, layer: int, limits: EngineLimits) -> int | None:
    """That of a target's layer; None for one that no row outgrows: the layer sees everything then."""
    window = spec.window_of(layer)
    return None if window is None or window >= limits.max_seq_len else window

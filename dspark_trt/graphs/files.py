"""What a graph writer leaves in its folder, and the checks that its limits make sense."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dspark_trt.checkpoints.spec import DecoderSpec
from dspark_trt.contract.protocol import EngineLimits
from dspark_trt.errors import ExportError


@dataclass(frozen=True, slots=True)
class GraphFiles:
    """Files in the graph folder; `weights` are what the graphs refer to besides themselves."""

    graphs: tuple[Path, ...]
    weights: tuple[Path, ...]


def check_limits(limits: EngineLimits, spec: DecoderSpec, *, gamma: int, what: str) -> None:
    """Raises ExportError where a limit contradicts the model or the draft block."""
    if limits.max_seq_len > spec.max_position_embeddings:
        raise ExportError(
            f"max_seq_len {limits.max_seq_len} is beyond the {spec.max_position_embeddings} positions that the {what} "
            "was made for (max_position_embeddings); lower --max-seq-len"
        )
    if limits.max_batch_tokens < gamma + 1:
        raise ExportError(
            f"max_batch_tokens {limits.max_batch_tokens} cannot hold an anchor and its {gamma} drafts (gamma of the "
            f"drafter); raise --max-batch-tokens to {gamma + 1} or more"
        )

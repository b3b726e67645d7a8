"""A language model that drafts, by transformers: whole sequences, no cache, nothing shared with the graphs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from dspark_trt.checkpoints.spec import LanguageModelSpec
from dspark_trt.contract.protocol import DraftBatch, DraftOutput, EngineLimits, IngestBatch
from dspark_trt.reference.heads import draw


class TransformersDrafter:
    """DraftEngine of the protocol. It proposes `ids` alone, where they are given."""

    def __init__(
        self, folder: Path, spec: LanguageModelSpec, limits: EngineLimits, ids: NDArray[np.int64] | None = None
    ) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self._model.eval()
        self._spec = spec
        self._ids = ids
        self._tokens: dict[int, list[int]] = {}
        self.limits = limits
        self.gamma = spec.gamma

    @property
    def draft_vocab(self) -> NDArray[np.int64] | None:
        return self._ids

    def ingest(self, batch: IngestBatch) -> None:
        assert batch.token_ids is not None
        parts = np.split(batch.token_ids, np.cumsum(batch.query_lengths)[:-1])
        for row, past, tokens in zip(batch.rows.tolist(), batch.past_lengths.tolist(), parts, strict=True):
            self._tokens[row] = [*self._tokens.get(row, [])[:past], *tokens.tolist()]

    def draft(self, batch: DraftBatch, ingest: IngestBatch | None = None) -> DraftOutput:
        if ingest is not None:
            self.ingest(ingest)
        drafted = [self._draft_row(batch, at) for at in range(len(batch.rows))]
        ids, logits = (np.stack([each[output] for each in drafted]) for output in (0, 1))
        largest = np.sort(logits, axis=-1)
        return DraftOutput(ids, logits, largest[..., -1] - largest[..., -2])

    def move_row(self, source: int, destination: int, num_positions: int) -> None:
        self._tokens[destination] = self._tokens[source][:num_positions]

    def _draft_row(self, batch: DraftBatch, at: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        row, num_slots = int(batch.rows[at]), batch.uniforms.shape[1]
        tokens = [*self._tokens[row], int(batch.anchor_ids[at])]
        assert len(tokens) == batch.past_lengths[at] + 1
        logits: list[torch.Tensor] = []
        drafts: list[int] = []
        for slot in range(num_slots):
            if self._spec.mask_token_id is None:
                logits.append(self._logits([*tokens, *drafts])[-1])
            elif not slot:
                masks = [self._spec.mask_token_id] * (num_slots - 1)
                logits = list(self._logits([*tokens, *masks])[-num_slots:])
            temperature = torch.from_numpy(batch.temperatures[at : at + 1])
            uniform = torch.from_numpy(batch.uniforms[at, slot : slot + 1])
            column = int(draw(logits[slot][None], temperature, uniform))
            drafts.append(column if self._ids is None else int(self._ids[column]))
        return np.array(drafts), torch.stack(logits).numpy()

    def _logits(self, tokens: list[int]) -> torch.Tensor:
        """Of every position, over the ids that are proposed."""
        known = min(self._model.config.vocab_size, self._spec.decoder.vocab_size)
        read = torch.tensor([tokens]).clamp(max=known - 1)
        with torch.no_grad():
            logits: torch.Tensor = self._model(read, use_cache=False).logits[0]
        return logits[:, :known] if self._ids is None else logits[:, torch.from_numpy(self._ids)]

"""EAGLE-3 drafter in plain PyTorch float32: the oracle of the tests.

It keeps the inputs of every position and computes a row anew for each slot: no cache, nothing shared with the graphs.
Source: EAGLE-3 (arXiv 2503.01840), section 3.1. Shape letters: `R` requests, `T` tokens, `D` hidden, `W` draft
vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from dspark_trt.checkpoints.layout import MASK
from dspark_trt.checkpoints.spec import DrafterCheckpoint, Eagle3Spec, TargetCheckpoint
from dspark_trt.contract.protocol import DraftBatch, DraftOutput, EngineLimits, IngestBatch
from dspark_trt.reference.heads import draw
from dspark_trt.reference.model import ReferenceDecoder
from dspark_trt.reference.weights import ReferenceWeights


class ReferenceEagle3Engine:
    """DraftEngine of the protocol."""

    def __init__(
        self,
        spec: Eagle3Spec,
        drafter: DrafterCheckpoint,
        target: TargetCheckpoint,
        target_weights: ReferenceWeights,
        *,
        limits: EngineLimits,
    ) -> None:
        self._spec = spec
        self._weights = ReferenceWeights(drafter.weights, target_weights.device)
        self._decoder = ReferenceDecoder(spec.decoder, self._weights)
        self._draft_ids = drafter.draft_ids
        target_head = "embed_tokens.weight" if target.spec.is_head_tied else "lm_head.weight"
        self._embedding = (self._weights if spec.has_own_embedding else target_weights)["embed_tokens.weight"]
        self._head = self._weights["lm_head.weight"] if spec.has_own_head else target_weights[target_head]
        self._rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # features [T, D] and embeddings [T, D]
        self._limits = limits

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    @property
    def gamma(self) -> int:
        return self._spec.gamma

    @property
    def draft_vocab(self) -> NDArray[np.int64] | None:
        return self._draft_ids

    def keep_to(self, ids: NDArray[np.int64]) -> None:
        """Propose only these of the ids that the head has rows for, ascending."""
        rows = ids if self._draft_ids is None else np.searchsorted(self._draft_ids, ids)
        self._head, self._draft_ids = self._head[self._tensor(rows)], ids

    def ingest(self, batch: IngestBatch) -> None:
        assert batch.next_ids is not None, "EAGLE-3 reads the token behind each position"
        with torch.no_grad():
            features = self._features(self._tensor(np.asarray(batch.taps, np.float32)))
            embedded = self._decoder.embedded(self._embedding[self._tensor(batch.next_ids)])
            first = 0
            for row, past, length in zip(batch.rows, batch.past_lengths, batch.query_lengths, strict=True):
                part = slice(first, first + int(length))
                of_row = (features[part], embedded[part])
                if past:
                    known = self._rows[int(row)]
                    of_row = tuple(torch.cat([a[: int(past)], b]) for a, b in zip(known, of_row, strict=True))
                self._rows[int(row)] = of_row
                first += int(length)

    def draft(self, batch: DraftBatch, ingest: IngestBatch | None = None) -> DraftOutput:
        if ingest is not None:
            self.ingest(ingest)
        with torch.no_grad():
            drafted = [self._draft_row(batch, at) for at in range(len(batch.rows))]
        ids, logits = (np.stack([each[output] for each in drafted]) for output in (0, 1))
        largest = np.sort(logits, axis=-1)
        return DraftOutput(ids, logits, largest[..., -1] - largest[..., -2])

    def move_row(self, source: int, destination: int, num_positions: int) -> None:
        self._rows[destination] = self._rows[source]

    def _draft_row(self, batch: DraftBatch, at: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Draft ids [n] and logits [n, W] of one request."""
        row, past = int(batch.rows[at]), int(batch.past_lengths[at])
        features, embedded = (each[:past] for each in self._rows[row])
        anchor = self._decoder.embedded(self._embedding[int(batch.anchor_ids[at])])
        assert torch.equal(embedded[-1], anchor), "the anchor stands behind what was ingested"
        num_slots = batch.uniforms.shape[1]
        ids, logits = [], []
        if self._spec.is_masked:
            logits = list(self._masked_logits(features, embedded, num_slots))
            ids = [self._drawn(batch, at, slot, each) for slot, each in enumerate(logits)]
            return np.array(ids), torch.stack(logits).cpu().numpy()
        for slot in range(num_slots):
            feature, of_head = self._last_output(features, embedded)
            logits.append(self._decoder.cap(torch.nn.functional.linear(of_head, self._head)))
            ids.append(self._drawn(batch, at, slot, logits[-1]))
            features = torch.cat([features, feature[None]])
            embedded = torch.cat([embedded, self._decoder.embedded(self._embedding[ids[-1]])[None]])
        return np.array(ids), torch.stack(logits).cpu().numpy()

    def _drawn(self, batch: DraftBatch, at: int, slot: int, logits: torch.Tensor) -> int:
        """The draft of one slot of a request, from logits [W]."""
        temperature, uniform = (self._tensor(x) for x in (batch.temperatures[at : at + 1], batch.uniforms[at]))
        column = int(draw(logits[None], temperature, uniform[slot : slot + 1]))
        return column if self._draft_ids is None else int(self._draft_ids[column])

    def _masked_logits(self, features: torch.Tensor, embedded: torch.Tensor, num_slots: int) -> torch.Tensor:
        """DART: logits [n, W] of the last position and of the masks behind it, each of which sees what is before it."""
        decoder, mask = self._decoder, self._weights[MASK]
        normed = decoder.norm("layers.0.hidden_norm", features)
        joined = torch.cat([decoder.norm("layers.0.input_layernorm", embedded), normed], dim=-1)
        joined = torch.cat([joined, mask.expand(num_slots - 1, -1)])
        residual = torch.cat([features[-1:], mask[: features.shape[1]].expand(num_slots - 1, -1)])
        positions = torch.arange(len(joined), device=joined.device)
        keys, values = decoder.key_value(0, joined, positions)
        queries = decoder.query(0, joined[-num_slots:], positions[-num_slots:])
        is_visible = positions <= positions[-num_slots:, None]
        x = decoder.layer_output(0, residual, decoder.attend(0, queries, keys, values, is_visible))
        h = decoder.norm("norm", decoder.norm("norm", x))
        return torch.nn.functional.linear(h, self._head)

    def _features(self, taps: torch.Tensor) -> torch.Tensor:
        """[T, M*D] -> [T, D]"""
        spec = self._spec
        if spec.is_module:
            return taps
        if spec.tap_norm == "joint":
            taps = self._decoder.norm("input_norm", taps)
        elif spec.tap_norm == "each":
            each = taps.chunk(spec.num_taps, dim=-1)
            taps = torch.cat([self._decoder.norm(f"fc_norm.{at}", tap) for at, tap in enumerate(each)], dim=-1)
        return self._weights.linear("fc", taps)

    def _joined(self, features: torch.Tensor, embedded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the projections read, [T, 2D] or of a module [T, D], and where the residual stream starts [T, D]."""
        decoder = self._decoder
        if self._spec.is_module:
            both = decoder.norm("hidden_norm", features), decoder.norm("token_norm", embedded)
            x = self._weights.linear("fc", torch.cat(both, dim=-1))
            return decoder.norm("layers.0.input_layernorm", x), x
        normed = decoder.norm("layers.0.hidden_norm", features)
        joined = torch.cat([decoder.norm("layers.0.input_layernorm", embedded), normed], dim=-1)
        return joined, normed if self._spec.is_residual_normed else features

    def _last_output(self, features: torch.Tensor, embedded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the last position [D]: what the next step takes for its feature, and what the head reads."""
        decoder, last = self._decoder, slice(-1, None)
        joined, residual = self._joined(features, embedded)
        positions = torch.arange(len(joined), device=joined.device)
        keys, values = decoder.key_value(0, joined, positions)
        queries = decoder.query(0, joined[last], positions[last])
        x = residual[last]
        x = decoder.layer_output(0, x, decoder.attend(0, queries, keys, values))[0]
        h = decoder.norm("norm", x)
        return (h if self._spec.is_output_normed else x), h

    def _tensor(self, array: NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._weights.device)

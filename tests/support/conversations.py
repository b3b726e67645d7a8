"""Ragged multi-step batches with rejections, and what transformers says about the same tokens.

A `Conversations` keeps the committed tokens of every KV row. Each step takes some rows in some order, gives each a
random query, and commits only a prefix of it; the next step overwrites the rest, as after rejected drafts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from dspark_trt.checkpoints.drafter import read_drafter
from dspark_trt.checkpoints.spec import DrafterCheckpoint, TargetCheckpoint
from dspark_trt.checkpoints.target import read_target
from dspark_trt.contract.bindings import TARGET_GRAPH
from dspark_trt.contract.dims import Attention
from dspark_trt.contract.drafter_form import PLAIN_DRAFTER, DrafterForm
from dspark_trt.contract.precision import Precision
from dspark_trt.contract.protocol import DraftEngine, EngineLimits, TargetBatch
from dspark_trt.engines.onnxruntime.engines import OnnxRuntimeSettings, OnnxRuntimeTargetEngine, open_draft_engine
from dspark_trt.graphs.drafter import write_drafter_graphs
from dspark_trt.graphs.target import write_target_graph

torch.set_num_threads(1)  # the models are tiny; two thread pools on two cores only wait for each other

SETTINGS = OnnxRuntimeSettings(num_threads=1)
GAMMA = 5


class TransformersTarget:
    """Logits and raw layer outputs of whole sequences, taken by forward hooks."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
        self._model.eval()
        self._outputs: dict[int, torch.Tensor] = {}
        inner = self._model.model
        for index, module in enumerate([inner.embed_tokens, *inner.layers], start=-1):
            module.register_forward_hook(self._keeper(index))

    def _keeper(self, index: int) -> Any:
        def keep(module: Any, inputs: Any, output: Any) -> None:
            self._outputs[index] = (output[0] if isinstance(output, tuple) else output)[0]

        return keep

    def __call__(self, tokens: list[int], taps: tuple[int, ...]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Logits [T, V] and taps [T, M*D] of one sequence."""
        with torch.no_grad():
            logits = self._model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
        return logits, np.concatenate([self._outputs[layer].numpy() for layer in taps], axis=1)


@dataclass
class Step:
    batch: TargetBatch
    segments: list[tuple[int, list[int]]]  # row and its whole sequence, the query at the end


class Conversations:
    """Committed tokens of every row, and random steps on them."""

    def __init__(self, *, num_rows: int, vocab_size: int, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.tokens: list[list[int]] = [[] for _ in range(num_rows)]
        self._vocab_size = vocab_size

    def step(self, rows: list[int], query_lengths: list[int], num_decode: int) -> Step:
        """Random tokens behind the committed ones; all logits are asked for."""
        queries = [self.random.integers(0, self._vocab_size, length) for length in query_lengths]
        batch = TargetBatch(
            token_ids=np.concatenate(queries),
            rows=np.array(rows),
            past_lengths=np.array([len(self.tokens[row]) for row in rows]),
            query_lengths=np.array(query_lengths),
            num_decode=num_decode,
            logit_rows=np.arange(sum(query_lengths)),
        )
        segments = [(row, self.tokens[row] + query.tolist()) for row, query in zip(rows, queries, strict=True)]
        return Step(batch, segments)

    def commit(self, step: Step, accepted: list[int]) -> None:
        """Keep the first `accepted` tokens of each query."""
        for (row, sequence), past, keep in zip(step.segments, step.batch.past_lengths, accepted, strict=True):
            self.tokens[row] = sequence[: past + keep]

    def random_step(self, max_query: int) -> Step:
        """Some rows in random order, first those that decode, then those that prefill."""
        rows = self.random.permutation(len(self.tokens))[: self.random.integers(1, len(self.tokens) + 1)]
        query_lengths = self.random.integers(1, max_query + 1, len(rows))
        return self.step(rows.tolist(), query_lengths.tolist(), int(self.random.integers(0, len(rows) + 1)))

    def random_acceptance(self, step: Step) -> list[int]:
        return [int(self.random.integers(1, length + 1)) for length in step.batch.query_lengths]


def expected_outputs(model: TransformersTarget, step: Step, taps: tuple[int, ...]) -> tuple[NDArray[Any], NDArray[Any]]:
    """What the engine should give for the packed queries of a step."""
    parts = [model(sequence, taps) for _, sequence in step.segments]
    lengths = step.batch.query_lengths
    logits = np.concatenate([part[0][-n:] for part, n in zip(parts, lengths, strict=True)])
    return logits, np.concatenate([part[1][-n:] for part, n in zip(parts, lengths, strict=True)])


def open_target(
    source: Path | TargetCheckpoint,
    graphs: Path,
    *,
    taps: tuple[int, ...] = (),
    norm_last_tap: bool = False,
    limits: EngineLimits,
    precision: Precision = "fp32",
    attention: Attention = "gqa",
    wide_inputs: tuple[str, ...] = (),
) -> OnnxRuntimeTargetEngine:
    """Write the target graph unless it is there, and open it."""
    checkpoint = read_target(str(source)) if isinstance(source, Path) else source
    graphs.mkdir(parents=True, exist_ok=True)
    if not (graphs / TARGET_GRAPH).exists():
        write_target_graph(
            checkpoint,
            graphs,
            taps=taps,
            norm_last_tap=norm_last_tap,
            limits=limits,
            gamma=GAMMA,
            precision=precision,
            attention=attention,
            wide_inputs=wide_inputs,
        )
    return OnnxRuntimeTargetEngine(graphs, SETTINGS)


def open_pair(
    target: TargetCheckpoint,
    drafter: DrafterCheckpoint,
    graphs: Path,
    *,
    limits: EngineLimits,
    precision: Precision = "fp32",
    is_standard: bool = False,
    form: DrafterForm = PLAIN_DRAFTER,
) -> tuple[OnnxRuntimeTargetEngine, DraftEngine]:
    """Write all graphs and open both engines."""
    engine = open_target(
        target,
        graphs,
        taps=drafter.spec.target_layer_ids,
        norm_last_tap=drafter.spec.is_last_tap_normed,
        limits=limits,
        precision=precision,
        attention="standard" if is_standard else "gqa",
    )
    write_drafter_graphs(
        target,
        drafter,
        graphs,
        limits=limits,
        precision=precision,
        attention="standard" if is_standard else "drafter",
        form=form,
    )
    return engine, open_draft_engine(graphs, SETTINGS)


def read_pair(target_folder: Path, drafter_folder: Path) -> tuple[TargetCheckpoint, DrafterCheckpoint]:
    target = read_target(str(target_folder))
    return target, read_drafter(str(drafter_folder), target)

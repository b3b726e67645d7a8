"""Writes the target's graph. At int8 it is seen first which activations eight bits cannot hold.

A float32 graph reads packaged prompts and tells, for every Linear layer, the error that quantising it would bring. The
layers above MAX_ERROR get activations of sixteen bits: two rows of eight each, so that their sums are integers too. How
far the finished graph is from float32 is measured on other prompts. Both are in target_form.json.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark_trt.building.context import Context
from dspark_trt.calibration.prompts import Prompt, packaged_prompts
from dspark_trt.checkpoints.spec import TargetCheckpoint
from dspark_trt.contract.protocol import EngineLimits, TargetBatch, TargetEngine
from dspark_trt.graphs.target import write_survey_graph, write_target_graph
from dspark_trt.log import Progress, get_logger
from dspark_trt.text import TextCodec

logger = get_logger(__name__)

FORM_FILE = "target_form.json"
MAX_ERROR = 0.05  # of a layer's output, relative, root mean square over tokens
NUM_PROMPTS = 24  # that decide; as many of each kind
MAX_TOKENS = 128  # of a prompt
BUDGET_S = 60.0  # for each half; large targets see fewer prompts

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Distance:
    """How far a target is from its float32 form, over the positions of prompts."""

    num_tokens: int
    kl: float  # mean of KL(float32 || this), nats
    kl_99: float  # 99 of 100 positions are below it
    top1_agreement: float  # share of positions with the same largest logit


def write_target(context: Context, folder: Path, progress: Progress) -> None:
    """target.onnx and its weights; at int8 target_form.json, which says why it has its form."""
    drafter = context.drafter

    def write(wide_inputs: Sequence[str] = ()) -> None:
        write_target_graph(
            context.target,
            folder,
            taps=context.draft_source.target_layer_ids,
            norm_last_tap=drafter is not None and drafter.spec.is_last_tap_normed,
            limits=context.limits,
            gamma=context.draft_source.gamma,
            precision=context.precision,
            attention="standard" if context.is_on_device else "gqa",
            wide_inputs=wide_inputs,
        )

    if context.precision != "int8":
        write()
        return
    from dspark_trt.engines.onnxruntime.engines import OnnxRuntimeSettings, OnnxRuntimeTargetEngine

    settings = OnnxRuntimeSettings(num_threads=context.recipe.num_threads)
    encode = TextCodec.load(context.output / "checkpoints" / "tokenizer").encode_prompt
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        most = min(context.limits.max_batch_tokens, context.limits.max_seq_len, MAX_TOKENS)
        survey = Survey(context.target, Path(scratch), settings, most=most)
        errors = survey.errors(encode, chosen_prompts("fit"))
        progress(0.4)
        wide_inputs = [weight for weight, error in errors.items() if error > MAX_ERROR]
        write(wide_inputs)
        progress(0.7)
        distance = survey.distance(OnnxRuntimeTargetEngine(folder, settings), encode, chosen_prompts("held_out"))
    report = {
        "precision": context.precision,
        "max_error": MAX_ERROR,
        "num_layers": len(errors),
        "sixteen_bit_activations": wide_inputs,
        "distance_from_float32": {name: round(value, 6) for name, value in asdict(distance).items()},
        "errors": {weight: round(error, 5) for weight, error in errors.items()},
    }
    logger.info("target: %s", described(report))
    (folder / FORM_FILE).write_text(json.dumps(report, indent=1) + "\n")


def described(report: dict[str, Any]) -> str:
    """A line for a person."""
    wide, distance = report["sixteen_bit_activations"], report["distance_from_float32"]
    return (
        f"{len(wide)} of {report['num_layers']} Linear layers have activations of 16 bits"
        f"{': ' + ', '.join(wide[:6]) if wide else ''}{' …' if len(wide) > 6 else ''}; KL against float32 "
        f"{distance['kl']:.4f} (99 of 100 positions below {distance['kl_99']:.3f}), same first token at "
        f"{100 * distance['top1_agreement']:.1f} % of {distance['num_tokens']} held-out positions"
    )


class Survey:
    """The float32 form of a target, which tells the errors of eight bits and is what another form is compared with."""

    def __init__(self, target: TargetCheckpoint, folder: Path, settings: Any, *, most: int = MAX_TOKENS) -> None:
        """Writes its graph into `folder`. most: tokens of a call."""
        from dspark_trt.engines.onnxruntime.survey import OnnxRuntimeSurvey

        self._most = most
        limits = EngineLimits(max_requests=1, max_seq_len=most, max_batch_tokens=most)
        self._layers = write_survey_graph(target, folder, limits=limits)
        self._engine = OnnxRuntimeSurvey(folder, len(self._layers), settings)

    def errors(self, encode: Encode, prompts: Sequence[Prompt]) -> dict[str, float]:
        """Relative error of each layer by the weight's name, root mean square over the tokens of the prompts."""
        parts = []
        for tokens in self._texts(encode, prompts):
            self._engine.forward(_reading(tokens))
            parts.append(self._engine.linear_errors)
        means = np.concatenate(parts, axis=1).mean(axis=1, dtype=np.float64)
        return dict(zip(self._layers, np.sqrt(means).tolist(), strict=True))

    def distance(self, engine: TargetEngine, encode: Encode, prompts: Sequence[Prompt]) -> Distance:
        """Of the same target in another form."""
        divergences, is_same = [], []
        for tokens in self._texts(encode, prompts):
            batch = _reading(tokens)
            expected, found = (np.asarray(each.forward(batch).logits, np.float64) for each in (self._engine, engine))
            divergences.append(kl_divergence(expected, found))
            is_same.append(expected.argmax(axis=-1) == found.argmax(axis=-1))
        every = np.concatenate(divergences)
        agreement = float(np.concatenate(is_same).mean())
        return Distance(len(every), float(every.mean()), float(np.quantile(every, 0.99)), agreement)

    def _texts(self, encode: Encode, prompts: Sequence[Prompt]) -> Iterator[NDArray[np.int64]]:
        started = time.monotonic()
        for number, prompt in enumerate(prompts):
            if number and time.monotonic() - started > BUDGET_S:
                return
            if tokens := encode(prompt.prompt)[: self._most]:
                yield np.array(tokens, np.int64)


def chosen_prompts(split: str) -> list[Prompt]:
    """Packaged prompts of that split, the kinds in turn."""
    prompts = packaged_prompts()
    order = sorted(range(len(prompts)), key=lambda index: (index % 40, index))
    return [prompts[index] for index in order if prompts[index].split == split][:NUM_PROMPTS]


def kl_divergence(logits: NDArray[np.float64], others: NDArray[np.float64]) -> NDArray[np.float64]:
    """KL in nats between the distributions of logits [T, V] and of `others` [T, V], for each position."""
    logs, other_logs = (_log_softmax(each) for each in (logits, others))
    divergence: NDArray[np.float64] = (np.exp(logs) * (logs - other_logs)).sum(axis=-1)
    return divergence


def _log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    logs: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return logs


def _reading(tokens: NDArray[np.int64]) -> TargetBatch:
    """A prompt in row 0, with the logits of every token."""
    count = len(tokens)
    row, past, length = np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([count])
    return TargetBatch(tokens, row, past, length, 0, np.arange(count))

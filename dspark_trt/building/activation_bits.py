"""Chooses which Linear layers of an int8 target read activations of sixteen bits: two rows of eight, integers as well.

Rounding the weights to eight bits costs some divergence from float32 in any case. Eight bits for an activation, too,
may add SHARE_OF_ROUNDING of that, all layers together. Those that read the same activation are judged as one. How far
each alone takes the logits from those of sixteen bits everywhere is measured on packaged prompts and gives the order:
not how far from float32, where it can cancel some of the rounding by chance. Then it is measured how many of the
cheapest can have eight bits together. A layer's own error would not do: sixteen bits for the layers of
SmolLM2 with the largest, value projections, bring a tenth of what there is to gain.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dspark_trt.calibration.prompts import packaged_prompts
from dspark_trt.contract.protocol import TargetBatch, TargetEngine
from dspark_trt.graphs.quantize import low_step
from dspark_trt.log import Progress

SHARE_OF_ROUNDING = 0.5
NUM_PROMPTS = 6  # that decide, and as many others that tell how far the finished form is from float32
MAX_TOKENS = 128  # of a prompt

Logs = NDArray[np.float64]
_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.weight")
_PLACES = {
    "q_proj": "attention input",
    "k_proj": "attention input",
    "v_proj": "attention input",
    "o_proj": "attention output",
    "gate_proj": "MLP input",
    "up_proj": "MLP input",
    "down_proj": "MLP middle",
}


@dataclass(frozen=True, slots=True)
class Distance:
    """How far a target is from its float32 form, over the positions of prompts."""

    num_tokens: int
    kl: float  # mean of KL(float32 || this), nats
    kl_99: float  # 99 of 100 positions are below it
    top1_agreement: float  # share of positions with the same largest logit


class Reference:
    """What one form of a target says of some prompts; distances are those from it."""

    def __init__(self, texts: Sequence[NDArray[np.int64]], engine: TargetEngine) -> None:
        self._texts = texts
        self._logs = [_log_probabilities(engine, text) for text in texts]

    def of(self, engine: TargetEngine) -> Reference:
        """What another form says of the same prompts."""
        return Reference(self._texts, engine)

    def distance(self, engine: TargetEngine) -> Distance:
        """Of the same target in another form."""
        divergences, is_same = [], []
        for text, expected in zip(self._texts, self._logs, strict=True):
            found = _log_probabilities(engine, text)
            divergences.append((np.exp(expected) * (expected - found)).sum(axis=-1))
            is_same.append(expected.argmax(axis=-1) == found.argmax(axis=-1))
        every = np.concatenate(divergences)
        agreement = float(np.concatenate(is_same).mean())
        return Distance(len(every), float(every.mean()), float(np.quantile(every, 0.99)), agreement)


class SwitchedEngine(TargetEngine, Protocol):
    """A target whose Linear layers read the second integer of their activations with these steps; 0: not."""

    low_steps: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Choice:
    """What was measured, and what follows from it."""

    sixteen_everywhere: Distance
    eight_everywhere: Distance
    added_kl: Mapping[str, float]  # of eight bits in one activation alone from sixteen everywhere
    wide: tuple[str, ...]  # activations of sixteen bits
    wide_inputs: tuple[str, ...]  # the weights that read them, in the graph's order
    num_layers: int


def prompts(
    encode: Callable[[str], Sequence[int]], split: str, most: int = MAX_TOKENS, num_prompts: int = NUM_PROMPTS
) -> list[NDArray[np.int64]]:
    """Token ids [T] of packaged prompts of that split, `most` of each at most, the kinds in turn."""
    every = packaged_prompts()
    order = sorted(range(len(every)), key=lambda index: (index % 40, index))
    texts = [every[index].prompt for index in order if every[index].split == split][:num_prompts]
    return [np.array(tokens[:most], np.int64) for tokens in map(encode, texts) if len(tokens)]


def activation_of(weight: str) -> str:
    """What a Linear layer reads, by the canonical name of its weight."""
    match = _LAYER.fullmatch(weight)
    if match is None:
        return "output head"
    place = _PLACES[match[2].rpartition(".")[2]]
    return f"layer {match[1]}, {place}"


def choose(
    layers: Sequence[str],
    engine: SwitchedEngine,
    reference: Reference,
    progress: Progress = lambda fraction: None,
) -> Choice:
    """layers: weights of the Linear layers that `engine` switches, in the order of its switches."""
    activations = np.array([activation_of(weight) for weight in layers])
    names = list(dict.fromkeys(activations.tolist()))

    def measured(is_wide: NDArray[np.bool_], against: Reference = reference) -> Distance:
        engine.low_steps = np.where(is_wide, low_step(), 0).astype(np.float32)
        return against.distance(engine)

    eight, sixteen = measured(np.zeros(len(layers), bool)), measured(np.ones(len(layers), bool))
    own = reference.of(engine)
    added = {}
    for number, name in enumerate(names):
        added[name] = measured(activations != name, own).kl
        progress((number + 1) / len(names))
    order = sorted(names, key=lambda name: (added[name], name))
    allowed = (1 + SHARE_OF_ROUNDING) * sixteen.kl
    wide = tuple(
        order[most_within(len(order), allowed, lambda count: measured(~np.isin(activations, order[:count])).kl) :]
    )
    wide_inputs = tuple(weight for weight in layers if activation_of(weight) in wide)
    return Choice(sixteen, eight, added, wide, wide_inputs, len(layers))


def most_within(num_activations: int, allowed: float, kl_of: Callable[[int], float]) -> int:
    """How many of the cheapest activations can have eight bits together: `kl_of` so many is within what is allowed.

    By bisection, for none (which is allowed) and up to all of them.
    """
    fewest, most = 0, num_activations
    while fewest < most:
        count = (fewest + most + 1) // 2
        if kl_of(count) <= allowed:
            fewest = count
        else:
            most = count - 1
    return fewest


def _log_probabilities(engine: TargetEngine, text: NDArray[np.int64]) -> Logs:
    """[T, V] of a prompt read at once into row 0."""
    count = len(text)
    row, past, length = np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([count])
    output = engine.forward(TargetBatch(text, row, past, length, 0, np.arange(count)))
    logits = np.asarray(output.logits, np.float64)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    logs: Logs = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return logs

"""Counter-based random draws: any draw of a request can be computed alone, and none is ever used twice.

Generator: Philox 4x64. Its 128-bit key is a hash of (seed, prompt, sequence index); its 256-bit counter holds (slot,
the request's step index). One block of output has four words, one for each purpose of that slot. So the draw for (step
index, slot, purpose) is a function of the request alone, whatever else is in the batch.

Draws are keyed by the request's step index and never by position in the sequence: a position that is drafted again
after a rejection must not meet the uniforms that the schedule of the step before has already seen the effect of.
Source: paper section 5.2 (two-step barrier); Salmon et al. 2011 (Philox).
"""

from __future__ import annotations

from enum import IntEnum
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

RngKey = tuple[int, int]  # the two 64-bit words of a Philox key


class Purpose(IntEnum):
    """What the word of a Philox block is for."""

    DRAFT = 0  # x_j from draft_probs
    ACCEPT = 1  # the acceptance test of x_j
    RESIDUAL = 2  # the token that takes the place of a rejected x_j
    BONUS = 3  # the token behind the last verified draft; also the first token after a prompt


def request_key(seed: int, prompt_ids: NDArray[np.int64], sequence_index: int) -> RngKey:
    """The key of a request. Two live requests with the same key draw the same tokens."""
    digest = blake2b(digest_size=16, person=b"dspark-rng-key-1")
    digest.update(np.array([seed, sequence_index], dtype="<u8").tobytes())
    digest.update(prompt_ids.astype("<i8").tobytes())
    high, low = np.frombuffer(digest.digest(), dtype="<u8").tolist()
    return high, low


def random_words(key: RngKey, *, step_index: int, num_slots: int) -> NDArray[np.uint64]:
    """All random words of one request's step, [num_slots, 4]; row i belongs to slot i + 1, a column to a Purpose.

    A larger `num_slots` adds rows and leaves the others as they are.
    """
    generator = np.random.Philox(key=np.array(key, dtype=np.uint64), counter=[0, step_index, 0, 0])
    return generator.random_raw(4 * num_slots).reshape(num_slots, 4)


def uniforms(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """[0, 1) with 52 bits: u * total < total holds for every float64 total, so inverse-CDF draws stay in range."""
    return (words >> np.uint64(12)).astype(np.float64) * 2.0**-52


def uniforms_float32(words: NDArray[np.uint64]) -> NDArray[np.float32]:
    """[0, 1) with 24 bits, exact in float32: what the drafter draws with."""
    return (words >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)

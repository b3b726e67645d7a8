"""Algorithm 1 and the full search behind `lagged_budget`, draft by draft: runtime/prefix_scheduler is held against it.

Shape letters: `R` requests, `G` gamma. Source: paper section 3.2.2, Algorithm 1, and section 5.2.
"""

from __future__ import annotations

import numpy as np
from dspark_trt_plugins.prefix_select.reference import BoolArray, FloatArray, IntArray, ranked
from numpy.typing import NDArray


def early_stop(
    survival: FloatArray, *, caps: IntArray, is_forced: BoolArray, prefill_tokens: int, step_ms: FloatArray
) -> NDArray[np.int64]:
    """Admit drafts by falling survival until the expected throughput first fails to rise: verify_len [R].

    Args:
        survival: [R, G].
        caps: [R], largest verify_len of each request, 0..G, fixed before drafting.
        is_forced: [R]; these are verified at their cap, whatever it costs.
        prefill_tokens: tokens of the step that are neither anchors nor drafts.
        step_ms: milliseconds of a step by its batch_tokens, [prefill_tokens + R + sum(caps) + 1] at least.

    Non-anticipating: whether (r, j) is admitted never depends on a confidence behind j, so the output stays exact.
    """
    step_ms = step_ms.astype(np.float64)
    verify_len, tokens, expected = _start(survival, caps, is_forced, prefill_tokens)
    best = expected / step_ms[tokens]
    for request, draft in ranked(survival, caps, is_forced):
        throughput = (expected + survival[request, draft]) / step_ms[tokens + 1]
        if throughput <= best:
            break
        best, tokens, expected = throughput, tokens + 1, expected + survival[request, draft]
        verify_len[request] += 1
    return verify_len


def best_budget(
    stale_survival: FloatArray, *, caps: IntArray, is_forced: BoolArray, prefill_tokens: int, step_ms: FloatArray
) -> int:
    """The number of drafts with the largest expected throughput (the smallest such number), by a full search.

    Only for survivals that no pending draft depends on: on fresh ones this search biases the output (Appendix A).
    """
    _, tokens, expected = _start(stale_survival, caps, is_forced, prefill_tokens)
    gains = [stale_survival[request, draft] for request, draft in ranked(stale_survival, caps, is_forced)]
    step_ms = step_ms[tokens : tokens + len(gains) + 1].astype(np.float64)
    throughputs = (expected + np.cumsum([0.0, *gains])) / step_ms
    return int(throughputs.argmax())


def _start(
    survival: FloatArray, caps: IntArray, is_forced: BoolArray, prefill_tokens: int
) -> tuple[NDArray[np.int64], int, float]:
    """verify_len, batch_tokens and expected tokens before the first admission: anchors and forced drafts."""
    verify_len = np.where(is_forced, caps, 0).astype(np.int64)
    expected = float(len(caps)) + sum(float(row[:cap].sum()) for row, cap in zip(survival, verify_len, strict=True))
    return verify_len, prefill_tokens + len(caps) + int(verify_len.sum()), expected

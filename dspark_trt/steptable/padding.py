"""Calls that take less time with more tokens: a matrix kernel works on tiles of rows (twelve in ONNX Runtime with
AVX-512), and a tile that is nearly full can take longer than a full one. Such calls are padded, and priced as that.

A single point that lies above those behind it is noise; two neighbours that do are a tile.
"""

from __future__ import annotations

from collections.abc import Sequence

CLEARLY = 0.02  # share of the time that padding has to save


def padded_points(values: Sequence[float]) -> list[int]:
    """For each measured point, by rising tokens, the point that its calls are padded to: itself, or a cheaper one."""
    cheapest = [min(range(at, len(values)), key=lambda each: values[each]) for at in range(len(values))]
    falls = [values[best] < values[at] * (1 - CLEARLY) for at, best in enumerate(cheapest)]

    def agrees(at: int, neighbour: int) -> bool:
        return 0 <= neighbour < len(values) and falls[neighbour] and cheapest[neighbour] == cheapest[at]

    return [
        best if falls[at] and (agrees(at, at - 1) or agrees(at, at + 1)) else at for at, best in enumerate(cheapest)
    ]


def token_buckets(num_requests: int, extra_tokens: Sequence[int], step_ms: Sequence[float | None]) -> dict[int, int]:
    """Packed tokens of a call to those that it is padded to, where they are others. step_ms by extra_tokens, None where
    nothing was measured."""
    measured = [(num_requests + x, ms) for x, ms in zip(extra_tokens, step_ms, strict=True) if ms is not None]
    buckets: dict[int, int] = {}
    for (tokens, _), to in zip(measured, padded_points([ms for _, ms in measured]), strict=True):
        buckets |= dict.fromkeys(range(tokens, measured[to][0]), measured[to][0])
    return buckets

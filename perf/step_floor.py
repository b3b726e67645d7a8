"""What a step of Qwen3-8B with its DSpark drafter has to move and to compute, and the time that an H100 needs for that.

    python perf/step_floor.py            # the tables of plugins/README.md, which a test holds against this

Nothing here is measured: bytes and operations follow from shapes, times from NVIDIA's datasheet of the H100 SXM. A term
takes the longer of its bytes and its operations. Every draft is verified: T = R * (gamma + 1) tokens.

Shape letters: `R` requests, `G` gamma, `T` packed tokens, `L` live positions of a row, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

BYTES_PER_S = 3.35e12  # H100 SXM, datasheet
FLOP_PER_S = 989e12  # bfloat16 without sparsity
SHARE_OF_FLOOR = 0.8  # what large matrix products reach of a GPU's memory speed; an assumption
ELEMENT = 2  # bytes of bfloat16
FLOAT32 = 4
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 4096, 12288, 32, 8, 128, 151936
TARGET_LAYERS, DRAFTER_LAYERS, TAPS, GAMMA, RANK = 36, 5, 5, 7, 256
LIVE = 1024
REQUESTS = (1, 32, 128)
LAYER_WEIGHTS = HIDDEN * HEAD_DIM * (2 * HEADS + 2 * KV_HEADS) + 3 * HIDDEN * INTERMEDIATE
HEAD_WEIGHTS = HIDDEN * VOCABULARY


@dataclass(frozen=True, slots=True)
class Term:
    """One part of a step."""

    name: str
    num_bytes: float
    flop: float

    @property
    def floor_ms(self) -> float:
        return 1e3 * max(self.num_bytes / BYTES_PER_S, self.flop / FLOP_PER_S)


def terms(num_requests: int) -> tuple[Term, ...]:
    """Of a step that drafts, verifies everything and ingests what it verified."""
    tokens, slots = num_requests * (GAMMA + 1), num_requests * GAMMA
    kv = 2 * num_requests * LIVE * KV_HEADS * HEAD_DIM * ELEMENT  # of a layer
    attended = 4 * HEADS * HEAD_DIM * LIVE  # of a token and layer
    logits = VOCABULARY * FLOAT32
    fc = TAPS * HIDDEN * HIDDEN
    return (
        Term(
            "target: layers",
            TARGET_LAYERS * LAYER_WEIGHTS * ELEMENT,
            2 * tokens * TARGET_LAYERS * LAYER_WEIGHTS,
        ),
        Term("target: keys and values", TARGET_LAYERS * kv, tokens * TARGET_LAYERS * attended),
        Term(
            "target: head, logits written and read once",
            HEAD_WEIGHTS * ELEMENT + 2 * tokens * logits,
            2 * tokens * HEAD_WEIGHTS,
        ),
        Term(
            "drafter: layers and fc",
            (DRAFTER_LAYERS * LAYER_WEIGHTS + fc) * ELEMENT,
            2 * slots * DRAFTER_LAYERS * LAYER_WEIGHTS + 2 * tokens * fc,
        ),
        Term("drafter: keys and values", DRAFTER_LAYERS * kv, slots * DRAFTER_LAYERS * attended),
        Term("drafter: head", HEAD_WEIGHTS * ELEMENT + slots * VOCABULARY * ELEMENT, 2 * slots * HEAD_WEIGHTS),
        Term(
            "MarkovHead: W2 in every slot, logits read and written",
            GAMMA * VOCABULARY * RANK * ELEMENT + 2 * slots * logits,
            2 * slots * VOCABULARY * RANK,
        ),
    )


def table() -> Iterator[str]:
    """Bytes and floor of every term, Markdown."""
    columns = [terms(count) for count in REQUESTS]
    yield "| | " + " | ".join(f"R = {count}" for count in REQUESTS) + " |"
    yield "|---" * (len(REQUESTS) + 1) + "|"
    for row in zip(*columns, strict=True):
        yield f"| {row[0].name} | " + " | ".join(_cell(term.num_bytes, term.floor_ms) for term in row) + " |"
    totals = [(sum(t.num_bytes for t in column), sum(t.floor_ms for t in column)) for column in columns]
    yield "| **a step** | " + " | ".join(_cell(*total) for total in totals) + " |"
    shares = [f"{total / SHARE_OF_FLOOR:.1f} ms" for _, total in totals]
    yield f"| a step at {SHARE_OF_FLOOR:.0%} of these speeds | " + " | ".join(shares) + " |"


def _cell(num_bytes: float, floor_ms: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB, {floor_ms:.2f} ms"


if __name__ == "__main__":
    print("\n".join(table()))

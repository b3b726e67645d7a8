"""What speculation did for one answer, counted from its pieces; AIPerf drops a record whose sums do not hold."""

from __future__ import annotations

from typing import Any

from dspark_trt.server.openai.answers import num_cached
from dspark_trt.server.openai.pieces import Tally
from dspark_trt.server.openai.triton import Piece

GAMMA = 3


def tally(*steps: int, verified: int, accepted: int, num_steps: int | None = None) -> Tally:
    """An answer whose pieces had so many tokens: the prompt's own, then those of each step."""
    made = Tally()
    for number, count in enumerate(steps, 1):
        is_last = number == len(steps)
        last: dict[str, Any] = (
            {"finish_reason": "stop", "num_steps": len(steps) - 1 if num_steps is None else num_steps}
            if is_last
            else {"finish_reason": "", "num_steps": 0}
        )
        counts = (verified, accepted) if is_last else (0, 0)
        made.add(
            Piece(
                tuple(range(count)),
                "x" * count,
                (),
                (),
                **last,
                num_drafts_verified=counts[0],
                num_drafts_accepted=counts[1],
            )
        )
    return made


def check_sums(metrics: dict[str, Any] | None) -> list[int]:
    assert metrics is not None
    histogram: list[int] = metrics["acceptance_histogram"]
    assert len(histogram) == metrics["num_spec_tokens"] + 1 == GAMMA + 1
    assert sum(histogram) == metrics["num_spec_steps"]
    assert sum(j * count for j, count in enumerate(histogram)) == metrics["num_accepted_draft_tokens"]
    assert metrics["num_accepted_draft_tokens"] <= metrics["num_draft_tokens"]
    return histogram


def test_histogram_of_a_whole_answer() -> None:
    metrics = tally(1, 3, 1, 4, verified=9, accepted=5).speculation(GAMMA)
    assert check_sums(metrics) == [1, 0, 1, 1]
    assert metrics is not None
    assert metrics["mean_acceptance_length"] == 1 + 5 / 3
    assert metrics["draft_acceptance_rate"] == 5 / 9


def test_an_answer_that_ends_within_the_drafts_of_its_last_step() -> None:
    """Two tokens, both accepted drafts: no bonus follows an EOS."""
    assert check_sums(tally(1, 1, 2, verified=6, accepted=2).speculation(GAMMA)) == [1, 0, 1, 0]


def test_no_metrics_without_verified_drafts() -> None:
    assert tally(1, 1, 1, verified=0, accepted=0).speculation(GAMMA) is None
    assert tally(1, verified=0, accepted=0).speculation(GAMMA) is None


def test_no_guess_where_a_piece_held_several_steps() -> None:
    assert tally(1, 6, 1, verified=9, accepted=4, num_steps=3).speculation(GAMMA) is None


def cached(num_tokens: int) -> Tally:
    made = Tally()
    made.add(Piece((1,), "x", (), (), "stop", 0, 0, 0, num_cached_tokens=num_tokens))
    return made


def test_cached_tokens_are_counted_once_for_each_prompt() -> None:
    """Of several answers to one prompt the first may read what the others reuse."""
    assert num_cached([cached(7)], 1) == 7
    assert num_cached([cached(0), cached(20), cached(5), cached(20)], 2) == 0 + 5
    assert num_cached([Tally(), Tally()], 1) == 0

"""Which calls are padded to a size that costs less, and what they are priced as."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dspark_trt.contract.protocol import EngineLimits
from dspark_trt.steptable.grid import TILE_TOKENS, extra_grid
from dspark_trt.steptable.padding import padded_points, token_buckets
from dspark_trt.steptable.table import StepTable

# one of twelve tokens takes less than those of nine to eleven, as measured with AVX-512
EIGHT = (45.4, 47.8, 48.4, 48.7, 46.4, 50.3)
TABLE = StepTable(
    num_requests=(4, 8),
    extra_tokens=(0, 1, 2, 3, 4, 6),
    step_ms=(((36.1, 37.0, 39.1, 43.1, 43.6, 44.3), EIGHT),),
    draft_ms=(((1.0,), (2.0,)),),
)


def test_a_tile_that_is_nearly_full_is_filled() -> None:
    assert padded_points(EIGHT) == [0, 4, 4, 4, 4, 5]
    assert token_buckets(8, TABLE.extra_tokens, EIGHT) == {9: 12, 10: 12, 11: 12}


@pytest.mark.parametrize(
    "values",
    [
        (10.0, 11.0, 12.0, 13.0),
        (10.0, 13.0, 11.0, 14.0),  # one point alone: noise
        (10.0, 10.1, 10.2, 10.05),  # hardly anything to save
        (10.0,),
        (),
    ],
)
def test_noise_and_rising_curves_pad_nothing(values: tuple[float, ...]) -> None:
    assert padded_points(values) == list(range(len(values)))


def test_counts_between_measured_ones_are_padded_too() -> None:
    assert token_buckets(4, (0, 2, 3, 5, 8), (9.0, 12.0, None, 12.5, 10.0)) == dict.fromkeys(range(6, 12), 12)


def test_a_call_is_padded_by_what_was_measured_beside_the_most_requests_that_are_not_more() -> None:
    assert [TABLE.padded_tokens(8, tokens) for tokens in range(8, 15)] == [8, 12, 12, 12, 12, 13, 14]
    assert TABLE.padded_tokens(10, 10) == 12, "ten plain requests"
    assert TABLE.padded_tokens(4, 9) == 9, "beside four requests nothing falls"
    assert TABLE.padded_tokens(1, 9) == 9, "fewer than were measured"


def test_padded_calls_are_priced_as_what_they_are_padded_to() -> None:
    assert TABLE.step_curve(8, 0, 0, 6).tolist() == pytest.approx([45.4, 46.4, 46.4, 46.4, 46.4, 48.35, 50.3])
    assert TABLE.step_curve(4, 0, 0, 2).tolist() == [36.1, 37.0, 39.1]


def test_an_engine_that_pads_by_itself_is_left_alone() -> None:
    assert replace(TABLE, is_padded=True).padded_tokens(8, 9) == 9


@pytest.mark.parametrize("num_requests", [1, 2, 4, 8, 11])
def test_a_full_tile_is_measured(num_requests: int) -> None:
    limits = EngineLimits(max_requests=16, max_seq_len=400, max_batch_tokens=64)
    assert TILE_TOKENS - num_requests in extra_grid(num_requests, 7, limits)

"""Sizes of buckets, shared calls of prompts, and the index arrays of padded calls:
padding is never read and never read from."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_trt.contract import bindings
from dspark_trt.contract.cache_dims import CacheDims
from dspark_trt.contract.dims import DrafterDims, TargetDims
from dspark_trt.contract.protocol import EngineLimits, TargetBatch
from dspark_trt.engines.device.buckets import LARGEST_POWER, bucket, chunk_runs, query_bucket
from dspark_trt.engines.device.calls import TargetCall, check_batch, num_decode_tokens, target_calls
from dspark_trt.engines.tensorrt.compiler.profiles import PREFILL_STEP, graph_profiles, prefill_corners
from dspark_trt.errors import CapacityError
from tests.support.profile_choice import chosen_profile

GAMMA = 4
LIMITS = EngineLimits(max_requests=13, max_seq_len=200, max_batch_tokens=90)
_CACHE = CacheDims(2, 13, 2, 256, 16, page_positions=64)
TARGET = TargetDims(LIMITS, _CACHE, "paged", vocab_size=50, hidden_size=32, num_taps=1)
DRAFTER = DrafterDims(LIMITS, _CACHE, "paged", 50, 32, 1, GAMMA)
TABLES = 1 + np.arange(13 * 4).reshape(13, 4)  # of every row, none twice


@given(st.integers(1, 3000), st.integers(0, 3000))
def test_a_bucket_holds_its_size_and_is_its_own_bucket(size: int, more: int) -> None:
    most = size + more
    padded = bucket(size, most)
    assert size <= padded <= most
    assert bucket(padded, most) == padded
    assert padded == most or padded <= 2 * size or padded % LARGEST_POWER == 0


@given(st.integers(1, 5000))
def test_few_buckets_serve_all_sizes(most: int) -> None:
    assert len({bucket(size, most) for size in range(1, most + 1)}) <= 8 + most / LARGEST_POWER


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_buckets_grow_with_the_size(one: int, other: int) -> None:
    assert bucket(min(one, other), 5000) <= bucket(max(one, other), 5000)


@given(st.integers(1, 300), st.integers(0, 2000), st.data())
def test_every_shared_call_of_prompts_is_within_a_profile_and_no_profile_is_wide(
    num_rows: int, more: int, data: st.DataObject
) -> None:
    limits = EngineLimits(max_requests=num_rows, max_seq_len=4096, max_batch_tokens=num_rows + more)
    corners = prefill_corners(limits)
    assert all(rows * length <= PREFILL_STEP * limits.max_batch_tokens for rows, length in corners)
    rows = data.draw(st.integers(1, num_rows))
    length = data.draw(st.integers(1, limits.max_batch_tokens // rows))
    assert any(rows <= most and length <= longest for most, longest in corners)


def test_rows_decode_one_token_or_a_block() -> None:
    assert [query_bucket(longest, GAMMA) for longest in range(1, GAMMA + 2)] == [1, *[GAMMA + 1] * GAMMA]
    with pytest.raises(AssertionError):
        query_bucket(GAMMA + 2, GAMMA)


@dataclass(frozen=True)
class Step:
    """A target batch, and how many drafts are selected on the device and inserted behind its anchors."""

    batch: TargetBatch
    num_selected: int | None

    def calls(self) -> list[TargetCall]:
        return target_calls(self.batch, TABLES[self.batch.rows], GAMMA, LIMITS, self.num_selected)

    @property
    def num_decode_tokens(self) -> int:
        return num_decode_tokens(self.batch, self.num_selected)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Any target batch within the limits, drafts selected on the device or not."""
    rows = draw(st.lists(st.integers(0, LIMITS.max_requests - 1), min_size=1, max_size=8, unique=True))
    num_decode = draw(st.integers(0, len(rows)))
    is_fused = num_decode > 0 and draw(st.booleans())
    longest = 1 if is_fused or draw(st.booleans()) else GAMMA + 1
    query = [draw(st.integers(1, longest if at < num_decode else 12)) for at in range(len(rows))]
    num_drafts = draw(st.integers(0, num_decode * GAMMA)) if is_fused else None
    num_drafts = None if num_drafts is None else min(num_drafts, LIMITS.max_batch_tokens - sum(query))
    num_tokens = sum(query)
    wanted = sorted(draw(st.sets(st.integers(0, num_tokens - 1)))) if draw(st.booleans()) else range(num_tokens)
    batch = TargetBatch(
        token_ids=100 + np.arange(num_tokens),
        rows=np.array(rows),
        past_lengths=np.array([draw(st.integers(0, 150)) for _ in rows]),
        query_lengths=np.array(query),
        num_decode=num_decode,
        logit_rows=np.array(wanted, np.int64),
    )
    return Step(batch, num_drafts)


@given(steps())
def test_calls_cover_the_batch_in_order_and_padding_touches_nothing(step: Step) -> None:
    batch, calls = step.batch, step.calls()
    assert len(calls) == 1, "prompts are one call, wherever their rows lie"
    check_batch(batch, batch.query_lengths, GAMMA, LIMITS, step.num_selected)
    assert sum(call.num_tokens for call in calls) == len(batch.token_ids) + (step.num_selected or 0)
    if step.num_selected is None:
        assert sum(call.num_logits for call in calls) == len(batch.logit_rows)
    seen: list[tuple[int, int, int]] = []  # row, position, token id, in packed order; selected ones as they come
    for at, call in enumerate(calls):
        shape, arrays = call.shape, call.arrays
        assert call.num_tokens <= shape.num_tokens <= LIMITS.max_batch_tokens
        assert call.num_logits <= shape.num_logits
        assert shape.decode[0] <= LIMITS.max_requests
        assert shape.decode[1] in (1, GAMMA + 1)
        selected = step.num_decode_tokens if step.num_selected is not None and at == 0 else 0
        found: dict[int, tuple[int, int]] = {}
        groups = [bindings.DECODE] if shape.prefill is None else list(bindings.TARGET_GROUPS)
        for group in groups:
            tables = arrays[bindings.group_block_tables(group)]
            if selected and group == bindings.DECODE:
                assert (tables[: batch.num_decode] == TABLES[batch.rows[: batch.num_decode]]).all()
                assert not tables[batch.num_decode :].any(), "rows without requests have page 0"
                continue
            tokens = arrays[bindings.group_tokens(group)]
            past, query = arrays[bindings.group_past_lengths(group)], arrays[bindings.group_query_lengths(group)]
            assert ((tokens >= 0) & (tokens < call.num_tokens)).all(), "a padded query points at a padding token"
            assert (np.diff(tokens[query > 0, 0]) > 0).all(), "rows stand in the order of their tokens"
            for row, query_index in np.ndindex(*tokens.shape):
                token = int(tokens[row, query_index])
                if query_index < query[row]:
                    assert token not in found, "a token stands in two rows"
                    found[token] = int((tables[row, 0] - 1) // TABLES.shape[1]), int(past[row]) + query_index
                elif query[row]:
                    assert token == tokens[row, query[row] - 1], "padding repeats the row's last token"
                else:
                    assert not tables[row].any(), "an idle row has page 0"
        assert sorted(found) == list(range(selected, call.num_tokens))
        if bindings.TOKEN_IDS not in arrays:
            assert selected == call.num_tokens, "the selection writes ids and positions"
            continue
        for token in sorted(found):
            row, position = found[token]
            assert arrays[bindings.POSITIONS][token] == position
            seen.append((row, position, int(arrays[bindings.TOKEN_IDS][token])))
        for name in (bindings.TOKEN_IDS, bindings.POSITIONS):
            assert not arrays[name][call.num_tokens :].any(), "padding tokens are token 0 at position 0"
        if shape.prefill is not None:
            assert arrays[bindings.LOGIT_ROWS].max() < call.num_tokens
    expected = [
        (row, past + query_index)
        for row, past, length in zip(batch.rows, batch.past_lengths, batch.query_lengths, strict=True)
        for query_index in range(length)
    ]
    skipped = batch.num_decode if step.num_selected is not None else 0
    assert seen == [(*where, 100 + at) for at, where in enumerate(expected)][skipped:]


@given(steps())
def test_calls_ask_for_the_logits_of_the_batch_in_order(step: Step) -> None:
    batch, wanted, first = step.batch, [], 0
    for call in step.calls():
        rows = (
            call.arrays.get(bindings.LOGIT_ROWS, np.arange(call.num_logits))
            if bindings.LOGIT_ROWS in call.arrays
            else np.arange(call.num_logits)
        )
        wanted += [first + int(row) for row in rows[: call.num_logits]]
        first += call.num_tokens
    if step.num_selected is None:
        assert wanted == batch.logit_rows.tolist()
    else:
        of_chunks = batch.logit_rows[batch.logit_rows >= batch.num_decode] + step.num_selected
        assert wanted == [*range(step.num_decode_tokens), *of_chunks]


@given(st.lists(st.integers(1, 64), max_size=12))
def test_padded_chunks_share_a_call_while_their_padding_fits(lengths: list[int]) -> None:
    query = np.array(lengths, np.int64)
    runs = chunk_runs(query, 64)
    assert [at for begin, end in runs for at in range(begin, end)] == list(range(len(query)))
    assert all((end - begin) * query[begin:end].max() <= 64 for begin, end in runs)
    for (begin, end), _ in pairwise(runs):
        assert (end + 1 - begin) * query[begin : end + 1].max() > 64, "the next chunk would have fitted"
    assert chunk_runs(query) == ([(0, len(query))] if lengths else [])


def test_a_row_that_would_verify_more_than_a_block_is_refused() -> None:
    none = np.zeros(1, np.int64)
    batch = TargetBatch(np.zeros(GAMMA + 2, np.int64), none, none, none + GAMMA + 2, 1, none)
    with pytest.raises(CapacityError, match="a row would verify 6 tokens, the engine takes an anchor and 4 drafts"):
        check_batch(batch, batch.query_lengths, GAMMA, LIMITS)


@given(steps())
def test_every_target_call_fits_a_profile_that_tensorrt_compiles(step: Step) -> None:
    profiles = graph_profiles(bindings.TARGET_GRAPH, TARGET, DRAFTER)
    for call in step.calls():
        decode, prefill = call.shape.decode, call.shape.prefill or (1, 1)
        extents = {"T": call.shape.num_tokens, "L": call.shape.num_logits}
        extents |= {
            "P": 20,
            "B_decode": decode[0],
            "S_decode": decode[1],
            "B_prefill": prefill[0],
            "S_prefill": prefill[1],
        }
        chosen = chosen_profile(profiles, extents)
        is_wide = profiles[chosen].name.startswith("prefill")
        assert not is_wide or call.shape.prefill is not None, "a bucket has a tight profile"

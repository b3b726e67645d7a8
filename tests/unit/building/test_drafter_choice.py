"""Which forms of a drafter are tried, what their evidence is, and which one is taken."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dspark_trt.building.drafter_choice import Asked, Evidence, candidates, choose, evidence_of, vocabulary
from dspark_trt.calibration.record import Recorder
from dspark_trt.contract.drafter_form import DrafterForm
from dspark_trt.errors import ExportError

VOCABULARY = 20_000
OPEN = Asked("auto", None, None)


def evidence(vocab_size: int = VOCABULARY, **changes: Any) -> Evidence:
    plain: dict[str, Any] = {
        "ranked_ids": np.arange(vocab_size)[::-1],
        "accepted_ids": np.array([], np.int64),
        "accepted_per_block": 1.0,
        "plain_ms": {1: 10.0, 8: 10.0},
    }
    return Evidence(**plain | changes)


def sizes_and_more(forms: list[DrafterForm]) -> list[tuple[str, int | None, int]]:
    return [
        (form.precision, None if form.draft_vocab is None else len(form.draft_vocab), form.markov_top_n)
        for form in forms
    ]


def test_all_that_is_left_open_is_tried_the_plain_form_first() -> None:
    assert sizes_and_more(candidates(OPEN, evidence(), VOCABULARY)) == [
        ("fp32", None, 0),
        ("fp32", None, 64),
        ("int8", None, 0),
        ("int8", None, 64),
        ("int8", 4096, 0),
        ("int8", 4096, 64),
        ("int8", 8192, 0),
        ("int8", 8192, 64),
    ]


def test_what_the_recipe_names_is_not_tried_otherwise() -> None:
    forms = candidates(Asked(300, "fp32", 0), evidence(), VOCABULARY)
    assert sizes_and_more(forms) == [("fp32", 300, 0)]
    np.testing.assert_array_equal(forms[0].draft_vocab, np.arange(VOCABULARY - 300, VOCABULARY))
    assert choose(forms, evidence(), _unused, vocab_size=VOCABULARY) == (forms[0], [])


@pytest.mark.parametrize("vocab_size", [30, 64, 65, 320])
def test_a_vocabulary_smaller_than_the_candidates_leaves_the_whole_one(vocab_size: int) -> None:
    forms = candidates(OPEN, evidence(vocab_size), vocab_size)
    assert {form.draft_vocab for form in forms} == {None}
    assert {form.markov_top_n for form in forms} == ({0, 64} if vocab_size > 64 else {0})


def test_more_ids_than_there_are_are_all_of_them() -> None:
    assert sizes_and_more(candidates(Asked(1000, "int8", 0), evidence(320), 320)) == [("int8", None, 0)]


@pytest.mark.parametrize("draft_vocab", ["auto", "all", 64])
def test_a_top_n_of_more_logits_than_there_are_is_refused(draft_vocab: str | int) -> None:
    with pytest.raises(ExportError, match="markov_top_n: expected less than"):
        candidates(Asked(draft_vocab, "fp32", 320), evidence(320), 320)


def recorder(blocks: list[tuple[int, list[int], list[float], int]]) -> Recorder:
    """(prompt, drafts, acceptance, the target's token) of each block."""
    found = Recorder(group_of=int)
    for group, drafts, acceptance, written in blocks:
        found.rows.append((np.zeros(3, np.float32), np.array(acceptance), np.array(drafts), True, group, written))
    return found


def test_prompts_that_rank_ids_do_not_count_their_acceptance() -> None:
    ranks = (0, [5, 6, 7], [1.0, 1.0, 1.0], 5)
    counts = (1, [8, 9, 9], [1.0, 1.0, 1.0], 8)
    found = evidence_of(recorder([ranks, ranks, counts]), gamma=3, vocab_size=12, plain_ms={})
    assert found.accepted_ids.tolist() == [8, 9]  # of the first two slots
    assert found.ranked_ids.tolist() == [5, 6, 7, 0, 1, 2, 3, 4, 8, 9, 10, 11]
    assert sorted(found.ranked_ids.tolist()) == list(range(12))


def test_only_drafts_behind_accepted_ones_are_accepted() -> None:
    blocks = [(1, [3, 4, 5], [0.2, 1.0, 1.0], 9), (3, [6, 7, 8], [0.9, 0.9, 0.0], 9)]
    found = evidence_of(recorder(blocks), gamma=3, vocab_size=12, plain_ms={})
    assert found.accepted_ids.tolist() == [6, 7]
    assert found.accepted_per_block == pytest.approx((0.2 + 0.2 + 0.9 + 0.81) / 2)


def test_no_block_at_all_ranks_ids_by_number() -> None:
    found = evidence_of(Recorder(group_of=int), gamma=3, vocab_size=6, plain_ms={})
    assert (found.ranked_ids.tolist(), found.accepted_ids.tolist(), found.accepted_per_block) == (
        [0, 1, 2, 3, 4, 5],
        [],
        0.0,
    )


def test_a_draft_vocabulary_is_ascending() -> None:
    assert vocabulary(np.array([9, 2, 7, 1]), 3).tolist() == [2, 7, 9]


class TimedDrafter:
    """Takes as long as its form is said to take."""

    gamma = 7
    limits = SimpleNamespace(max_requests=8, max_seq_len=96, max_batch_tokens=64)

    def __init__(self, ms: float) -> None:
        self._ms = ms

    def draft(self, batch: Any) -> None:
        assert len(batch.rows) in (1, 8)
        assert batch.uniforms.shape[1] == 2
        time.sleep(self._ms / 1e3)


def test_the_form_of_the_greatest_expected_gain_is_taken() -> None:
    ids = np.arange(100)
    forms = [DrafterForm(), DrafterForm("int8", ids), DrafterForm("int8", ids[:50])]
    ms = {id(forms[0]): 20.0, id(forms[1]): 4.0, id(forms[2]): 2.0}
    # of four accepted drafts the second form can propose all, the third form one
    seen = evidence(accepted_ids=np.array([1, 60, 70, 80]), accepted_per_block=1.6)

    def write(form: DrafterForm, folder: Path) -> Any:
        assert folder.is_dir()
        assert not any(folder.iterdir())
        return TimedDrafter(ms[id(form)])

    fractions: list[float] = []
    chosen, found = choose(forms, seen, write, vocab_size=VOCABULARY, progress=fractions.append)
    assert chosen is forms[1]
    assert [each["share_of_accepted_drafts"] for each in found] == [1.0, 1.0, 0.25]
    for each, share in zip(found, (1.0, 1.0, 0.25), strict=True):
        gains = [(1 + 1.6 * share) / (1 + draft_ms / 10.0) for draft_ms in each["draft_ms"].values()]
        assert each["expected_gain"] == pytest.approx(np.mean(gains), abs=1e-3)
    assert fractions[-1] == 1.0


def _unused(form: DrafterForm, folder: Path) -> Any:
    raise AssertionError("one form alone needs no measuring")

"""The Triton kernels of Acceptance, under Triton's CPU interpreter, against the NumPy reference.

Every tensor stands in a larger allocation full of NaN (integers: far outside every tensor), and nothing outside may
change; nor may the logits, which are edited in between.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from dspark_trt_plugins.acceptance.form import ACCEPTED, ALL_MASKED, NOT_FINITE, NOT_REACHED, AcceptanceForm
from dspark_trt_plugins.acceptance.launches import AcceptanceOperation
from dspark_trt_plugins.acceptance.reference import acceptance

from tests.support.acceptance_cases import Arrays, Block, make_inputs, random_case
from tests.support.interpreted_kernels import run_interpreted

# three blocks and two segments, the last of them not whole
FORM = AcceptanceForm(300, 4, block_tokens=128, segment_blocks=2, num_candidates=128)
DRAWN = (-2, -2, -2)  # drafts that are drawn from the drafter


def assert_kernels_equal_the_reference(form: AcceptanceForm, inputs: Arrays) -> np.ndarray:
    found, expected = run_interpreted(AcceptanceOperation(form), inputs), acceptance(form, inputs)
    outcomes: np.ndarray = found["outcomes"]
    np.testing.assert_array_equal(outcomes, expected["outcomes"])
    told = outcomes[inputs["reported_rows"]] >= ACCEPTED
    for name in ("log_probs", "top_log_probs"):
        np.testing.assert_allclose(found[name][told], expected[name][told], atol=1e-5)
    num_tokens = min(form.vocab_size, found["top_ids"].shape[1])
    np.testing.assert_array_equal(found["top_ids"][told, :num_tokens], expected["top_ids"][told, :num_tokens])
    return outcomes


def test_blocks_of_every_kind_are_decided_together() -> None:
    blocks = [
        Block(DRAWN),
        Block(DRAWN, temperature=0.0, reports=True),
        Block(DRAWN, temperature=0.6, top_k=20, top_p=0.95, reports=True),
        Block(DRAWN, temperature=0.9, is_drawn=False, min_p=0.05),
        Block((-2,), temperature=1.5, top_p=0.9),
        Block(),
        Block(
            DRAWN,
            repetition_penalty=1.3,
            presence_penalty=0.4,
            frequency_penalty=0.2,
            edits={3: {"bias": 5.0}, 7: {"masks": 0b101}, 20: {"is_seen": 1, "counts": 2}},
            reports=True,
        ),
    ]
    outcomes = assert_kernels_equal_the_reference(FORM, random_case(FORM, blocks, seed=1, steps=0.5))
    assert (outcomes == ACCEPTED).any()
    assert (outcomes == NOT_REACHED).any()
    assert (outcomes >= 0).sum() == len(blocks)


@pytest.mark.parametrize(
    "block",
    [
        Block(top_k=1),
        Block(top_k=40, top_p=0.5),
        Block(temperature=20.0, top_p=0.97),  # more candidates than are kept apart
        Block(temperature=20.0, top_k=200, top_p=0.99),
        Block(top_p=1e-9, min_p=1.0),
        Block(top_p=0.3, min_p=0.3),
    ],
    ids=["top_k 1", "both", "many candidates", "many of both", "one token", "min_p cuts what top_p keeps"],
)
def test_what_is_cut_off_is_never_drawn(block: Block) -> None:
    """Ties at every border: logits are multiples of a half."""
    inputs = random_case(FORM, [block] * 3, seed=2, steps=0.5)
    assert_kernels_equal_the_reference(FORM, inputs)


def test_equal_logits_at_the_border_stay_with_top_k_and_go_by_id_with_top_p() -> None:
    logits = np.zeros((6, 300), np.float32)
    logits[:, 290:] = -50
    blocks = [Block(top_k=3)] * 3 + [Block(top_p=0.01)] * 3
    outcomes = assert_kernels_equal_the_reference(FORM, make_inputs(FORM, blocks, logits, seed=3))
    assert outcomes[:3].max() > 2, "all 290 tie"
    assert set(outcomes[3:]) <= {0, 1, 2}, "the first three have 0.01 of the mass"


@pytest.mark.parametrize("vocab_size", [1, 2, 257])
def test_any_vocabulary(vocab_size: int) -> None:
    form = replace(FORM, vocab_size=vocab_size)
    blocks = [Block((-2,)), Block((-2,), temperature=0.0, reports=True), Block((-2,), top_k=1, top_p=0.5)]
    outcomes = assert_kernels_equal_the_reference(form, random_case(form, blocks, seed=4))
    assert ((outcomes < vocab_size) & (outcomes >= NOT_REACHED)).all()


def test_a_draft_vocabulary_has_columns_of_its_own() -> None:
    form = replace(FORM, draft_vocab_size=40)
    inputs = random_case(form, [Block(DRAWN), Block(DRAWN, top_k=30), Block(DRAWN, is_drawn=False)], seed=5)
    assert_kernels_equal_the_reference(form, inputs)


def test_equal_distributions_leave_no_residual_and_every_draft_is_accepted() -> None:
    inputs = random_case(FORM, [Block(DRAWN)] * 3, seed=6)
    inputs["draft_logits"] = inputs["logits"].reshape(3, 4, 300)[:, :3].reshape(9, 300).copy()
    outcomes = assert_kernels_equal_the_reference(FORM, inputs).reshape(3, 4)
    assert (outcomes[:, :3] == ACCEPTED).all()
    assert (outcomes[:, 3] >= 0).all()


def test_logits_that_are_not_finite_end_their_own_block() -> None:
    blocks = [Block((7, 7), temperature=t, is_drawn=False) for t in (0.0, 1.0, 1.0, 1.0)]
    logits = np.zeros((12, 300), np.float32)
    logits[:, 7] = 40
    logits[1, 299] = np.nan
    logits[3, 0] = np.inf
    logits[6 + 2, 128] = -np.inf
    blocks[2] = replace(blocks[2], edits={128: {"masks": 0b111}})  # masked or not
    outcomes = assert_kernels_equal_the_reference(FORM, make_inputs(FORM, blocks, logits))
    assert outcomes[:3].tolist() == [ACCEPTED, NOT_FINITE, NOT_REACHED]
    assert outcomes[3:6].tolist() == [NOT_FINITE, NOT_REACHED, NOT_REACHED]
    assert outcomes[6:].tolist() == [ACCEPTED, ACCEPTED, NOT_FINITE, ACCEPTED, ACCEPTED, 7]


def test_drafts_of_a_drafter_out_of_order_were_not_proposed() -> None:
    """NaN or inf among its logits, or a draft that its own distribution excludes: the token is the target's."""
    blocks = [Block((4,)), Block((4,)), Block((4,)), Block((4,)), Block((4,))]
    logits = np.zeros((10, 300), np.float32)
    logits[::2, [2, 4]] = 40
    draft_logits = np.zeros((5, 300), np.float32)
    draft_logits[0, 9], draft_logits[1, 9], draft_logits[2], draft_logits[3, 4] = np.nan, np.inf, -np.inf, -np.inf
    draft_logits[4, 5:] = -np.inf
    outcomes = assert_kernels_equal_the_reference(FORM, make_inputs(FORM, blocks, logits, draft_logits, seed=7))
    assert set(outcomes[0:8:2]) <= {2, 4}
    assert outcomes[8] == ACCEPTED


def test_masks_hold_in_their_slots_and_a_row_without_tokens_says_so() -> None:
    form = replace(FORM, vocab_size=3)
    every = {token: {"masks": 0b10} for token in range(3)}
    blocks = [
        Block((1, 1), temperature=0.0, edits={1: {"masks": 0b10}}),
        Block((1, 1), temperature=0.0, edits=every),
        Block((1, 1), is_drawn=False, edits={1: {"masks": 0b01}}),
    ]
    logits = np.tile(np.array([0, 40, 1], np.float32), (9, 1))
    outcomes = assert_kernels_equal_the_reference(form, make_inputs(form, blocks, logits))
    assert outcomes[:3].tolist() == [ACCEPTED, 2, NOT_REACHED]
    assert outcomes[3:6].tolist() == [ACCEPTED, ALL_MASKED, NOT_REACHED]
    assert outcomes[6] in (0, 2)


def test_drafts_before_a_slot_count_for_its_penalties() -> None:
    """2 a token: the third 1 loses against 3, although the raw logits never change."""
    logits = np.zeros((4, 300), np.float32)
    logits[:, 1], logits[:, 3] = 5, 2
    block = Block((1, 1, 1), temperature=0.0, frequency_penalty=2.0, edits={1: {}}, reports=True)
    outcomes = assert_kernels_equal_the_reference(FORM, make_inputs(FORM, [block], logits))
    assert outcomes.tolist() == [ACCEPTED, ACCEPTED, 3, NOT_REACHED]


@pytest.mark.parametrize("word", [0, 2**63 - 1, -1])
def test_extreme_random_words_draw_the_first_and_the_last_token_that_has_a_probability(word: int) -> None:
    logits = np.full((3, 300), -3e4, np.float32)
    logits[:, 100:200] = 0
    inputs = make_inputs(FORM, [Block(), Block(top_p=0.999), Block(top_k=100)], logits)
    inputs["bonus_words"][:] = word  # as a uniform: 0, nearly a half, nearly 1
    outcomes = assert_kernels_equal_the_reference(FORM, inputs)
    assert outcomes[0] == {0: 100, 2**63 - 1: 149, -1: 199}[word]


def test_the_same_inputs_give_the_same_bits_and_nothing_is_launched_for_nothing() -> None:
    inputs = random_case(FORM, [Block(DRAWN, temperature=0.0)], seed=8)
    operation = AcceptanceOperation(FORM)
    first, second = (run_interpreted(operation, inputs) for _ in range(2))
    assert all(value.tobytes() == second[name].tobytes() for name, value in first.items())
    extents = {"A": 4, "L": 4, "D": 1} | dict.fromkeys("STXUEP", 0)
    assert [launch.kernel for launch in operation.launches(extents)] == ["summarise", "decide", "choose"]


def test_forms_that_cannot_be_computed_are_refused() -> None:
    with pytest.raises(ValueError, match=r"vocab_size: expected 1 to 524287, found 524288"):
        replace(FORM, vocab_size=524288)
    with pytest.raises(ValueError, match=r"num_slots: expected 1 to 63, found 64"):
        replace(FORM, num_slots=64)

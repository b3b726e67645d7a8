"""Data shapes of the drafter's training: shards, anchors, masks, labels and the draft vocabulary."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from recipe.answer import Answer, load_answers, load_new_shards, save_answers
from recipe.batches import draw_anchors, groups_by_length, make_batch, visibility
from recipe.draft_vocab import column_of_id, most_written_ids

MASK = 96


def answer(num_positions: int, num_prompt_tokens: int, seed: int = 0) -> Answer:
    generator = torch.Generator().manual_seed(seed)
    return Answer(
        ids=torch.randint(90, (num_positions,), generator=generator).int(),
        taps=torch.randn(num_positions, 8, generator=generator).bfloat16(),
        hidden=torch.randn(num_positions, 4, generator=generator),
        log_sum_exp=torch.randn(num_positions, generator=generator),
        num_prompt_tokens=num_prompt_tokens,
    )


def test_a_shard_reads_back_as_it_was_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    written = [answer(12, 5), answer(7, 3, seed=1)]
    save_answers(written, tmp_path / "answers-00000.safetensors")
    read = load_answers(tmp_path / "answers-00000.safetensors")
    for before, after in zip(written, read, strict=True):
        assert after.num_prompt_tokens == before.num_prompt_tokens
        for name in ("ids", "taps", "hidden", "log_sum_exp"):
            torch.testing.assert_close(getattr(after, name), getattr(before, name), rtol=0, atol=0)
    assert [path.name for path in tmp_path.iterdir()] == ["answers-00000.safetensors"]


def test_only_shards_that_are_new_are_read(tmp_path: Path) -> None:
    seen: set[Path] = set()
    save_answers([answer(12, 5)], tmp_path / "answers-00000.safetensors")
    assert len(list(load_new_shards(tmp_path, seen))) == 1
    save_answers([answer(9, 5), answer(8, 2)], tmp_path / "answers-00001.safetensors")
    assert [len(new.ids) for new in load_new_shards(tmp_path, seen)] == [9, 8]
    assert list(load_new_shards(tmp_path, seen)) == []


@pytest.mark.parametrize("num_slots", [1, 2, 4, 7])
def test_every_anchor_is_a_token_of_the_answer_with_all_its_labels(num_slots: int) -> None:
    example = answer(20, 6)
    anchors = example.anchors(num_slots)
    assert (anchors[0], anchors[-1] + num_slots) == (6, 19)
    drawn = draw_anchors(example, 50, num_slots, torch.Generator().manual_seed(3))
    assert set(drawn.tolist()) <= set(anchors)
    assert drawn.tolist() == sorted(drawn.tolist())
    few = draw_anchors(example, 5, num_slots, torch.Generator().manual_seed(3))
    assert len(set(few.tolist())) == 5


def test_a_slot_sees_the_context_below_its_anchor_and_its_own_block_alone() -> None:
    starts, num_slots, num_positions = torch.tensor([[2, 5], [0, 3]]), 3, 8
    visible = visibility(starts, num_slots, num_positions)
    assert visible.shape == (2, 1, 6, 14)
    for row in range(2):
        for slot in range(6):
            start = int(starts[row, slot // num_slots])
            expected = [position < start for position in range(num_positions)]
            expected += [other // num_slots == slot // num_slots for other in range(6)]
            assert visible[row, 0, slot].tolist() == expected


def test_labels_previous_ids_and_target_rows_stand_at_their_positions() -> None:
    answers, starts, num_slots = [answer(20, 6), answer(15, 4, seed=1)], [[6, 9], [5, 8]], 3
    batch = make_batch(answers, [torch.tensor(row) for row in starts], num_slots, MASK)
    assert batch.block.taps.shape == (2, 20, 8)
    for row, example in enumerate(answers):
        for block, start in enumerate(starts[row]):
            span = slice(start, start + num_slots)
            ids = example.ids.tolist()
            assert batch.block.slot_ids.view(2, 2, num_slots)[row, block].tolist() == [ids[start], MASK, MASK]
            assert batch.block.slot_positions.view(2, 2, num_slots)[row, block].tolist() == [
                start,
                start + 1,
                start + 2,
            ]
            assert batch.previous_ids[row, block].tolist() == ids[span]
            assert batch.labels[row, block].tolist() == ids[start + 1 : start + 1 + num_slots]
            assert torch.equal(batch.target_hidden[row, block], example.hidden[span])
            assert torch.equal(batch.target_log_sum_exp[row, block], example.log_sum_exp[span])


def test_a_pass_meets_every_answer_at_most_once_in_groups_of_one_size() -> None:
    import random

    answers = [answer(10 + at, 3, seed=at) for at in range(21)]
    groups = list(groups_by_length(answers, 4, random.Random(0)))
    assert [len(group) for group in groups] == [4] * 5
    assert len({id(member) for group in groups for member in group}) == 20


def test_the_draft_vocabulary_holds_what_answers_use_and_then_the_lowest_ids() -> None:
    example = answer(8, 4)
    example.ids[:] = torch.tensor([80, 81, 82, 83, 70, 70, 60, 50])  # prompts do not count
    vocabulary = most_written_ids([example], vocab_size=97, count=6)
    assert vocabulary.tolist() == [0, 1, 2, 50, 60, 70]
    columns = column_of_id(vocabulary, 97)
    assert columns[vocabulary].tolist() == list(range(6))
    assert (columns == -1).sum() == 97 - 6

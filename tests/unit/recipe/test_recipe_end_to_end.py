"""The whole recipe on a tiny pair: answers, training, a resumed step, evaluation; and the numbers of its drafter."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import recipe.evaluate
import recipe.train
import recipe.write_answers
import torch
from recipe.answer import load_answers
from recipe.drafter import BlockInput, load_drafter, target_embedding
from recipe.prompts import Prompt, read_prompts, training_prompts
from recipe.target import Sampling, Target
from recipe.train import Settings, Source, Trainer
from safetensors.numpy import load_file

from dspark_trt.checkpoints.drafter import read_drafter
from dspark_trt.checkpoints.target import read_target
from dspark_trt.contract.protocol import DraftBatch, EngineLimits, IngestBatch, TargetBatch
from dspark_trt.errors import RequestError
from dspark_trt.reference.engines import open_reference_engines
from tests.support.factories import write_drafter, write_target

VOCABULARY = 320


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    target = write_target(
        folder / "target", vocab_size=VOCABULARY, layers=4, tied=True, tokenizer=True, eos_token_ids=(0,)
    )
    return target, write_drafter(folder / "drafter", target, taps=(1, 2), gamma=7, dtype="bfloat16")


@pytest.fixture(scope="module")
def data(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards of answers."""
    folder = tmp_path_factory.mktemp("data")
    prompts = folder / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"prompt": f"the quick brown fox {at}", "source": "a"}) + "\n" for at in range(40))
    )
    recipe.write_answers.main(
        [
            "--target",
            str(folders[0]),
            "--prompts",
            str(prompts),
            "--output",
            str(folder),
            "--shards",
            "2",
            "--batch",
            "6",
            "--max-new-tokens",
            "40",
            "--tap-layers",
            "1",
            "2",
        ]
    )
    return folder


def test_three_scripts_make_a_drafter_that_loads_again(folders: tuple[Path, Path], data: Path, tmp_path: Path,
                                                       capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    target, start = folders
    run = tmp_path / "run"
    recipe.train.main(
        [
            "--target",
            str(target),
            "--start",
            str(start),
            "--data",
            str(data),
            "--output",
            str(run),
            "--minutes",
            "0.002",
            "--learning-rate",
            "0.1",
            "--draft-vocab",
            "200",
            "--answers-per-step",
            "2",
            "--slots-per-answer",
            "14",
        ]
    )
    before, after = load_file(start / "model.safetensors"), load_file(run / "drafter" / "model.safetensors")
    assert {name: (array.dtype, array.shape) for name, array in after.items()} == {
        name: (array.dtype, array.shape) for name, array in before.items()
    }
    unchanged = [name for name in before if np.array_equal(before[name], after[name])]
    assert [name for name in unchanged if before[name].ndim == 2] == []  # a norm near 1 needs a larger step in bfloat16
    capsys.readouterr()
    recipe.evaluate.main(
        [
            "--target",
            str(target),
            "--drafters",
            str(start),
            str(run / "drafter"),
            "--prompts",
            str(data / "prompts.jsonl"),
            "--unseen-source",
            "a",
            "--per-source",
            "3",
            "--slots",
            "3",
            "--max-new-tokens",
            "24",
            "--cache",
            str(tmp_path),
        ]
    )
    row = json.loads(capsys.readouterr().out)
    assert (row["source"], row["slots"], row["answers"]) == ("a", 3, 3)
    for length, survival in zip(row["accepted_len_everywhere"], row["survival"], strict=True):
        assert length == pytest.approx(1 + sum(survival), abs=3e-3)


def test_a_resumed_run_goes_on_with_the_same_weights_optimizer_and_vocabulary(
    folders: tuple[Path, Path], data: Path, tmp_path: Path
) -> None:
    trainer, source = new_trainer(folders, data), source_of(data)
    batches = source.batches(seed=0)
    losses = [trainer.step(next(batches)).total.item() for _ in range(2)]
    assert all(np.isfinite(losses))
    trainer.save(tmp_path, folders[1] / "config.json")
    third = next(batches)
    resumed = new_trainer(folders, data, draft_vocab=torch.arange(200))
    resumed.restore(tmp_path)
    assert resumed.progress.step == 2
    assert torch.equal(resumed.draft_vocab, trainer.draft_vocab)
    assert resumed.step(third).total.item() == trainer.step(third).total.item()
    for name, value in trainer.drafter.state_dict().items():
        assert torch.equal(value, resumed.drafter.state_dict()[name]), name


def test_rows_of_the_markov_head_outside_the_draft_vocabulary_stay_as_they_are(
    folders: tuple[Path, Path], data: Path
) -> None:
    trainer = new_trainer(folders, data)
    rows = trainer.drafter.markov_head["markov_w2"].weight
    before = rows.detach().clone()
    trainer.step(next(source_of(data).batches(seed=0)))
    is_changed = (rows != before).any(dim=-1)
    assert is_changed.nonzero().flatten().tolist() == trainer.draft_vocab.tolist()


def test_the_reading_pass_gives_the_targets_taps_and_distribution(folders: tuple[Path, Path], data: Path) -> None:
    checkpoint = read_target(str(folders[0]))
    drafter = read_drafter(str(folders[1]), checkpoint)
    limits = EngineLimits(max_requests=1, max_seq_len=128, max_batch_tokens=128)
    engine, _ = open_reference_engines(checkpoint, drafter, limits=limits)
    answer = load_answers(data / "answers-00000.safetensors")[0]
    length = len(answer.ids)
    output = engine.forward(
        TargetBatch(
            token_ids=answer.ids.long().numpy(),
            rows=np.array([0]),
            past_lengths=np.array([0]),
            query_lengths=np.array([length]),
            num_decode=0,
            logit_rows=np.arange(length),
        )
    )
    np.testing.assert_allclose(answer.taps.float().numpy(), output.taps, atol=2e-2, rtol=1e-2)  # stored in bfloat16
    head = target_embedding(checkpoint)
    logits = (answer.hidden @ head.T).numpy()
    np.testing.assert_allclose(logits, output.logits, atol=1e-3)
    np.testing.assert_allclose(answer.log_sum_exp.numpy(), torch.from_numpy(output.logits).logsumexp(-1), atol=1e-3)


@pytest.mark.parametrize("num_slots", [3, 7])
def test_the_trained_module_drafts_what_the_reference_engine_drafts(
    folders: tuple[Path, Path], tmp_path: Path, num_slots: int
) -> None:
    checkpoint = read_target(str(folders[0]))
    spec = read_drafter(str(write_drafter(tmp_path, folders[0], taps=(1, 2), gamma=num_slots)), checkpoint)
    limits = EngineLimits(max_requests=1, max_seq_len=64, max_batch_tokens=64)
    _, engine = open_reference_engines(checkpoint, spec, limits=limits)
    random, past, anchor = np.random.default_rng(0), 9, 17
    taps = random.standard_normal((past, 64), dtype=np.float32)
    engine.ingest(IngestBatch(taps, np.array([0]), np.array([0]), np.array([past])))
    uniforms = np.zeros((1, num_slots), np.float32)
    wanted = engine.draft(
        DraftBatch(np.array([0]), np.array([anchor]), np.array([past]), np.zeros(1, np.float32), uniforms)
    )
    module = load_drafter(spec, target_embedding(checkpoint)).eval()
    vocabulary = torch.arange(VOCABULARY)
    block = BlockInput(
        slot_ids=torch.tensor([[anchor] + [spec.spec.mask_token_id] * (num_slots - 1)]),
        slot_positions=past + torch.arange(num_slots)[None],
        taps=torch.from_numpy(taps)[None],
        is_visible=torch.ones(1, 1, num_slots, past + num_slots, dtype=torch.bool),
    )
    with torch.inference_mode():
        hidden, previous = module.hidden(block)[0], torch.tensor(anchor)
        for slot in range(num_slots):
            embedding = module.markov_embedding(previous)
            confidence = module.confidence_logits(hidden[slot], embedding)
            assert confidence.item() == pytest.approx(float(wanted.confidence_logits[0, slot]), abs=1e-3)
            previous = module.logits(hidden[slot], embedding, vocabulary).argmax()
            assert int(previous) == int(wanted.draft_ids[0, slot])


def test_greedy_answers_are_the_targets_most_likely_tokens(folders: tuple[Path, Path]) -> None:
    target = Target(read_target(str(folders[0])), torch.float32, "cpu")
    steps: list[None] = []
    prompts = [[5, 6, 7, 8, 9], [11, 12]]  # of different length: padded on the left
    written = target.write(prompts, Sampling(max_new_tokens=12, temperature=0.0), lambda: steps.append(None))
    assert len(steps) >= 1
    for prompt, sequence in zip(prompts, written, strict=True):
        read = target.read(sequence, len(prompt), (1,))
        best = (read.hidden @ target.embedding.T).argmax(dim=-1)
        assert best[len(prompt) - 1 : -1].tolist() == sequence[len(prompt) :]


def test_prompts_are_split_by_their_text_and_unseen_sources_never_train(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [
        json.dumps({"prompt": f"question\u2028{at}", "source": "ab"[at % 2]}, ensure_ascii=False) for at in range(400)
    ]
    file.write_text("\n".join([*lines, "", lines[0]]), encoding="utf-8")
    prompts = read_prompts([file])
    assert len(prompts) == 400
    train = training_prompts(prompts, ["b"])
    assert {prompt.source for prompt in train} == {"a"}
    assert not any(prompt.is_held_out for prompt in train)
    assert 5 <= sum(prompt.is_held_out for prompt in prompts) <= 40
    assert Prompt("elsewhere", prompts[3].text).is_held_out == prompts[3].is_held_out


def test_a_file_that_names_its_own_split_is_believed(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": f"question {at}", "kind": "maths", "split": "held_out"}) for at in range(9)]
    file.write_text("\n".join([*lines, json.dumps({"prompt": "last", "kind": "maths", "split": "fit"})]))
    prompts = read_prompts([file])
    assert {prompt.source for prompt in prompts} == {"maths"}
    assert [prompt.is_held_out for prompt in prompts] == [True] * 9 + [False]


@pytest.mark.parametrize("line", ["{", "[1]", '{"source": "a"}', '{"prompt": 3}'])
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "fine"}}\n{line}\n')
    with pytest.raises(RequestError, match=r"prompts\.jsonl:2: expected an object"):
        read_prompts([file])


def source_of(data: Path) -> Source:
    return Source(data, SETTINGS, mask_id=VOCABULARY - 1)


def new_trainer(folders: tuple[Path, Path], data: Path, draft_vocab: torch.Tensor | None = None) -> Trainer:
    torch.set_num_threads(1)
    checkpoint = read_target(str(folders[0]))
    drafter = load_drafter(read_drafter(str(folders[1]), checkpoint), target_embedding(checkpoint))
    return Trainer(drafter, torch.arange(0, VOCABULARY, 2) if draft_vocab is None else draft_vocab, SETTINGS)


SETTINGS = Settings(1e-3, seconds=60, answers_per_step=2, slots_per_answer=14, is_bfloat16=False)

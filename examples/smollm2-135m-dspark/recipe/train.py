"""Second script: train the drafter on stored answers. Run again, it goes on where it was; new shards are noticed.

python -m recipe.train --target MODEL.gguf --start DRAFTER --data DATA --output RUN --minutes 60
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dspark_trt.checkpoints.drafter import read_drafter
from dspark_trt.checkpoints.target import read_target
from dspark_trt.errors import RequestError
from recipe.answer import Answer, load_new_shards
from recipe.batches import Batch, draw_anchors, groups_by_length, make_batch
from recipe.draft_vocab import column_of_id, most_written_ids
from recipe.drafter import Drafter, load_drafter, target_embedding
from recipe.losses import Losses, drafter_losses
from recipe.pausing import wait_while_exists
from recipe.saved import Progress, load_state, save_drafter, save_state
from recipe.script import run_script

_SLOT_COUNTS, _SLOT_SHARES = (2, 3, 4, 7), (2, 4, 3, 2)  # blocks as they will be used: short, now and then the full one
_WARM_UP_STEPS, _FINAL_RATE = 30, 0.03
_AVERAGED_STEPS = 50


@dataclass(frozen=True)
class Settings:
    learning_rate: float
    seconds: float  # of training, pauses left out; the learning rate falls to its end over them
    answers_per_step: int
    slots_per_answer: int  # A * n of a step, whatever the number of slots n
    is_bfloat16: bool


class Trainer:
    """A drafter, its optimizer and how far they are."""

    def __init__(self, drafter: Drafter, draft_vocab: torch.Tensor, settings: Settings) -> None:
        """`draft_vocab`: [C] ascending ids."""
        self.drafter, self.draft_vocab, self.settings = drafter, draft_vocab, settings
        self.progress = Progress()
        # No weight decay: rows of the Markov head that no batch touches stay as they are.
        self._optimizer = torch.optim.AdamW(
            drafter.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )

    def restore(self, folder: Path) -> None:
        """Go on where `save` was called last; do nothing where it never was."""
        saved = load_state(folder, self.drafter, self._optimizer, str(self.draft_vocab.device))
        if saved is not None:
            self.progress, self.draft_vocab = saved

    def save(self, folder: Path, config: Path) -> None:
        """The drafter in `folder`/drafter, with the configuration at `config`, and the state to go on from."""
        save_drafter(self.drafter, config, folder / "drafter")
        save_state(folder, self.drafter, self._optimizer, self.progress, self.draft_vocab)

    def step(self, batch: Batch) -> Losses:
        """One update of the weights."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self.settings, self.progress)
        losses = self.losses(batch)
        self._optimizer.zero_grad()
        losses.total.backward()
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), 1.0)
        self._optimizer.step()
        self.progress.step += 1
        return losses

    def losses(self, batch: Batch) -> Losses:
        drafter, blocks = self.drafter, batch.labels.shape
        with torch.autocast(batch.labels.device.type, torch.bfloat16, enabled=self.settings.is_bfloat16):
            taps = batch.block.taps.to(torch.bfloat16 if self.settings.is_bfloat16 else torch.float32)
            hidden = drafter.hidden(replace(batch.block, taps=taps)).view(*blocks, -1)
            previous = drafter.markov_embedding(batch.previous_ids)
            draft_logits = drafter.logits(hidden, previous, self.draft_vocab)
            confidence_logits = drafter.confidence_logits(hidden, previous)
            with torch.no_grad():
                target_logits = batch.target_hidden @ drafter.embedding[self.draft_vocab].T
        columns = column_of_id(self.draft_vocab, len(drafter.embedding))[batch.labels]
        return drafter_losses(draft_logits, target_logits, batch.target_log_sum_exp, columns, confidence_logits)


def learning_rate(settings: Settings, progress: Progress) -> float:
    """A short rise, then half a cosine over the active time."""
    done = min(1.0, progress.active_seconds / settings.seconds)
    cosine = 0.5 * (1 + math.cos(math.pi * done))
    rise = min(1.0, (progress.step + 1) / _WARM_UP_STEPS)
    return settings.learning_rate * rise * (_FINAL_RATE + (1 - _FINAL_RATE) * cosine)


class Source:
    """Batches without end, from the shards of a folder."""

    def __init__(self, folder: Path, settings: Settings, mask_id: int) -> None:
        """Raises RequestError when there are too few answers for a batch."""
        self.answers: list[Answer] = []
        self._folder, self._settings, self._mask_id = folder, settings, mask_id
        self._seen: set[Path] = set()
        self.read_new_shards()
        if len(self.answers) < settings.answers_per_step:
            raise RequestError(
                f"{folder}: {len(self.answers)} answers with anchors enough, fewer than the "
                f"{settings.answers_per_step} of a "
                "step; write more with recipe.write_answers"
            )

    def read_new_shards(self) -> None:
        usable = (
            answer
            for answer in load_new_shards(self._folder, self._seen)
            if len(answer.anchors(max(_SLOT_COUNTS))) >= 8
        )
        self.answers.extend(usable)

    def batches(self, seed: int) -> Iterator[Batch]:
        """New shards are read at the start of every pass."""
        order, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        while True:
            self.read_new_shards()
            for group in groups_by_length(self.answers, self._settings.answers_per_step, order):
                num_slots = order.choices(_SLOT_COUNTS, _SLOT_SHARES)[0]
                num_blocks = self._settings.slots_per_answer // num_slots
                anchors = [draw_anchors(answer, num_blocks, num_slots, generator) for answer in group]
                yield make_batch(group, anchors, num_slots, self._mask_id)


class Curve:
    """Acceptance by slot, averaged over the latest steps."""

    def __init__(self) -> None:
        self._latest: list[deque[float]] = [deque(maxlen=_AVERAGED_STEPS) for _ in range(max(_SLOT_COUNTS))]

    def add(self, losses: Losses) -> None:
        for slot, value in zip(self._latest, losses.acceptance.flatten(0, -2).mean(0).tolist(), strict=False):
            slot.append(value)

    def now(self) -> list[float]:
        return [round(sum(slot) / len(slot), 4) for slot in self._latest if slot]


def run(trainer: Trainer, batches: Iterator[Batch], options: argparse.Namespace) -> None:
    """Train until the time is over, saving now and then. Time spent waiting does not count."""
    curve, progress = Curve(), trainer.progress
    saved_at = progress.active_seconds
    while progress.active_seconds < trainer.settings.seconds:
        wait_while_exists(options.pause_file)
        start = time.monotonic()
        losses = trainer.step(next(batches).to(options.device))
        progress.active_seconds += time.monotonic() - start
        curve.add(losses)
        if progress.step % 20 == 0:
            progress.curve.append((progress.step, round(progress.active_seconds), curve.now()))
            print(
                f"step {progress.step}, {progress.active_seconds:.0f} s, loss {losses.total.item():.3f}, "
                f"acceptance by slot {curve.now()}",
                flush=True,
            )
        if progress.active_seconds - saved_at > options.save_every_seconds:
            trainer.save(options.output, options.start / "config.json")
            saved_at = progress.active_seconds


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    torch.set_num_threads(options.threads)
    settings = Settings(
        options.learning_rate,
        options.minutes * 60,
        options.answers_per_step,
        options.slots_per_answer,
        options.bfloat16,
    )
    target = read_target(options.target)
    checkpoint = read_drafter(str(options.start), target)
    drafter = load_drafter(checkpoint, target_embedding(target)).to(options.device)
    source = Source(options.data, settings, checkpoint.spec.mask_token_id)
    draft_vocab = most_written_ids(source.answers, target.spec.decoder.vocab_size, options.draft_vocab)
    trainer = Trainer(drafter, draft_vocab.to(options.device), settings)
    trainer.restore(options.output)
    run(trainer, source.batches(seed=trainer.progress.step), options)
    trainer.save(options.output, options.start / "config.json")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="the target: folder, .gguf file or hub id")
    parser.add_argument("--start", type=Path, required=True, help="folder of the drafter whose weights are trained on")
    parser.add_argument("--data", type=Path, required=True, help="folder of the shards of recipe.write_answers")
    parser.add_argument("--output", type=Path, required=True, help="folder of this run")
    parser.add_argument("--minutes", type=float, required=True, help="of training in all, resumed runs included")
    parser.add_argument("--draft-vocab", type=int, default=8192, help="ids that the loss looks at")
    parser.add_argument("--learning-rate", type=float, default=8e-4)
    parser.add_argument("--answers-per-step", type=int, default=8)
    parser.add_argument("--slots-per-answer", type=int, default=192, help="drafts per answer and step")
    parser.add_argument("--bfloat16", action="store_true", help="products in bfloat16, where the machine has it")
    parser.add_argument("--save-every-seconds", type=float, default=180)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pause-file", type=Path, help="wait while this file exists")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_script(main)

"""Third script: greedy acceptance of drafters on the target's own greedy answers to prompts that training did not see.

    python -m recipe.evaluate --target MODEL.gguf --drafters OLD NEW --prompts PROMPTS.jsonl --cache FOLDER

Drafts are compared with the answer itself, which is what greedy decoding would commit, so no decoding loop is needed:
from an anchor with k accepted drafts the next anchor is k + 1 further. All drafters see the same answers in the same
run.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dspark_trt.checkpoints.drafter import read_drafter
from dspark_trt.checkpoints.target import read_target
from recipe.answer import Answer, load_answers, save_answers
from recipe.batches import make_batch
from recipe.drafter import Drafter, load_drafter, target_embedding
from recipe.pausing import wait_while_exists
from recipe.prompts import Prompt, encode, open_codec, read_prompts
from recipe.script import run_script
from recipe.target import Sampling, Target

_ANCHORS_AT_ONCE = 64


@dataclass(frozen=True)
class Acceptance:
    """Of one answer: over the anchors that decoding visits, and over all anchors (less variance)."""

    visited: torch.Tensor  # [visits] accepted drafts
    everywhere: torch.Tensor  # [anchors] accepted drafts


@torch.inference_mode()
def accepted_drafts(drafter: Drafter, answer: Answer, num_slots: int, draft_vocab: torch.Tensor) -> torch.Tensor:
    """[anchors]: how many greedy drafts of the block at each anchor equal the answer, up to the first that does not."""
    anchors = torch.tensor(answer.anchors(num_slots))
    counts = []
    for starts in anchors.split(_ANCHORS_AT_ONCE):
        batch = make_batch([answer], [starts], num_slots, drafter.spec.mask_token_id)
        block = type(batch.block)(**{**vars(batch.block), "taps": batch.block.taps.float()})
        hidden = drafter.hidden(block).view(len(starts), num_slots, -1)
        previous, is_right = batch.previous_ids[0, :, 0], []
        for slot in range(num_slots):
            logits = drafter.logits(hidden[:, slot], drafter.markov_embedding(previous), draft_vocab)
            previous = draft_vocab[logits.argmax(dim=-1)]
            is_right.append(previous == batch.labels[0, :, slot])
        counts.append(torch.stack(is_right, dim=-1).long().cumprod(dim=-1).sum(dim=-1))
    return torch.cat(counts)


def acceptance(drafter: Drafter, answer: Answer, num_slots: int, draft_vocab: torch.Tensor) -> Acceptance:
    everywhere = accepted_drafts(drafter, answer, num_slots, draft_vocab)
    visited, at = [], 0
    while at < len(everywhere):
        visited.append(int(everywhere[at]))
        at += visited[-1] + 1
    return Acceptance(torch.tensor(visited), everywhere)


def survival(accepted: torch.Tensor, num_slots: int) -> list[float]:
    """Share of blocks whose drafts 1 ... j are all accepted, for j = 1 ... num_slots."""
    return [(accepted >= slot).double().mean().item() for slot in range(1, num_slots + 1)]


def accepted_len(results: Sequence[torch.Tensor]) -> float:
    """Mean tokens per verification, the bonus included."""
    return 1 + torch.cat(list(results)).double().mean().item()


def interval_of_difference(old: Sequence[torch.Tensor], new: Sequence[torch.Tensor], draws: int = 1000) -> list[float]:
    """95 % bootstrap interval, by answer, of how much `accepted_len` grew."""
    order = random.Random(0)
    differences = []
    for _ in range(draws):
        chosen = order.choices(range(len(old)), k=len(old))
        differences.append(accepted_len([new[at] for at in chosen]) - accepted_len([old[at] for at in chosen]))
    differences.sort()
    return [differences[int(0.025 * draws)], differences[int(0.975 * draws)]]


def greedy_answers(
    options: argparse.Namespace, target: Target, prompts: Sequence[list[int]], tap_layers: Sequence[int]
) -> list[Answer]:
    """Written and read in float32; kept in the folder `cache` for the next run with the same target and prompts."""
    key = repr((options.target, options.max_new_tokens, tuple(tap_layers), prompts))
    path = options.cache / f"evaluation-{hashlib.sha256(key.encode()).hexdigest()[:16]}.safetensors"
    if not path.exists():
        sequences = target.write(
            prompts, Sampling(options.max_new_tokens, 0.0), lambda: wait_while_exists(options.pause_file)
        )
        pairs = zip(prompts, sequences, strict=True)
        options.cache.mkdir(parents=True, exist_ok=True)
        save_answers([target.read(sequence, len(prompt), tap_layers) for prompt, sequence in pairs], path)
    return load_answers(path)


def held_out(prompts: Sequence[Prompt], unseen_sources: Sequence[str]) -> dict[str, list[Prompt]]:
    """By source; sources that training never sees count whole."""
    by_source: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        if prompt.is_held_out or prompt.source in unseen_sources:
            by_source.setdefault(prompt.source, []).append(prompt)
    return by_source


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    torch.set_num_threads(options.threads)
    checkpoint = read_target(options.target)
    embedding = target_embedding(checkpoint)
    read = [read_drafter(str(folder), checkpoint) for folder in options.drafters]
    drafters = [load_drafter(drafter, embedding).eval() for drafter in read]
    target = Target(checkpoint, torch.float32, "cpu")
    codec = open_codec(options.target)
    for source, prompts in held_out(read_prompts(options.prompts), options.unseen_source).items():
        wait_while_exists(options.pause_file)
        encoded = encode(codec, prompts, options.max_prompt_tokens)[: options.per_source]
        if not encoded:
            print(f"{source}: every prompt is longer than {options.max_prompt_tokens} tokens", file=sys.stderr)
            continue
        answers = greedy_answers(options, target, encoded, read[0].spec.target_layer_ids)
        for size, num_slots in itertools.product(options.draft_vocab or [len(embedding)], options.slots):
            draft_vocab = torch.arange(min(size, len(embedding)))
            usable = [answer for answer in answers if len(answer.anchors(num_slots))]
            results = [
                [acceptance(drafter, answer, num_slots, draft_vocab) for answer in usable] for drafter in drafters
            ]
            print(json.dumps(_row(source, size, num_slots, results)), flush=True)


def _row(source: str, draft_vocab: int, num_slots: int, results: Sequence[Sequence[Acceptance]]) -> dict[str, object]:
    visited = [[result.visited for result in drafter] for drafter in results]
    everywhere = [[result.everywhere for result in drafter] for drafter in results]
    return {
        "source": source,
        "draft_vocab": draft_vocab,
        "slots": num_slots,
        "answers": len(results[0]),
        "anchors": sum(map(len, everywhere[0])),
        "accepted_len": [round(accepted_len(drafter), 3) for drafter in visited],
        "accepted_len_everywhere": [round(accepted_len(drafter), 3) for drafter in everywhere],
        "gain_everywhere_95": [round(end, 3) for end in interval_of_difference(everywhere[0], everywhere[-1])],
        "survival": [[round(share, 3) for share in survival(torch.cat(drafter), num_slots)] for drafter in everywhere],
    }


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="the target: folder, .gguf file or hub id")
    parser.add_argument("--drafters", type=Path, nargs="+", required=True, help="folders; gains are last against first")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, help="JSON lines with prompt and source")
    parser.add_argument("--unseen-source", nargs="*", default=[], help="sources that training never sees")
    parser.add_argument("--per-source", type=int, default=24, help="prompts of each source at most")
    parser.add_argument("--slots", type=int, nargs="+", default=[2, 3, 7], help="drafts per block")
    parser.add_argument("--draft-vocab", type=int, nargs="*", help="draft from the ids below these; all by default")
    parser.add_argument("--max-prompt-tokens", type=int, default=320)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--cache", type=Path, required=True, help="folder that keeps the answers")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pause-file", type=Path, help="wait while this file exists")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_script(main)

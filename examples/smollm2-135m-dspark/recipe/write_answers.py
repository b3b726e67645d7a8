"""First script: let the target answer the prompts, and keep what training needs. Run again, it adds further shards.

python -m recipe.write_answers --target MODEL.gguf --prompts PROMPTS.jsonl --output DATA --shards 20
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from dspark_trt.checkpoints.target import read_target
from dspark_trt.errors import RequestError
from recipe.answer import save_answers
from recipe.pausing import wait_while_exists
from recipe.prompts import encode, open_codec, read_prompts, training_prompts
from recipe.script import run_script
from recipe.target import Sampling, Target

_TEMPERATURES = (0.0, 0.3, 0.6, 0.8)  # most requests are greedy or mild
_MIN_NEW_TOKENS = 16  # a shorter answer has hardly an anchor


def shard_prompts(prompts: Sequence[list[int]], shard: int, count: int) -> list[list[int]]:
    """The prompts of a shard: the list in another order in every pass through it."""
    chosen = []
    for draw in range(shard * count, (shard + 1) * count):
        visit, at = divmod(draw, len(prompts))
        order = random.Random(visit).sample(range(len(prompts)), len(prompts))
        chosen.append(prompts[order[at]])
    return chosen


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    torch.set_num_threads(options.threads)
    options.output.mkdir(parents=True, exist_ok=True)
    checkpoint, codec = read_target(options.target), open_codec(options.target)
    writer = Target(checkpoint, torch.bfloat16 if options.bfloat16 else torch.float32, options.device)
    reader = Target(checkpoint, torch.float32, options.device) if options.bfloat16 else writer
    chosen = training_prompts(read_prompts(options.prompts), options.unseen_source)
    prompts = encode(codec, chosen, options.max_prompt_tokens)
    if not prompts:
        raise RequestError(
            f"{len(chosen)} prompts may be trained on, and none has {options.max_prompt_tokens} tokens or fewer; "
            f"give more "
            "--prompts"
        )
    for shard in range(options.first_shard, options.first_shard + options.shards):
        path = options.output / f"answers-{shard:05d}.safetensors"
        if path.exists():
            continue
        wait_while_exists(options.pause_file)
        start = time.monotonic()
        torch.manual_seed(shard)
        encoded = shard_prompts(prompts, shard, options.batch)
        sampling = Sampling(options.max_new_tokens, _TEMPERATURES[shard % len(_TEMPERATURES)])
        sequences = writer.write(encoded, sampling, lambda: wait_while_exists(options.pause_file))
        middle = time.monotonic()
        wait_while_exists(options.pause_file)
        answers = [
            reader.read(sequence, len(prompt), options.tap_layers)
            for prompt, sequence in zip(encoded, sequences, strict=True)
            if len(sequence) - len(prompt) >= _MIN_NEW_TOKENS
        ]
        save_answers(answers, path)
        new = sum(len(answer.ids) - answer.num_prompt_tokens for answer in answers)
        print(
            f"{path.name}: {len(answers)} answers, {new} tokens, {middle - start:.0f} s writing, "
            f"{time.monotonic() - middle:.0f} s reading",
            flush=True,
        )


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="the target: folder, .gguf file or hub id")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, help="JSON lines with prompt and source")
    parser.add_argument("--unseen-source", nargs="*", default=[], help="sources that training never sees")
    parser.add_argument(
        "--tap-layers", type=int, nargs="+", default=[1, 8, 15, 22, 27], help="target_layer_ids of the drafter"
    )
    parser.add_argument("--output", type=Path, required=True, help="folder of the shards")
    parser.add_argument("--shards", type=int, default=20, help="how many there shall be")
    parser.add_argument(
        "--first-shard", type=int, default=0, help="another range for every process that writes at once"
    )
    parser.add_argument("--batch", type=int, default=64, help="prompts of a shard")
    parser.add_argument("--max-prompt-tokens", type=int, default=224)
    parser.add_argument("--max-new-tokens", type=int, default=224)
    parser.add_argument("--bfloat16", action="store_true", help="write in bfloat16; reading stays float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pause-file", type=Path, help="wait while this file exists")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_script(main)

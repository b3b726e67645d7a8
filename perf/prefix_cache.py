"""Time to the first token behind a shared system prompt, with the prefix cache and without it.

    python perf/prefix_cache.py build/smollm2 [--tokens 500] [--requests 6] [--together 8] [--repeats 3]

One after the other, requests of one system prompt and unlike questions; then as many at once. Each setting begins with
a loop of its own, with and without the cache in turn. Greedy, and the answers have to be the same. The first request of
a loop finds an empty cache: it is not counted where they come one after the other, and counted where they come at once.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dspark_trt.contract.scheduler import parse_scheduler
from dspark_trt.deployment import Deployment, load_deployment
from dspark_trt.runtime.loop import DecodingLoop
from dspark_trt.runtime.request import GenerationRequest, SamplingParams

RULES = (
    "You are the assistant of a public library. Answer briefly and politely.",
    "Name the shelf where a book stands when you know it, and say so when you do not.",
    "Loans last three weeks and can be renewed twice, unless somebody waits for the book.",
    "Children under twelve borrow with the card of a parent, and return by the green box.",
    "The reading room opens at nine, closes at eight, and stays shut on public holidays.",
    "Never guess opening hours of other branches; give their telephone number instead.",
)
TOPICS = ("tides", "bridges", "bread", "comets", "chess", "moths", "maps", "glass", "salt", "clocks", "rivers", "kites")
NUM_ANSWER_TOKENS = 8


def prompts_of(deployment: Deployment, num_tokens: int, count: int) -> list[tuple[int, ...]]:
    """Chats of one system prompt of about so many tokens, each with a question of its own."""
    sentences: list[str] = []
    while len(deployment.codec.encode(" ".join(sentences))) < num_tokens:
        sentences.append(RULES[len(sentences) % len(RULES)])
    system = {"role": "system", "content": " ".join(sentences)}
    questions = [f"Where are the books about {TOPICS[at % len(TOPICS)]}, part {at}?" for at in range(count)]
    return [
        tuple(deployment.codec.encode_chat([system, {"role": "user", "content": question}])) for question in questions
    ]


def answer(loop: DecodingLoop, prompts: Sequence[tuple[int, ...]]) -> tuple[list[float], list[list[int]]]:
    """Milliseconds to the first token, and the tokens, of prompts that arrive together."""
    tokens: dict[str, list[int]] = {}
    first_ms: dict[str, float] = {}
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=NUM_ANSWER_TOKENS, ignore_eos=True)
        loop.submit(GenerationRequest(request_id=str(index), prompt_ids=prompt, sampling=sampling))
        tokens[str(index)] = []
    while loop.has_work:
        for emission in loop.step():
            tokens[emission.request_id] += emission.token_ids
            if emission.statistics is not None:
                first_ms[emission.request_id] = emission.statistics.first_token_ms
    return [first_ms[name] for name in tokens], list(tokens.values())


def measure(deployment: Deployment, options: argparse.Namespace) -> dict[str, Any]:
    prompts = prompts_of(deployment, options.tokens, max(options.requests + 1, options.together))
    times: dict[str, list[float]] = {}
    answers: dict[bool, list[list[int]]] = {True: [], False: []}
    for repeat in range(options.repeats):
        for cache in (True, False) if repeat % 2 else (False, True):
            name = "with" if cache else "without"
            loop = deployment.make_loop(parse_scheduler(options.scheduler), prefix_cache=cache)
            for index, prompt in enumerate(prompts[: options.requests + 1]):
                (first_ms,), (tokens,) = answer(loop, [prompt])
                answers[cache].append(tokens)
                if index:
                    times.setdefault(f"one after the other, {name}", []).append(first_ms)
            loop = deployment.make_loop(parse_scheduler(options.scheduler), prefix_cache=cache)
            together, several = answer(loop, prompts[: options.together])
            times.setdefault(f"{options.together} at once, {name}", []).extend(together)
            answers[cache] += several
    pairs = zip(answers[True], answers[False], strict=True)
    return {
        "num_prompt_tokens": len(prompts[0]),
        "num_answers": len(answers[True]),
        "num_equal_answers": sum(first == second for first, second in pairs),
        "median_first_token_ms": {name: round(statistics.median(values), 1) for name, values in times.items()},
        "worst_first_token_ms": {name: round(max(values), 1) for name, values in times.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Time to the first token behind a shared system prompt.")
    parser.add_argument("build", type=Path)
    parser.add_argument("--tokens", type=int, default=500, help="of the system prompt, about")
    parser.add_argument("--requests", type=int, default=6, help="one after the other, in each repeat")
    parser.add_argument("--together", type=int, default=8, help="at once")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--scheduler", default="auto")
    options = parser.parse_args()
    print(json.dumps(measure(load_deployment(options.build), options), indent=1))


if __name__ == "__main__":
    main()

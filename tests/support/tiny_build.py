"""A pair of a few thousand parameters, built for real: its server starts in seconds."""

from __future__ import annotations

import json
from pathlib import Path

from dspark_trt.building.build import build
from dspark_trt.building.recipe import BuildRecipe
from tests.support.factories import write_drafter, write_target

MAX_REQUESTS, MAX_SEQ_LEN, GAMMA = 4, 8192, 5


def make_tiny_build(folder: Path, max_seq_len: int = MAX_SEQ_LEN) -> Path:
    """Its calibration is given: to measure one on long rows takes most of a build, and tests/unit/building does."""
    target = write_target(folder / "target", vocab_size=320, head_dim=16, tokenizer=True, max_positions=MAX_SEQ_LEN)
    drafter = write_drafter(folder / "drafter", target, gamma=GAMMA)
    temperatures = folder / "temperatures.json"
    temperatures.write_text(json.dumps({"temperatures": [1.0] * GAMMA}))
    limits = {"max_requests": MAX_REQUESTS, "max_seq_len": max_seq_len, "max_batch_tokens": 64}
    recipe = BuildRecipe(
        target=str(target),
        drafter=str(drafter),
        calibration=temperatures,
        num_threads=1,
        draft_vocab="all",  # nothing to choose: choosing takes longer than the rest of the build
        drafter_precision="fp32",
        markov_top_n=0,
        lookup="off",  # random weights repeat themselves: requests that are meant to be long would soon be through
        **limits,
    )
    build(recipe, folder / "build")
    return folder / "build"


def make_ngram_build(folder: Path) -> Path:
    """A target alone, whose drafts are copied from each request's own text."""
    target = write_target(folder / "target", vocab_size=320, head_dim=16, tokenizer=True)
    limits = {"max_requests": 4, "max_seq_len": 96, "max_batch_tokens": 64}
    build(BuildRecipe(target=str(target), drafter="ngram", lookup_drafts=5, num_threads=1, **limits), folder / "build")
    return folder / "build"

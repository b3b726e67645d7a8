"""One tiny random build for all commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from dspark_trt.building.build import build
from dspark_trt.building.recipe import BuildRecipe
from tests.support.factories import write_drafter, write_target


@pytest.fixture(scope="session")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    target = write_target(folder / "target", vocab_size=320, head_dim=16, tokenizer=True)
    drafter = write_drafter(folder / "drafter", target)
    limits = {"max_requests": 4, "max_seq_len": 64, "max_batch_tokens": 64}
    build(BuildRecipe(target=str(target), drafter=str(drafter), **limits), folder / "out")
    return folder / "out"

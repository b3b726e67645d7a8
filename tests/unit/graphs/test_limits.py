"""Limits that leave no room for a block are refused before a graph is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from dspark_trt.checkpoints.target import read_target
from dspark_trt.contract.protocol import EngineLimits
from dspark_trt.errors import ExportError
from dspark_trt.graphs.limits import check_limits
from tests.support.factories import write_target


@pytest.mark.parametrize("gamma", [1, 5, 16])
def test_a_row_has_room_for_a_prompt_and_a_block(tmp_path: Path, gamma: int) -> None:
    decoder = read_target(str(write_target(tmp_path))).spec.decoder
    check_limits(EngineLimits(2, gamma + 3, 32), decoder, gamma=gamma, what="drafter")
    with pytest.raises(
        ExportError, match=rf"no room .* block of {gamma} drafts .* --max-seq-len to {gamma + 3} or more"
    ):
        check_limits(EngineLimits(2, gamma + 2, 32), decoder, gamma=gamma, what="drafter")

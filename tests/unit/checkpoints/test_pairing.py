"""Target and drafter that do not belong together are told apart, with the field and both values."""

from __future__ import annotations

from pathlib import Path

import pytest

from dspark_trt.checkpoints.drafter import read_drafter
from dspark_trt.checkpoints.pairing import check_pairing
from dspark_trt.checkpoints.target import read_target
from dspark_trt.errors import PairingError
from tests.support.factories import write_drafter, write_target


@pytest.mark.parametrize(
    ("of_target", "of_drafter", "message"),
    [
        ({"vocab_size": 97 + 64}, {}, "vocab_size: the target has 161, the drafter expects 97"),
        ({"vocab_size": 33}, {}, "vocab_size: the target has 33, the drafter expects 97"),
        ({"hidden": 64}, {}, "hidden_size: the target has 64, the drafter expects 32"),
        ({"layers": 5}, {}, "num_target_layers: the target has 5, the drafter expects 4"),
        (
            {"layers": 2},
            {"config_extra": {"num_target_layers": None}},
            r"target_layer_ids: .*\[0, 2\], but the target has layers 0 to 1 .*so 2 is not one",
        ),
        ({}, {"taps": (0, 4)}, r"layers \[0, 4\], but the target has layers 0 to 3"),
        ({}, {"taps": (-2, 1)}, "so -2 is not one"),
        ({}, {"mask_token_id": 97}, "mask_token_id: the drafter's is 97, but the target's vocabulary ends at 96"),
    ],
)
@pytest.mark.parametrize("embed_head", ["absent", "equal"])
def test_wrong_pair_is_refused_with_the_field_and_both_values(
    tmp_path: Path, of_target: dict, of_drafter: dict, message: str, embed_head: str
) -> None:
    trained_on = write_target(tmp_path / "trained_on")
    folder = write_drafter(tmp_path / "drafter", trained_on, embed_head=embed_head, **of_drafter)
    target = read_target(str(write_target(tmp_path / "target", **of_target)))
    drafter = read_drafter(str(folder), target)
    with pytest.raises(PairingError, match=message):
        check_pairing(target, drafter)


def test_mask_id_in_the_padding_rows_of_the_vocabulary_is_accepted(tmp_path: Path) -> None:
    target_folder = write_target(tmp_path / "target", family="qwen3")
    target = read_target(str(target_folder))
    check_pairing(target, read_drafter(str(write_drafter(tmp_path / "d", target_folder, mask_token_id=96)), target))

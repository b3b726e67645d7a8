"""Every trainer's form is read as that trainer's code means it, and what is ambiguous is refused by the key that
decides."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dspark_trt.checkpoints.drafter import read_drafter, read_drafter_spec
from dspark_trt.checkpoints.drafters.formats import read_description
from dspark_trt.checkpoints.pairing import check_pairing
from dspark_trt.checkpoints.spec import PLAIN_ATTENTION, BlockAttention, TargetCheckpoint
from dspark_trt.checkpoints.spec_json import drafter_spec_from_json, spec_to_json
from dspark_trt.checkpoints.target import read_target
from dspark_trt.errors import CheckpointError
from tests.support.drafter_dialects import DRAFT_IDS, write_dialect
from tests.support.factories import write_target

FULL, SLIDING = "full_attention", "sliding_attention"
MIXED = ((FULL, SLIDING, SLIDING), 8)
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 32.0, "original_max_position_embeddings": 64}

# (dialect, how it is written, what it means: gamma, mask first, taps, whether the last tap is normed, attention)
FACTS: dict[str, tuple[str, dict[str, Any], tuple[Any, ...]]] = {
    "deepspec": ("deepspec", {}, (5, False, (0, 2), True, ())),
    "deepspec dflash": ("deepspec-dflash", {}, (5, False, (0, 2), True, ())),
    "deepspec said mask first": ("deepspec", {"extra": {"sample_from_anchor": False}}, (4, True, (0, 2), True, ())),
    "deepspec bonus anchor": ("deepspec", {"extra": {"dspark_bonus_anchor": True}}, (4, True, (0, 2), True, ())),
    "nemotron": (
        "nemotron",
        {"block_size": 8},
        (7, True, (0, 2), True, (BlockAttention(True, 8, has_sink=True),) * 3),
    ),
    "z-lab with sinks": (
        "z-lab",
        {"sinks": True, "sliding": MIXED, "extra": {"dflash_config": {"attention_sink_bias": True}}},
        (
            4,
            True,
            (0, 2),
            True,
            (
                BlockAttention(has_sink=True),
                BlockAttention(True, 8, has_sink=True),
                BlockAttention(True, 8, has_sink=True),
            ),
        ),
    ),
    "nemo dspark": ("nemo-dspark", {"layer_ids": (-1, 3)}, (5, False, (-1, 3), True, ())),
    "z-lab": ("z-lab", {"block_size": 16, "layer_ids": (1, 3)}, (15, True, (1, 3), True, ())),
    "z-lab shifted labels": (
        "z-lab",
        {"extra": {"dflash_config": {"shift_label": True}}},
        (5, False, (0, 2), True, ()),
    ),
    "z-lab sliding": (
        "z-lab",
        {"sliding": MIXED},
        (4, True, (0, 2), True, (PLAIN_ATTENTION, BlockAttention(True, 8), BlockAttention(True, 8))),
    ),
    "z-lab sliding, both ways": (
        "z-lab",
        {"sliding": MIXED, "extra": {"is_causal": False}},
        (4, True, (0, 2), True, (PLAIN_ATTENTION, BlockAttention(False, 8), BlockAttention(False, 8))),
    ),
    "z-lab causal": (
        "z-lab",
        {"extra": {"dflash_config": {"causal": True}}},
        (4, True, (0, 2), True, (BlockAttention(True),) * 3),
    ),
    "specforge": ("specforge", {"rope": YARN, "block_size": 7}, (7, False, (0, 2), True, ())),
    "specforge, first exports": ("specforge-nested", {}, (5, False, (0, 2), True, ())),
    "nemo dflash": ("nemo-dflash", {"layer_ids": (0, 3)}, (4, True, (0, 3), False, ())),
    "nemo dflash sliding": (
        "nemo-dflash",
        {"sliding": MIXED},
        (4, True, (0, 2), False, (PLAIN_ATTENTION, BlockAttention(False, 8), BlockAttention(False, 8))),
    ),
    "speculators": ("speculators", {"layer_ids": (0, 2, 4)}, (5, False, (-1, 1, 3), False, ())),
    "speculators, older than sample_from_anchor": (
        "speculators",
        {
            "layer_ids": (1, 3),
            "extra": {
                "sample_from_anchor": None,
                "speculators_config": {"proposal_methods": [{"speculative_tokens": 4}]},
            },
        },
        (4, True, (0, 2), False, ()),
    ),
    "speculators dflash": (
        "speculators-dflash",
        {"layer_ids": (1, 3), "extra": {"sample_from_anchor": False, "speculators_config": None}},
        (4, True, (0, 2), False, ()),
    ),
    "speculators sliding": (
        "speculators",
        {"layer_ids": (1, 3), "sliding": MIXED},
        (
            5,
            False,
            (0, 2),
            False,
            (PLAIN_ATTENTION, BlockAttention(True, 8, "anchor"), BlockAttention(True, 8, "anchor")),
        ),
    ),
    "speculators sliding, both ways": (
        "speculators",
        {"layer_ids": (1, 3), "sliding": ((SLIDING,) * 3, 4), "extra": {"sliding_window_non_causal": True}},
        (5, False, (0, 2), False, (BlockAttention(False, 4, "anchor"),) * 3),
    ),
}


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(target_folder: Path) -> TargetCheckpoint:
    return read_target(str(target_folder))


@pytest.mark.parametrize("case", FACTS)
def test_a_form_means_what_its_trainer_does(
    case: str, tmp_path: Path, target_folder: Path, target: TargetCheckpoint
) -> None:
    dialect, options, meaning = FACTS[case]
    folder = write_dialect(tmp_path / "drafter", target_folder, dialect, **options)
    drafter = read_drafter(str(folder), target)
    check_pairing(target, drafter)
    spec = drafter.spec
    found = (spec.gamma, spec.is_mask_first, spec.target_layer_ids, spec.is_last_tap_normed, spec.block_attention)
    assert found == meaning
    assert spec.mask_token_id == 96
    has_heads = "dflash" not in dialect and dialect != "z-lab"
    assert (spec.markov_rank, spec.has_confidence_head) == ((8, True) if has_heads else (0, False))
    assert spec.decoder.rope.rope_type == ("yarn" if "rope" in options else "default")
    without_weights = read_drafter_spec(str(folder), target.spec)
    assert without_weights.target_layer_ids == spec.target_layer_ids
    assert without_weights.gamma == spec.gamma
    assert drafter_spec_from_json(json.loads(json.dumps(spec_to_json(spec)))) == spec


def test_a_reduced_vocabulary_maps_draft_ids_to_target_ids(
    tmp_path: Path, target_folder: Path, target: TargetCheckpoint
) -> None:
    folder = write_dialect(tmp_path / "drafter", target_folder, "speculators", layer_ids=(1, 3), draft_ids=DRAFT_IDS)
    drafter = read_drafter(str(folder), target)
    assert drafter.draft_ids is not None
    np.testing.assert_array_equal(drafter.draft_ids, DRAFT_IDS)
    assert drafter.spec.draft_vocab_size == len(DRAFT_IDS)
    assert drafter.spec.has_own_head
    assert drafter.weights.info("markov_head.markov_w1.weight").shape == (97, 8)
    assert drafter.weights.info("markov_head.markov_w2.weight").shape == (len(DRAFT_IDS), 8)
    assert not {"d2t", "t2d"} & set(drafter.weights.names())


def test_a_whole_vocabulary_may_come_with_an_identical_map(
    tmp_path: Path, target_folder: Path, target: TargetCheckpoint
) -> None:
    folder = write_dialect(tmp_path / "drafter", target_folder, "speculators", layer_ids=(1, 3))
    edit(folder, d2t=np.zeros(97, np.int64), t2d=np.ones(97, np.bool_))
    assert read_drafter(str(folder), target).draft_ids is None


def edit(folder: Path, **tensors: Any) -> None:
    """Replace tensors; None removes one, `__` stands for a dot."""
    stored = load_file(folder / "model.safetensors") | {key.replace("__", "."): value for key, value in tensors.items()}
    save_file({key: value for key, value in stored.items() if value is not None}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d2t": None, "t2d": None}, "tensor d2t is missing"),
        ({"lm_head__weight": None}, "tensor lm_head.weight is missing, which has a row"),
        ({"d2t": DRAFT_IDS}, "d2t and t2d stand for different ids.*holds what to add"),
        ({"d2t": DRAFT_IDS, "t2d": None}, "not ascending within the vocabulary"),
        ({"d2t": np.zeros(9, np.int64), "t2d": None}, "draft_vocab_size = 14, but d2t has 9 ids"),
        ({"t2d": np.ones(90, np.bool_)}, "t2d has 90 entries, expected one for each of the 97"),
        ({"d2t": np.zeros(14, np.float32)}, "tensor d2t has .* element type float32"),
    ],
)
def test_a_wrong_map_of_the_vocabulary_is_refused(
    tmp_path: Path, target_folder: Path, target: TargetCheckpoint, changes: dict[str, Any], message: str
) -> None:
    folder = write_dialect(tmp_path / "drafter", target_folder, "speculators", layer_ids=(1, 3), draft_ids=DRAFT_IDS)
    edit(folder, **changes)
    with pytest.raises(CheckpointError, match=message):
        read_drafter(str(folder), target)


def test_copies_of_the_verifier_are_left_out(tmp_path: Path, target_folder: Path, target: TargetCheckpoint) -> None:
    folder = write_dialect(tmp_path / "drafter", target_folder, "speculators", layer_ids=(1, 3))
    edit(folder, verifier_norm__weight=np.ones(32, np.float32))
    assert "verifier_norm.weight" not in read_drafter(str(folder), target).weights.names()


@pytest.mark.parametrize(
    ("dialect", "options", "message"),
    [
        ("z-lab", {"extra": {"dflash_config": {"target_layer_ids": None}}}, "target_layer_ids is missing"),
        ("specforge", {"extra": {"dflash_config": {"target_layer_ids": None}}}, "target_layer_ids is missing"),
        ("nemo-dflash", {"extra": {"dflash_config": None}}, "is missing"),
        ("speculators", {"extra": {"aux_hidden_state_layer_ids": None}}, "aux_hidden_state_layer_ids is missing"),
        ("speculators", {"layer_ids": (3, 1)}, r"aux_hidden_state_layer_ids \[3, 1\] are not strictly increasing"),
        ("speculators", {"extra": {"draft_vocab_size": None}}, "draft_vocab_size is missing"),
        ("speculators", {"extra": {"draft_vocab_size": 128}}, "draft_vocab_size = 128 is more than vocab_size = 97"),
        ("speculators", {"extra": {"transformer_layer_config": None}}, "transformer_layer_config is missing"),
        ("speculators", {"extra": {"target_hidden_size": 64}}, "target_hidden_size = 64"),
        (
            "speculators",
            {"extra": {"sample_from_anchor": None}},
            r"speculative_tokens = 5, but block_size = 5 with sample_from_anchor = absent \(.*\) gives 4",
        ),
        ("speculators", {"extra": {"sample_from_anchor": False}}, "sample_from_anchor = false gives 4"),
        ("speculators", {"extra": {"dspark_bonus_anchor": True}}, "contradict each other"),
        ("speculators", {"extra": {"sample_from_anchor": "yes"}}, "expected true or false"),
        ("speculators", {"extra": {"mask_token_id": None}}, "mask_token_id is missing"),
        (
            "speculators",
            {"head_type": "rnn", "extra": {"sample_from_anchor": None, "speculators_config": None}},
            "markov_head_type is 'rnn' in a drafter that is mask first",
        ),
        ("z-lab", {"extra": {"dflash_config": {"conv_kernel_size": 2}}}, "conv_kernel_size = 2 is not implemented"),
        ("z-lab", {"extra": {"target_layer_ids": [1, 2]}}, "target_layer_ids is .* at the top level, but"),
        ("z-lab", {"extra": {"dflash_config": {"use_swa": True, "swa_window_size": 8}}}, "use_swa without causal"),
        ("z-lab", {"extra": {"dflash_config": {"use_swa": True, "causal": True}}}, "sliding_window has to be a number"),
        ("z-lab", {"extra": {"dflash_config": {"use_swa": 1}}}, "use_swa: expected true or false, found 1"),
        ("z-lab", {"extra": {"dflash_config": {"swa_window_size": 8}}}, "swa_window_size = 8 is not implemented"),
        (
            "z-lab",
            {"sliding": MIXED, "extra": {"dflash_config": {"use_swa": True, "swa_window_size": 9, "causal": True}}},
            r"swa_window_size = 9, but sliding_window = 8",
        ),
        (
            "z-lab",
            {"extra": {"dflash_config": {"attention_sink_bias": True}}},
            r"attention_sink_bias is true, but tensor layers\.0\.self_attn\.attention_sink_bias is missing",
        ),
        ("z-lab", {"sinks": True}, r"attention_sink_bias is false, but tensor layers\.0\.\S+ is there"),
        ("z-lab", {"extra": {"dflash_config": {"attention_value_scale": 0.6}}}, "attention_value_scale = 0.6 is not"),
        ("speculators", {"extra": {"attention_sink_bias": True}}, "attention_sink_bias = True is not implemented"),
        ("deepspec", {"extra": {"eagle_aux_hidden_state_layer_ids": [1, 3]}}, r"is not target_layer_ids \+ 1"),
        ("z-lab", {"block_size": 1}, "nothing is drafted"),
        ("z-lab", {"sliding": ((SLIDING,) * 3, 3)}, "sliding_window = 3 is less than block_size = 5"),
        ("z-lab", {"sliding": ((SLIDING,) * 2, 8)}, "layer_types: expected one entry for each of the 3 layers"),
        ("z-lab", {"sliding": (("chunked_attention",) * 3, 8)}, "chunked_attention"),
        ("z-lab", {"sliding": MIXED, "extra": {"sliding_window": None}}, "sliding_window has to be a number"),
        ("z-lab", {"sliding": MIXED, "extra": {"use_sliding_window": False}}, "use_sliding_window is not true"),
        ("z-lab", {"extra": {"is_causal": True, "dflash_config": {"causal": False}}}, "contradict each other"),
        ("specforge", {"extra": {"dflash_config": {"attention_mode": "mla"}}}, "attention_mode mla is not implemented"),
        ("deepspec", {"extra": {"dflash_config": {"causal": True}}}, "causal = true"),
        ("deepspec", {"extra": {"sample_from_anchor": True, "dspark_bonus_anchor": True}}, "contradict each other"),
    ],
)
def test_what_is_ambiguous_is_refused_with_the_key_that_decides(
    tmp_path: Path,
    target_folder: Path,
    target: TargetCheckpoint,
    dialect: str,
    options: dict[str, Any],
    message: str,
) -> None:
    folder = write_dialect(tmp_path / "drafter", target_folder, dialect, **({"layer_ids": (1, 3)} | options))
    with pytest.raises(CheckpointError, match=message):
        read_drafter(str(folder), target)


ODD_VALUES: tuple[Any, ...] = (None, [], {}, "x", -1, 1.5, True, 10**30, [None], [[]], {"x": []})


@pytest.mark.parametrize("dialect", ["deepspec", "z-lab", "specforge-nested", "nemo-dflash", "speculators"])
def test_odd_values_of_any_key_end_in_one_message(dialect: str, tmp_path: Path, target_folder: Path) -> None:
    folder = write_dialect(tmp_path, target_folder, dialect, layer_ids=(1, 3), sliding=MIXED)
    config = json.loads((folder / "config.json").read_text())
    more = ("is_causal", "causal", "attention_mode", "attention_modes", "sample_from_anchor", "runtime_block_size")
    config |= {key: config.get(key) for key in more}
    num_refused = 0
    for change in changes_of(config):
        try:
            spec_to_json(read_description(change, "config.json").spec)
        except CheckpointError:
            num_refused += 1
    assert num_refused > 100


def changes_of(values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """`values` with an odd value for one key, at any depth."""
    for key, value in values.items():
        for odd in ODD_VALUES:
            yield {**values, key: odd}
        if isinstance(value, dict):
            for changed in changes_of(value):
                yield {**values, key: changed}


def test_an_embedding_of_the_masks_own_is_refused(
    tmp_path: Path, target_folder: Path, target: TargetCheckpoint
) -> None:
    """Xiaomi's MiMo DFlash has one in a file that loaders of safetensors do not see."""
    folder = write_dialect(tmp_path / "drafter", target_folder, "z-lab")
    (folder / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"mask_embedding\.pt: .*MiMo DFlash.*not supported"):
        read_drafter(str(folder), target)

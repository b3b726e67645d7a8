"""GGUF targets: the same numbers as the Hugging Face checkpoint they were made from,
and as transformers' own loader."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from dspark_trt.checkpoints.rope import yarn_mscale
from dspark_trt.checkpoints.spec import RopeSpec
from dspark_trt.checkpoints.target import read_target
from dspark_trt.errors import CheckpointError
from tests.support.factories import write_target
from tests.support.gguf_factory import write_gguf
from tests.support.transformers_targets import write_by_transformers

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FORMS = {
    "llama": {},
    "llama_tied_biases": {"tied": True, "biases": True},
    "llama_wide_heads": {"head_dim": 32},
    "qwen3": {"family": "qwen3"},
    "qwen3_tied": {"family": "qwen3", "tied": True},
}


@pytest.mark.parametrize("form", FORMS)
def test_gguf_and_hugging_face_folder_read_the_same(tmp_path: Path, form: str) -> None:
    folder = write_target(tmp_path / "folder", **FORMS[form])
    expected = read_target(str(folder))
    found = read_target(str(write_gguf(tmp_path / "model.gguf", folder)))
    assert found.weights.names() == expected.weights.names()
    for name in expected.weights.names():
        np.testing.assert_array_equal(found.weights.array(name), expected.weights.array(name), err_msg=name)
        assert found.weights.info(name).shape == expected.weights.info(name).shape
    decoder, reference = found.spec.decoder, expected.spec.decoder
    assert decoder.rms_norm_eps == pytest.approx(reference.rms_norm_eps)
    for field in ("rope", "head_dim", "num_kv_heads", "has_qk_norm", "has_qkv_bias", "has_o_bias", "has_mlp_bias"):
        assert getattr(decoder, field) == getattr(reference, field)
    assert found.spec.is_head_tied == expected.spec.is_head_tied
    assert (found.spec.bos_token_id, found.spec.eos_token_ids) == (1, (2, 3))


@pytest.mark.parametrize(("family", "more"), [("qwen2", {}), ("qwen3_moe", EXPERTS | {"norm_topk_prob": True})])
def test_a_family_of_qwen_is_the_same_in_both_forms(tmp_path: Path, family: str, more: dict) -> None:
    """And its rows are not permuted: transformers' own reader finds them where they are."""
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    folder = write_by_transformers(tmp_path / "folder", family, num_hidden_layers=2, **more)
    path = write_gguf(tmp_path / "model.gguf", folder)
    expected, found = read_target(str(folder)), read_target(str(path))
    assert found.spec.family == family
    assert found.spec.decoder.experts == expected.spec.decoder.experts
    assert found.spec.decoder.has_qkv_bias == expected.spec.decoder.has_qkv_bias
    assert found.weights.names() == expected.weights.names()
    for name in expected.weights.names():
        np.testing.assert_array_equal(found.weights.array(name), expected.weights.array(name), err_msg=name)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    for part in ("self_attn.q_proj.weight", "self_attn.k_proj.weight"):
        name = f"layers.1.{part}"
        np.testing.assert_array_equal(found.weights.array(name), tensors[f"model.{name}"].numpy())


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"expert_used_count": 9}, "the second no more than the first, found 4, 9 and 24"),
        ({"expert_count": None}, "expert_count is missing"),
        ({"expert_gating_func": 2}, "expert_gating_func = 2 is not implemented"),
        ({"expert_weights_norm": False}, "expert_weights_norm = False is not implemented"),
        ({"expert_shared_feed_forward_length": 64}, "expert_shared_feed_forward_length = 64 is not implemented"),
        ({"attention.sliding_window": 64}, "attention.sliding_window = 64 is not implemented"),
    ],
)
def test_experts_that_are_not_implemented_are_refused(tmp_path: Path, metadata: dict, message: str) -> None:
    folder = write_by_transformers(tmp_path / "folder", "qwen3_moe", num_hidden_layers=1, **EXPERTS)
    with pytest.raises(CheckpointError, match=message):
        read_target(str(write_gguf(tmp_path / "model.gguf", folder, metadata=metadata)))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_transformers_reads_the_same_rows_from_the_same_file(tmp_path: Path, family: str) -> None:
    """Guards the Q/K permutation of the Llama family, and that Qwen3 has none, against a second implementation."""
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    folder = write_target(tmp_path / "folder", family=family)
    path = write_gguf(tmp_path / "model.gguf", folder, metadata={"attention.head_count_kv": 2})
    model = AutoModelForCausalLM.from_pretrained(folder)
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    weights = read_target(str(path)).weights
    assert {name.removeprefix("model.") for name in tensors} == set(weights.names())
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(weights.array(name.removeprefix("model.")), tensor.numpy(), err_msg=name)


@pytest.mark.demo
def test_demonstration_target_equals_what_transformers_loads(demo_target_path: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(demo_target_path.parent, gguf_file=demo_target_path.name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tensors = load_gguf_checkpoint(demo_target_path, return_tensors=True, model_to_load=model)["tensors"]
    checkpoint = read_target(str(demo_target_path))
    assert checkpoint.spec.is_head_tied
    assert set(checkpoint.weights.names()) == {name.removeprefix("model.") for name in tensors}
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(
            checkpoint.weights.array(name.removeprefix("model.")), tensor.numpy(), err_msg=name
        )
    decoder = checkpoint.spec.decoder
    assert (decoder.num_layers, decoder.hidden_size, decoder.head_dim) == (30, 576, 64)
    assert decoder.rms_norm_eps == config.rms_norm_eps
    assert decoder.rope == RopeSpec(config.rope_parameters["rope_theta"])
    assert checkpoint.spec.eos_token_ids == (config.eos_token_id, 0)  # <|endoftext|> by its name


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1"])
def test_other_element_types_are_dequantised_to_float32(tmp_path: Path, kind: str) -> None:
    folder = write_target(tmp_path / "folder", hidden=64, intermediate=64)
    quantization = gguf.GGMLQuantizationType[kind]
    found = read_target(str(write_gguf(tmp_path / "model.gguf", folder, matrix_type=quantization))).weights
    expected = read_target(str(folder)).weights
    for name in expected.names():
        exact = np.asarray(expected.array(name), np.float32)
        # rows are quantised one by one, so permuting them does not change their values
        array = gguf.dequantize(gguf.quantize(exact, quantization), quantization) if exact.ndim == 2 else exact
        np.testing.assert_array_equal(found.array(name), array, err_msg=name)
        assert found.array(name).dtype == np.float32


def test_offset_is_given_only_where_the_bytes_are_the_tensor(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", write_target(tmp_path / "folder"))
    weights = read_target(str(path)).weights
    assert weights.info("layers.0.self_attn.q_proj.weight").file is None
    data = path.read_bytes()
    for name in ("layers.0.self_attn.v_proj.weight", "norm.weight"):
        info, array = weights.info(name), weights.array(name)
        assert info.file == path
        assert info.offset is not None
        assert data[info.offset : info.offset + array.nbytes] == array.tobytes()


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def llama3_divisors(folder: Path) -> np.ndarray:
    """What the converter stores: unscaled frequency / scaled frequency, both by transformers."""
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](AutoConfig.from_pretrained(folder), "cpu")
    head_dim = AutoConfig.from_pretrained(folder).head_dim
    plain = LLAMA3["rope_theta"] ** (-np.arange(0, head_dim, 2) / head_dim)
    return (plain / scaled.numpy()).astype(np.float32)


def test_llama3_scaling_is_recovered_from_the_stored_frequencies(tmp_path: Path) -> None:
    folder = write_target(tmp_path / "folder", head_dim=64, rope=LLAMA3, max_positions=131072)
    path = write_gguf(tmp_path / "m.gguf", folder, tensors={"rope_freqs.weight": llama3_divisors(folder)})
    assert read_target(str(path)).spec.decoder.rope == read_target(str(folder)).spec.decoder.rope


def test_frequencies_of_another_scaling_are_refused(tmp_path: Path) -> None:
    folder = write_target(
        tmp_path / "folder", head_dim=64, rope=LLAMA3 | {"low_freq_factor": 2.0}, max_positions=131072
    )
    path = write_gguf(tmp_path / "m.gguf", folder, tensors={"rope_freqs.weight": llama3_divisors(folder)})
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight are not those of llama3 scaling with factor 8\.0"):
        read_target(str(path))


def test_frequencies_of_one_change_nothing(tmp_path: Path) -> None:
    ones = {"rope_freqs.weight": np.ones(4, np.float32)}
    path = write_gguf(tmp_path / "m.gguf", write_target(tmp_path / "folder"), tensors=ones)
    assert read_target(str(path)).spec.decoder.rope == RopeSpec(10000.0)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"rope.scaling.type": "none"}, RopeSpec(10000.0)),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}, RopeSpec(10000.0, "linear", factor=2.0)),
        ({"rope.scale_linear": 4.0}, RopeSpec(10000.0, "linear", factor=4.0)),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 128,
                "rope.scaling.attn_factor": 0.5,
            },
            RopeSpec(
                10000.0,
                "yarn",
                factor=4.0,
                original_max_position_embeddings=128,
                beta_fast=32.0,
                beta_slow=1.0,
                attention_factor=0.5 * yarn_mscale(4.0),
            ),
        ),
    ],
    ids=["none", "linear", "older_linear", "yarn"],
)
def test_rope_scaling_metadata(tmp_path: Path, metadata: dict, expected: RopeSpec) -> None:
    path = write_gguf(tmp_path / "m.gguf", write_target(tmp_path / "folder"), metadata=metadata)
    assert read_target(str(path)).spec.decoder.rope == expected


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}, "'longrope' with factor 2.0"),
        ({"rope.scaling.type": "yarn"}, "'yarn' with factor None"),
        ({"rope.scaling.yarn_log_multiplier": 0.1}, "yarn_log_multiplier"),
        ({"expert_count": 8}, "expert_count = 8"),
        ({"attention.sliding_window": 4096}, "attention.sliding_window = 4096"),
        ({"logit_scale": 0.5}, "logit_scale = 0.5"),
        ({"attention.head_count_kv": [2, 2, 1, 2]}, "differs by layer"),
        ({"rope.dimension_count": 4}, "rope.dimension_count = 4 differs from the head dimension 8"),
        ({"attention.value_length": 16}, "attention.value_length = 16"),
        ({"vocab_size": 128}, r"embed_tokens.weight has shape \[97, 32\], expected \[128, 32\]"),
        ({"block_count": None}, "block_count is missing"),
    ],
)
def test_metadata_that_is_not_implemented_is_refused_by_name(tmp_path: Path, metadata: dict, message: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", write_target(tmp_path / "folder"), metadata=metadata)
    with pytest.raises(CheckpointError, match=message):
        read_target(str(path))


def test_end_of_sequence_id_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    folder = write_target(tmp_path / "folder", vocab_size=3)  # the file names eot 3
    with pytest.raises(CheckpointError, match=r"token id 3 .*outside the vocabulary of 3"):
        read_target(str(write_gguf(tmp_path / "m.gguf", folder)))


def test_query_and_key_norms_are_refused_in_the_llama_family(tmp_path: Path) -> None:
    extra = {"blk.0.attn_q_norm.weight": np.ones(8, np.float32)}
    path = write_gguf(tmp_path / "m.gguf", write_target(tmp_path / "folder"), tensors=extra)
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.q_norm\.weight .*is not expected"):
        read_target(str(path))


def test_unknown_tensor_is_refused(tmp_path: Path) -> None:
    extra = {"blk.0.ffn_gate_shexp.weight": np.ones((4, 32), np.float32)}
    path = write_gguf(tmp_path / "m.gguf", write_target(tmp_path / "folder"), tensors=extra)
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_gate_shexp\.weight .*is not expected"):
        read_target(str(path))


@pytest.mark.parametrize("fraction", [0.0, 0.001, 0.02, 0.5, 0.99])
def test_truncated_file_is_called_incomplete(tmp_path: Path, fraction: float) -> None:
    path = write_gguf(tmp_path / "m.gguf", write_target(tmp_path / "folder"))
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * fraction)])
    with pytest.raises(CheckpointError, match="not a complete GGUF file"):
        read_target(str(path))


def test_other_architecture_and_split_model_are_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "gemma.gguf", "gemma3")
    split = gguf.GGUFWriter(tmp_path / "split.gguf", "llama")
    split.add_uint16("split.count", 3)
    for each in (writer, split):
        each.write_header_to_file()
        each.write_kv_data_to_file()
        each.write_tensors_to_file()
        each.close()
    with pytest.raises(CheckpointError, match="'gemma3' is not supported in GGUF files; expected one of llama, q"):
        read_target(str(tmp_path / "gemma.gguf"))
    with pytest.raises(CheckpointError, match="one of 3 parts of a split model"):
        read_target(str(tmp_path / "split.gguf"))

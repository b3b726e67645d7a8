"""Targets in Hugging Face folders: every form is read as transformers reads it,
and what is not implemented is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dspark_trt.checkpoints.checks import check_finite
from dspark_trt.checkpoints.spec import GenerationDefaults, RopeSpec
from dspark_trt.checkpoints.spec_json import spec_to_json, target_spec_from_json
from dspark_trt.checkpoints.target import read_target
from dspark_trt.errors import CheckpointError, ManifestError
from tests.support.factories import write_target

FORMS = {
    "llama": {},
    "llama_tied": {"tied": True},
    "llama_biases_bfloat16": {"biases": True, "dtype": "bfloat16"},
    "llama_wide_heads": {"head_dim": 16},
    "llama_float16_shards": {"dtype": "float16", "shards": 3},
    "qwen3": {"family": "qwen3"},
    "qwen3_tied_bfloat16_shards": {"family": "qwen3", "tied": True, "dtype": "bfloat16", "shards": 2},
    "qwen3_biases_one_kv_head": {"family": "qwen3", "biases": True, "kv_heads": 1},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_tensor_equals_what_transformers_loads(tmp_path: Path, form: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    folder = write_target(tmp_path, **FORMS[form])
    checkpoint = read_target(str(folder))
    state = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    expected = {name.removeprefix("model."): tensor.numpy() for name, tensor in state.items()}
    if checkpoint.spec.is_head_tied:
        del expected["lm_head.weight"]
    assert set(checkpoint.weights.names()) == set(expected)
    for name, tensor in expected.items():
        np.testing.assert_array_equal(checkpoint.weights.array(name).astype(np.float32), tensor, err_msg=name)
        assert checkpoint.weights.info(name).shape == tensor.shape


@pytest.mark.parametrize("form", FORMS)
def test_specification_states_the_form_and_survives_json(tmp_path: Path, form: str) -> None:
    options = FORMS[form]
    spec = read_target(str(write_target(tmp_path, **options))).spec
    family = options.get("family", "llama")
    decoder = spec.decoder
    assert spec.family == family
    assert spec.is_head_tied == options.get("tied", False)
    assert (decoder.num_layers, decoder.hidden_size, decoder.vocab_size) == (4, 32, 97)
    assert decoder.head_dim == options.get("head_dim", 8)
    assert decoder.num_kv_heads == options.get("kv_heads", 2)
    assert decoder.has_qk_norm == (family == "qwen3")
    assert decoder.has_qkv_bias == decoder.has_o_bias == options.get("biases", False)
    assert decoder.has_mlp_bias == (options.get("biases", False) and family == "llama")
    assert target_spec_from_json(json.loads(json.dumps(spec_to_json(spec)))) == spec


def test_specification_json_of_another_version_is_refused(tmp_path: Path) -> None:
    values = spec_to_json(read_target(str(write_target(tmp_path))).spec)
    with pytest.raises(ManifestError, match="run the build again"):
        target_spec_from_json({**values, "new_key": 1})
    del values["is_head_tied"]
    with pytest.raises(ManifestError, match="is_head_tied"):
        target_spec_from_json(values)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}, "does not say which layers"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2}, "sliding_attention"),
        ({"attention_sinks": True}, "attention_sinks"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"num_experts": 8}, "num_experts = 8"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"logit_scale": 0.5}, "logit_scale"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"is_causal": False}, "is_causal = False"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"model_type": "gpt_oss"}, "model_type 'gpt_oss' is not a supported target family"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"architectures": ["Qwen3DSparkModel"]}, "give it as --drafter"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"vocab_size": "97"}, "vocab_size: .*found '97'"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads = 3"),
        ({"head_dim": 7}, "head_dim = 7 is odd"),
        ({"eos_token_id": 97}, "token id 97"),
    ],
)
def test_configuration_that_would_change_the_output_is_refused_by_name(
    tmp_path: Path, extra: dict, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_target(str(write_target(tmp_path, config_extra=extra)))


def test_neutral_values_of_refused_keys_are_accepted(tmp_path: Path) -> None:
    extra = {"use_sliding_window": False, "sliding_window": 64, "rope_interleaved": False, "logit_scale": 1.0}
    extra |= {"partial_rotary_factor": 1.0, "layer_types": ["full_attention"] * 4, "pretraining_tp": 1}
    assert read_target(str(write_target(tmp_path, config_extra=extra))).spec.decoder.num_layers == 4


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"vocab_size": 97 + 64}, r"embed_tokens.weight has shape \[97, 32\], expected \[161, 32\]"),
        ({"tie_word_embeddings": True}, "differs from embed_tokens.weight"),
        ({"attention_bias": True}, "self_attn.q_proj.bias is missing"),
        ({"num_hidden_layers": 3}, r"layers\.3\..* is not expected"),
        ({"num_hidden_layers": 5}, r"layers\.4\..* is missing"),
    ],
    ids=["padded_vocabulary", "tied_but_different_head", "missing_biases", "extra_layer", "missing_layer"],
)
def test_tensors_that_do_not_fit_the_configuration_are_named(tmp_path: Path, extra: dict, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_target(str(write_target(tmp_path, config_extra=extra)))


def test_untied_target_without_a_head_is_refused(tmp_path: Path) -> None:
    folder = write_target(tmp_path, tied=True, config_extra={"tie_word_embeddings": False})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing"):
        read_target(str(folder))


def test_tied_target_that_stores_its_head_all_the_same_is_read_as_tied(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    folder = write_target(tmp_path, tied=True)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}, folder / "model.safetensors")
    checkpoint = read_target(str(folder))
    assert checkpoint.spec.is_head_tied
    assert "lm_head.weight" not in checkpoint.weights.names()


def test_every_end_of_sequence_id_counts_once(tmp_path: Path) -> None:
    folder = write_target(tmp_path, eos_token_ids=(5, 2, 7), config_extra={"eos_token_id": [2, 9]})
    assert read_target(str(folder)).spec.eos_token_ids == (5, 2, 7, 9)


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({}, GenerationDefaults()),
        ({"do_sample": False, "temperature": 0.6}, GenerationDefaults()),
        ({"do_sample": True}, GenerationDefaults(temperature=1.0)),
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1},
            GenerationDefaults(0.6, 20, 0.95, 0.0, 1.1),
        ),
    ],
)
def test_request_defaults_come_from_generation_config(tmp_path: Path, generation: dict, expected: object) -> None:
    assert read_target(str(write_target(tmp_path, generation=generation))).spec.generation_defaults == expected


def test_generation_config_is_optional(tmp_path: Path) -> None:
    folder = write_target(tmp_path)
    (folder / "generation_config.json").unlink()
    assert read_target(str(folder)).spec.eos_token_ids == (2,)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_weights_are_found_in_every_element_type(tmp_path: Path, dtype: str, bad: float) -> None:
    from safetensors.numpy import load_file, save_file

    folder = write_target(tmp_path, dtype=dtype)
    check_finite(read_target(str(folder)).weights, "target")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = bad
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight has 1 NaN or infinite"):
        check_finite(read_target(str(folder)).weights, "target")


@pytest.mark.parametrize(
    ("extra", "field", "expected"),
    [
        ({"rms_norm_eps": None}, "rms_norm_eps", 1e-6),
        ({"max_position_embeddings": None}, "max_position_embeddings", 2048),
        ({"max_position_embeddings": 512.0}, "max_position_embeddings", 512),
        ({"num_key_value_heads": 2, "tie_word_embeddings": None, "attention_bias": None}, "has_qkv_bias", False),
        ({"rope_scaling": {"rope_type": "default"}}, "rope", RopeSpec(10000.0)),
    ],
)
def test_values_that_transformers_loads_are_loaded(tmp_path: Path, extra: dict, field: str, expected: object) -> None:
    assert getattr(read_target(str(write_target(tmp_path, config_extra=extra))).spec.decoder, field) == expected


def test_a_key_that_is_null_is_as_good_as_absent(tmp_path: Path) -> None:
    folder = write_target(tmp_path)
    values = json.loads((folder / "config.json").read_text())
    nothing = dict.fromkeys(
        ("rms_norm_eps", "mlp_bias", "rope_scaling", "layer_types", "use_sliding_window", "head_dim")
    )
    (folder / "config.json").write_text(json.dumps(values | nothing))
    assert read_target(str(folder)).spec.decoder.rms_norm_eps == 1e-6


@pytest.mark.parametrize("bos", [97, 128000, -1])
def test_a_bos_outside_the_vocabulary_is_none(tmp_path: Path, bos: int, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_target(tmp_path, config_extra={"bos_token_id": bos})
    assert read_target(str(folder)).spec.bos_token_id is None
    assert f"token {bos} (bos_token_id) is outside the vocabulary of 97" in caplog.text


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({"do_sample": False, "top_p": 0.0, "temperature": -1, "top_k": -5}, GenerationDefaults()),
        ({"top_p": 2.0}, GenerationDefaults()),
        ({"do_sample": None, "temperature": None}, GenerationDefaults()),
        ({"do_sample": True, "top_k": -1}, GenerationDefaults(temperature=1.0)),
        ({"do_sample": True, "top_p": 0.0, "temperature": 0.7}, GenerationDefaults()),
    ],
)
def test_sampling_values_that_are_off_or_unused_are_accepted(
    tmp_path: Path, generation: dict, expected: GenerationDefaults
) -> None:
    assert read_target(str(write_target(tmp_path, generation=generation))).spec.generation_defaults == expected

"""Gemma 4: every form of its configuration, what is refused by name, its end tokens, and DeepSpec's drafter of it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from dspark_trt.checkpoints.drafter import read_drafter, read_drafter_spec
from dspark_trt.checkpoints.drafters.deepspec import read_gemma4
from dspark_trt.checkpoints.drafters.writing import write_drafter
from dspark_trt.checkpoints.gemma4 import read_decoder, text_values
from dspark_trt.checkpoints.layout import target_shapes
from dspark_trt.checkpoints.pairing import check_pairing, check_specs
from dspark_trt.checkpoints.spec import TargetSpec
from dspark_trt.checkpoints.target import read_target, read_target_spec
from dspark_trt.errors import CheckpointError, PairingError
from tests.support.factories import write_drafter as write_qwen3_drafter
from tests.support.factories import write_target, write_tokenizer_files
from tests.support.gemma4 import write_gemma_drafter, write_gemma_target
from tests.unit.checkpoints.test_drafter_dialects import changes_of

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|turn>{{ 'model' if message['role'] == 'assistant' else "
    "message['role'] }}\n{{ message['content'] | trim }}<turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn>model\n{% if not enable_thinking | default(false) %}"
    "<|channel>thought\n<channel|>{% endif %}{% endif %}"
)
# google/gemma-4-12B-it, as it was published: 23.92 GB in bfloat16, 0.10 GB of it for images and sound
TEXT_12B: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_k_eq_v": True,
    "bos_token_id": 2,
    "dtype": "bfloat16",
    "enable_moe_block": False,
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 3840,
    "hidden_size_per_layer_input": 0,
    "intermediate_size": 15360,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 8,
    "max_position_embeddings": 262144,
    "model_type": "gemma4_unified_text",
    "moe_intermediate_size": None,
    "num_attention_heads": 16,
    "num_experts": None,
    "num_global_key_value_heads": 1,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
    "num_kv_shared_layers": 0,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "sliding_window": 1024,
    "tie_word_embeddings": True,
    "use_bidirectional_attention": "vision",
    "use_cache": True,
    "use_double_wide_mlp": False,
    "vocab_size": 262144,
}
UNIFIED_12B = {
    "architectures": ["Gemma4UnifiedForConditionalGeneration"],
    "audio_config": {"model_type": "gemma4_unified_audio"},
    "eos_token_id": 106,
    "model_type": "gemma4_unified",
    "text_config": TEXT_12B,
    "tie_word_embeddings": True,
    "vision_config": {"model_type": "gemma4_unified_vision"},
}


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gemma_target(tmp_path_factory.mktemp("target"))


def changed(folder: Path, **keys: Any) -> Path:
    """config.json with `keys` laid over it; None removes one."""
    path = folder / "config.json"
    values = {**json.loads(path.read_text()), **keys}
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return folder


def test_every_form_that_transformers_writes_is_the_same_text_model(
    tmp_path: Path, target_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = read_target(str(target_folder))
    assert plain.spec.family == "gemma4"
    for model_type, has_other_parts in (("gemma4_text", False), ("gemma4", False), ("gemma4_unified", True)):
        with caplog.at_level(logging.INFO, "dspark_trt"):
            found = read_target(
                str(write_gemma_target(tmp_path / model_type, model_type, has_other_parts=has_other_parts))  # type: ignore[arg-type]
            )
        assert found.spec == plain.spec
        assert found.weights.names() == plain.weights.names()
        assert ("vision_config, audio_config: only text is served" in caplog.text) == has_other_parts


def test_the_published_12b_form_has_the_sizes_of_its_model() -> None:
    config, decoder = read_decoder(text_values(UNIFIED_12B, "config.json"), "config.json")
    assert config.eos_token_id == [106, 1]
    shapes = target_shapes(TargetSpec("gemma4", decoder, is_head_tied=True, eos_token_ids=(1, 106)))
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == 11_907_350_320
    sliding, full = decoder.shape_of(0), decoder.shape_of(5)
    assert (sliding.num_kv_heads, sliding.head_dim, sliding.is_value_of_key) == (8, 256, False)
    assert (full.num_kv_heads, full.head_dim, full.is_value_of_key) == (1, 512, True)
    assert [decoder.window_of(layer) for layer in (4, 5)] == [1024, None]
    assert (full.rope.theta, full.rope.partial_rotary_factor, decoder.logit_softcap) == (1e6, 0.25, 30.0)


def test_older_and_newer_keys_of_the_full_layers_say_the_same(tmp_path: Path, target_folder: Path) -> None:
    expected = read_target(str(target_folder)).spec
    folder = write_gemma_target(tmp_path)
    own = json.loads((folder / "config.json").read_text())["per_layer_config"]
    changed(folder, per_layer_config={f"{int(layer):02d}": each for layer, each in own.items()})
    assert read_target(str(folder)).spec == expected
    changed(folder, per_layer_config=None, global_head_dim=24, num_global_key_value_heads=1)
    assert read_target(str(folder)).spec == expected


def test_layer_types_and_rope_that_are_not_written_are_those_of_the_format() -> None:
    values = {**TEXT_12B, "layer_types": None, "rope_parameters": None, "sliding_window": None}
    assert read_decoder(values, "config.json")[1] == read_decoder(TEXT_12B, "config.json")[1]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"hidden_size_per_layer_input": 8}, "per-layer input embeddings, as E2B and E4B have them"),
        ({"num_kv_shared_layers": 2}, "layers that read the keys and values of others, as in E2B and E4B"),
        ({"enable_moe_block": True}, "mixture of experts, as in 26B-A4B"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all' is not implemented"),
        ({"hidden_activation": "silu"}, "hidden_activation = 'silu' is not implemented"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0 is not implemented"),
        ({"final_logit_softcapping": 0}, "final_logit_softcapping: Input should be greater than 0"),
        ({"layer_types": ["full_attention"]}, "layer_types: expected one entry for each of the 4 layers"),
        ({"layer_types": ["chunked_attention"] * 4}, "layer_types"),
        ({"per_layer_config": {"4": {"head_dim": 8}}}, "an entry for layer '4', and there are 4 layers"),
        ({"per_layer_config": {"x": {"head_dim": 8}}}, "an entry for layer 'x'"),
        ({"per_layer_config": {"1": {"hidden_size": 8}}}, "hidden_size = 8 is not implemented|per_layer_config"),
        ({"per_layer_config": {"1": {"num_key_value_heads": 3}}}, "layer 1 has 4 heads, 3 KV heads"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "nothing for sliding_attention layers"),
        (
            {"rope_parameters": {key: {"rope_type": "yarn"} for key in ("full_attention", "sliding_attention")}},
            "rope type 'yarn' is not one of Gemma 4",
        ),
        ({"num_hidden_layers": 10**9, "layer_types": None}, "num_hidden_layers: expected 1 to 1024"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised by 'gptq'"),
        ({"model_type": "gemma4_assistant"}, "model_type 'gemma4_assistant' is not a supported target family"),
        ({"architectures": ["Gemma4AssistantForCausalLM"]}, "architectures .* is not supported"),
    ],
)
def test_what_is_not_implemented_or_wrong_is_refused_by_name(
    keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_target(str(changed(write_gemma_target(tmp_path), **keys)))


def test_a_text_model_without_the_key_of_per_layer_inputs_has_them(tmp_path: Path) -> None:
    folder = changed(write_gemma_target(tmp_path, "gemma4_text"), hidden_size_per_layer_input=None)
    with pytest.raises(CheckpointError, match="hidden_size_per_layer_input = 256"):
        read_target(str(folder))


def test_a_multimodal_configuration_without_text_is_refused(tmp_path: Path) -> None:
    folder = changed(write_gemma_target(tmp_path, "gemma4_unified"), text_config={"model_type": "gemma3_text"})
    with pytest.raises(CheckpointError, match="text_config: expected the text model of a gemma4_unified checkpoint"):
        read_target(str(folder))


def test_end_tokens_come_from_all_sources_and_sampling_from_the_generation_config(tmp_path: Path) -> None:
    """As published: the whole model's, its text model's, the generation's, and the end of a turn in the template."""
    folder = write_gemma_target(tmp_path, "gemma4_unified", vocab_size=320, eos_token_id=2)
    write_tokenizer_files(folder, 316)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    names = ("<|turn>", "<turn|>", "<|channel>", "<channel|>")
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    tokenizer.save(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id("<turn|>")
    settings = {"bos_token": "<s>", "eos_token": "<turn|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    generation = {"do_sample": True, "temperature": 1.0, "top_k": 64, "top_p": 0.95, "eos_token_id": [2, 50]}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    spec = read_target(str(changed(folder, eos_token_id=7))).spec
    assert spec.eos_token_ids == (2, 50, 7, end)
    defaults = spec.generation_defaults
    assert (defaults.temperature, defaults.top_k, defaults.top_p) == (1.0, 64, 0.95)


def test_the_drafter_is_read_as_its_configuration_says(tmp_path: Path, target_folder: Path) -> None:
    target = read_target(str(target_folder))
    folder = write_gemma_drafter(tmp_path, target_folder)
    drafter = read_drafter(str(folder), target)
    check_pairing(target, drafter)
    spec = drafter.spec
    assert (spec.gamma, spec.target_layer_ids, spec.is_last_tap_normed, spec.is_mask_first) == (
        5,
        (-1, 0, 2),
        True,
        False,
    )
    assert (spec.has_own_embedding, spec.has_own_head) == (False, False)
    assert {spec.decoder.shape_of(layer) for layer in range(2)} == {target.spec.decoder.shape_of(1)}
    assert spec.decoder.logit_softcap == 5.0
    stale = {"1": {"head_dim": 24}, "3": {"head_dim": 24}}  # a copy of the target's, which DeepSpec does not read
    assert read_drafter(str(changed(folder, per_layer_config=stale)), target).spec == spec
    changed(folder, layer_types=None, model_type="gemma4_text", hidden_size_per_layer_input=0)
    assert read_drafter(str(folder), target).spec == spec


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"layer_types": ["sliding_attention", "full_attention"]}, "layer_types has .*'sliding_attention'"),
        ({"num_kv_shared_layers": 1}, "num_kv_shared_layers = 1"),
        ({"target_layer_ids": None}, "target_layer_ids is missing"),
        ({"model_type": "gemma3_text"}, "Gemma4DSparkModel with model_type 'gemma3_text'"),
        ({"draft_vocab_size": 14}, "draft_vocab_size = 14 is not vocab_size = 97"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers"),
    ],
)
def test_a_drafter_with_wrong_keys_is_refused(
    keys: dict[str, Any], message: str, tmp_path: Path, target_folder: Path
) -> None:
    target = read_target_spec(str(target_folder))
    with pytest.raises(CheckpointError, match=message):
        read_drafter_spec(str(changed(write_gemma_drafter(tmp_path, target_folder), **keys)), target)


def test_odd_values_of_any_key_end_in_one_message(tmp_path: Path, target_folder: Path) -> None:
    drafter = json.loads((write_gemma_drafter(tmp_path, target_folder) / "config.json").read_text())
    messages = []
    for read, config in ((read_gemma4, drafter | {"per_layer_config": None}), (read_decoder, TEXT_12B)):
        for change in changes_of(config):
            try:
                read(change, "config.json")
            except CheckpointError as error:
                messages.append(str(error))
    assert len(messages) > 300
    assert not any("\n" in message for message in messages)


def test_drafters_and_targets_of_other_families_do_not_pair(tmp_path: Path, target_folder: Path) -> None:
    gemma, llama = read_target(str(target_folder)), read_target(str(write_target(tmp_path / "llama")))
    drafter = read_drafter(str(write_gemma_drafter(tmp_path / "drafter", target_folder)), gemma)
    with pytest.raises(PairingError, match="the target is of another family, the drafter's layers are of Gemma 4"):
        check_specs(llama.spec, drafter.spec)
    other = read_drafter(str(write_qwen3_drafter(tmp_path / "other", tmp_path / "llama")), llama)
    with pytest.raises(PairingError, match="the target is of Gemma 4, the drafter's layers are of another family"):
        check_specs(gemma.spec, other.spec)


def test_deepspec_form_holds_the_drafter_and_speculators_form_does_not(tmp_path: Path, target_folder: Path) -> None:
    target = read_target(str(target_folder))
    drafter = read_drafter(str(write_gemma_drafter(tmp_path / "source", target_folder, has_own_embedding=True)), target)
    (tmp_path / "written").mkdir()
    write_drafter(drafter, target, tmp_path / "written", "deepspec", "target")
    again = read_drafter(str(tmp_path / "written"), target)
    assert again.spec == drafter.spec
    for name in drafter.weights.names():
        np.testing.assert_array_equal(again.weights.array(name), drafter.weights.array(name))
    with pytest.raises(CheckpointError, match="the drafter's layers are Gemma 4's"):
        write_drafter(drafter, target, tmp_path / "written", "speculators", "target")

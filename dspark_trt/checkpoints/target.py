"""Reads a target: a Hugging Face checkpoint of a family in `families`, or a GGUF file."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from dspark_trt.checkpoints import gemma4
from dspark_trt.checkpoints.checks import check_tensors, check_token_ids, is_equal
from dspark_trt.checkpoints.config import (
    DecoderConfig,
    GenerationConfig,
    architectures_of,
    decoder_spec,
    eos_token_ids,
    known_token,
    parse,
    read_json,
    refuse_unsupported,
)
from dspark_trt.checkpoints.dequantising.formats import CONFIG_KEYS, dequantised, weight_format
from dspark_trt.checkpoints.derived import DerivedStore
from dspark_trt.checkpoints.experts import COUNT_KEYS, experts_spec, with_expert_stacks
from dspark_trt.checkpoints.families import FAMILIES, layer_windows
from dspark_trt.checkpoints.fused import with_parts
from dspark_trt.checkpoints.gguf_target import read_gguf_target
from dspark_trt.checkpoints.layout import EMBEDDING, HEAD, target_shapes
from dspark_trt.checkpoints.locate import locate
from dspark_trt.checkpoints.modules import is_of_module
from dspark_trt.checkpoints.quantised import refuse_quantised
from dspark_trt.checkpoints.safetensors_store import open_safetensors
from dspark_trt.checkpoints.spec import DecoderSpec, Family, TargetCheckpoint, TargetSpec, WeightStore
from dspark_trt.checkpoints.target_text import TargetText, check_vocabulary, end_token_ids
from dspark_trt.checkpoints.tokenizer import folder_text
from dspark_trt.errors import CheckpointError, abridged

logger = logging.getLogger(__name__)

TARGET_ARCHITECTURES = {name: facts.architecture for name, facts in FAMILIES.items()} | gemma4.ARCHITECTURES
_SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p")
_IGNORED_GENERATION_KEYS = ("no_repeat_ngram_size", "typical_p", "suppress_tokens", "bad_words_ids", "epsilon_cutoff")


def read_target(source: str, revision: str | None = None) -> TargetCheckpoint:
    """Read the target at `source`: a folder, a .gguf file or a hub id.

    Raises CheckpointError when it cannot be read, is of another family, needs something that is not implemented, or
    when its tensors do not fit its configuration; EnvironmentMissingError when the hub cannot be reached.
    """
    path = locate(source, revision)
    return read_gguf_target(path) if path.is_file() else _read_folder(path)


def read_target_spec(source: str, revision: str | None = None) -> TargetSpec:
    """What the target's configuration alone says; of a hub id no weight is fetched for it.

    Raises CheckpointError, EnvironmentMissingError as `read_target` does.
    """
    path = locate(source, revision, with_weights=False)
    return read_gguf_target(path).spec if path.is_file() else _spec(path)


def _spec(folder: Path) -> TargetSpec:
    where = str(folder / "config.json")
    values = read_json(folder / "config.json")
    family = _family(values, where)
    config, decoder = _decoder(values, family, where)
    generation = read_generation_config(folder)
    text = _text(folder)
    spec = TargetSpec(
        family=family,
        decoder=decoder,
        is_head_tied=config.tie_word_embeddings,
        eos_token_ids=end_token_ids(
            {
                "generation_config.json": eos_token_ids(generation.eos_token_id),
                "config.json": eos_token_ids(config.eos_token_id),
            },
            text,
            str(folder),
        ),
        bos_token_id=known_token(config.bos_token_id, config.vocab_size, where),
        generation_defaults=generation.defaults(),
    )
    check_token_ids(spec, where)
    if text is not None:
        check_vocabulary(text, config.vocab_size, str(folder))
    return spec


def _decoder(values: dict[str, Any], family: Family, where: str) -> tuple[DecoderConfig, DecoderSpec]:
    if family == "gemma4":
        refuse_quantised(values, (), where)  # nothing shows that the names of such files are read right
        return gemma4.read_decoder(gemma4.text_values(values, where), where)
    weight_format(values, where)
    has_experts = FAMILIES[family].has_experts
    read = (*CONFIG_KEYS, *(COUNT_KEYS if has_experts else ()))
    plain = {key: value for key, value in values.items() if key not in read}
    refuse_unsupported(plain, where, is_causal=True)
    config = parse(DecoderConfig, values, where)
    decoder = decoder_spec(config, family, where, are_windows_read=True)
    windows = layer_windows(values, family, decoder.num_layers, where)
    experts = experts_spec(values, family, decoder.num_layers, where) if has_experts else None
    return config, replace(decoder, layer_windows=windows, experts=experts)


def _text(folder: Path) -> TargetText | None:
    """None where there is no tokenizer, or a damaged one: whoever needs it says what is wrong with it."""
    try:
        return folder_text(folder)
    except CheckpointError:
        return None


def _read_folder(folder: Path) -> TargetCheckpoint:
    spec, where = _spec(folder), str(folder / "config.json")
    if spec.family == "gemma4":
        stored = open_safetensors(folder, gemma4.stored_name)
        weights: WeightStore = stored.without(filter(gemma4.is_of_other_part, stored.names()))
        refuse_quantised({}, weights.names(), str(folder))
        weights = _without_tied_head(weights, where) if spec.is_head_tied else weights
        check_tensors(weights, target_shapes(spec), str(folder))
        return TargetCheckpoint(spec, weights)
    stored = open_safetensors(folder, lambda name: name.removeprefix("model."))
    stored = stored.without(filter(is_of_module, stored.names())) if spec.family == "mimo" else stored
    form = weight_format(read_json(folder / "config.json"), where)
    weights = dequantised(stored, form, str(folder))
    # Old Llama exports store the rotary frequencies, which follow from the configuration.
    frequencies = [name for name in weights.names() if name.endswith("rotary_emb.inv_freq")]
    weights = DerivedStore(weights, left_out=frequencies) if frequencies else weights
    if spec.is_head_tied:
        weights = _without_tied_head(weights, where)
    if FAMILIES[spec.family].has_fused_projections:
        weights = with_parts(weights, spec.decoder, str(folder))
    if spec.decoder.experts is not None:
        weights = with_expert_stacks(weights, spec.decoder.experts, spec.decoder.hidden_size, str(folder))
    expected = target_shapes(spec)
    if form is not None:
        weights = _without_empty_biases(weights, expected)
    check_tensors(weights, expected, str(folder))
    return TargetCheckpoint(spec, weights)


def read_generation_config(folder: Path) -> GenerationConfig:
    """generation_config.json, or an empty one where there is none."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return GenerationConfig()
    values = read_json(path)
    if not values.get("do_sample"):  # whatever is written for sampling is not looked at
        values = {key: value for key, value in values.items() if key not in _SAMPLING_KEYS}
    for key in _IGNORED_GENERATION_KEYS:
        if values.get(key):
            logger.warning("%s: %s = %s has no counterpart here and is left out", path, key, abridged(values[key]))
    return parse(GenerationConfig, values, str(path))


def _family(values: dict[str, Any], where: str) -> Family:
    family, architectures = values.get("model_type"), architectures_of(values)
    if not isinstance(family, str) or family not in TARGET_ARCHITECTURES:
        raise CheckpointError(
            f"{where}: model_type {abridged(family)} is not a supported target family; expected one of "
            f"{', '.join(TARGET_ARCHITECTURES)}"
        )
    expected = TARGET_ARCHITECTURES[family]
    if architectures and architectures != [expected]:
        hint = "; this is a drafter, give it as --drafter" if "DSpark" in str(architectures) else ""
        raise CheckpointError(
            f"{where}: architectures {abridged(architectures)} is not supported, expected [{expected!r}]{hint}"
        )
    return "gemma4" if family in gemma4.ARCHITECTURES else cast(Family, family)


def _without_empty_biases(weights: WeightStore, expected: Mapping[str, Any]) -> WeightStore:
    """Old GPTQ exports have a bias of zeros for every Linear layer."""
    extra = [name for name in weights.names() if name.endswith(".bias") and name not in expected]
    return DerivedStore(weights, left_out=[name for name in extra if not weights.array(name).any()])


def _without_tied_head(weights: WeightStore, where: str) -> WeightStore:
    """Some tied checkpoints (Qwen3-0.6B) store the head all the same:
    a copy is dropped, another head is a contradiction."""
    if HEAD not in weights.names():
        return weights
    if EMBEDDING in weights.names() and not is_equal(weights.array(EMBEDDING), weights.array(HEAD)):
        raise CheckpointError(
            f"{where}: tie_word_embeddings is true, but the file has an {HEAD} that differs from {EMBEDDING}; set "
            "tie_word_embeddings to false if the head is meant to be used"
        )
    return DerivedStore(weights, left_out=[HEAD])

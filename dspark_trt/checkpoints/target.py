"""Reads a target: a Hugging Face checkpoint of the Llama or Qwen3 dense family, or a GGUF file of these."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, cast

from dspark_trt.checkpoints.config import (
    DecoderConfig,
    Family,
    GenerationConfig,
    architectures_of,
    decoder_spec,
    eos_token_ids,
    known_token,
    parse,
    read_json,
    refuse_unsupported,
)
from dspark_trt.checkpoints.gguf_target import read_gguf_target
from dspark_trt.checkpoints.layout import EMBEDDING, HEAD, check_tensors, check_token_ids, is_equal, target_shapes
from dspark_trt.checkpoints.locate import locate
from dspark_trt.checkpoints.quantised import refuse_quantised
from dspark_trt.checkpoints.safetensors_store import SafetensorsStore, open_safetensors
from dspark_trt.checkpoints.spec import TargetCheckpoint, TargetSpec
from dspark_trt.checkpoints.target_text import TargetText, check_vocabulary, end_token_ids
from dspark_trt.checkpoints.tokenizer import folder_text
from dspark_trt.errors import CheckpointError, abridged

logger = logging.getLogger(__name__)

TARGET_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
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
    refuse_quantised(values, (), where)
    refuse_unsupported(values, where, is_causal=True)
    config = parse(DecoderConfig, values, where)
    generation = read_generation_config(folder)
    text = _text(folder)
    spec = TargetSpec(
        family=family,
        decoder=decoder_spec(config, family, where),
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


def _text(folder: Path) -> TargetText | None:
    """None where there is no tokenizer, or a damaged one: whoever needs it says what is wrong with it."""
    try:
        return folder_text(folder)
    except CheckpointError:
        return None


def _read_folder(folder: Path) -> TargetCheckpoint:
    spec = _spec(folder)
    weights = open_safetensors(folder, lambda name: name.removeprefix("model."))
    refuse_quantised({}, weights.names(), str(folder))
    # Old Llama exports store the rotary frequencies, which follow from the configuration.
    weights = weights.without(name for name in weights.names() if name.endswith("rotary_emb.inv_freq"))
    if spec.is_head_tied:
        weights = _without_tied_head(weights, str(folder / "config.json"))
    check_tensors(weights, target_shapes(spec), str(folder))
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
            f"{where}: model_type {abridged(family)} is not a supported target family; expected "
            f"{' or '.join(map(repr, TARGET_ARCHITECTURES))} (dense)"
        )
    if architectures and architectures != [TARGET_ARCHITECTURES[family]]:
        hint = "; this is a drafter, give it as --drafter" if "DSpark" in str(architectures) else ""
        raise CheckpointError(
            f"{where}: architectures {abridged(architectures)} is not supported, expected "
            f"[{TARGET_ARCHITECTURES[family]!r}]{hint}"
        )
    return cast(Family, family)


def _without_tied_head(weights: SafetensorsStore, where: str) -> SafetensorsStore:
    """Some tied checkpoints (Qwen3-0.6B) store the head all the same:
    a copy is dropped, another head is a contradiction."""
    if HEAD not in weights.names():
        return weights
    if EMBEDDING in weights.names() and not is_equal(weights.array(EMBEDDING), weights.array(HEAD)):
        raise CheckpointError(
            f"{where}: tie_word_embeddings is true, but the file has an {HEAD} that differs from {EMBEDDING}; set "
            "tie_word_embeddings to false if the head is meant to be used"
        )
    return weights.without([HEAD])

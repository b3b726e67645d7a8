"""Files and requests of strangers, changed at random: they are read, or refused in words. Nothing else may happen.

`make fuzz MINUTES=60` tries new ones for an hour; here it is the same few hundred every time. What was found stands in
`corpus/`, one folder a reader, and is tried first.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dspark_trt.building.manifest import StageManifest
from dspark_trt.building.recipe import BuildRecipe
from dspark_trt.calibration.file import CalibrationFile
from dspark_trt.packaging.pbtxt import TritonTensor
from dspark_trt.packaging.signature import ENGINE_FIELDS, ENGINE_ONLY_INPUTS, PREPROCESSING_FIELDS
from dspark_trt.server.openai.requests import ChatRequest, CompletionRequest
from tests.support.hostile_readers import Readers

CORPUS = Path(__file__).parent / "corpus"
SEEDS = sorted(path for path in CORPUS.glob("*/*") if path.is_file())
NUM_EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "40"))
IS_SEARCH = "FUZZ_EXAMPLES" in os.environ

INTEGERS = st.integers(-3, 40) | st.sampled_from([2**k + d for k in (7, 15, 31, 32, 62, 63, 64, 400) for d in (-1, 0)])
NUMBERS = INTEGERS | INTEGERS.map(lambda value: -value) | st.floats()
TEXTS = st.text(max_size=8) | st.sampled_from(
    ["auto", "yarn", "llama3", "float32", "F32", "../x", "\0", "é" * 200, "{{ 1 }}", "x" * 20_000]
)
SCALARS = st.none() | st.booleans() | NUMBERS | TEXTS
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=8
)


@st.composite
def changed_bytes(draw: st.DrawFn, original: bytes) -> bytes:
    """Some bytes of the first few hundred, and a length, are others."""
    data = bytearray(original)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, min(len(data), 400)))
        data[at : at + draw(st.sampled_from([0, 1, 4, 8]))] = draw(st.binary(max_size=8))
    return bytes(data[: draw(st.sampled_from([len(data), len(data) // 2, 40, 8, 0]))])


@st.composite
def changed_json(draw: st.DrawFn, original: dict[str, Any], more: tuple[str, ...] = ()) -> bytes:
    """Some keys have other values, at the top or one level below."""
    values = json.loads(json.dumps(original))
    for name in draw(st.lists(st.sampled_from([*original, *more, "x" * 20_000]), min_size=1, max_size=3)):
        inner = values.get(name)
        if isinstance(inner, dict) and inner and draw(st.booleans()):
            inner[draw(st.sampled_from(sorted(inner)))] = draw(VALUES)
        else:
            values[name] = draw(VALUES)
    return json.dumps(values).encode("utf-8", "surrogatepass")


@st.composite
def safetensors(draw: st.DrawFn) -> bytes:
    sizes = st.integers(-2, 70) | NUMBERS
    entry = st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F32", "BF16", "I64", "F4", ""]) | SCALARS,
            "shape": st.lists(sizes, max_size=3) | VALUES,
            "data_offsets": st.lists(sizes, min_size=2, max_size=2) | VALUES,
        }
    )
    header = json.dumps(draw(st.dictionaries(TEXTS, entry | VALUES, max_size=4))).encode()
    length = draw(st.just(len(header)) | st.integers(0, 2**64 - 1))
    return length.to_bytes(8, "little") + header + bytes(draw(st.integers(0, 64)))


ROPE = (
    "rope_scaling",
    "rope_parameters",
    "rope_theta",
    "layer_types",
    "sliding_window",
    "quantization_config",
    "dtype",
)
NUMBER_RANGES = {"BOOL": (0, 1), "INT32": (-(2**31), 2**31 - 1), "UINT64": (0, 2**64 - 1)}


@st.composite
def tensors(draw: st.DrawFn, fields: Iterable[TritonTensor]) -> bytes:
    """Of the types that Triton has checked; shapes and values are a stranger's."""
    chosen = {}
    for tensor in draw(st.lists(st.sampled_from([*fields]), min_size=1, max_size=4, unique=True)):
        if tensor.data_type == "STRING":
            words = st.lists(TEXTS | VALUES.map(json.dumps), max_size=3)
            chosen[tensor.name] = ["STRING", [draw(words)]]
            continue
        least, most = NUMBER_RANGES.get(tensor.data_type, (-(2**63), 2**63 - 1))
        integers = st.integers(least, most) | st.integers(0, 1)
        numbers = st.floats(width=32) if tensor.data_type == "FP32" else integers
        rows, columns = draw(st.sampled_from([(1, 1), (1, 1), (1, 3), (2, 3), (1, 0), (0, 0)]))
        values = [[draw(numbers) for _ in range(columns)] for _ in range(rows)]
        chosen[tensor.name] = [tensor.data_type, [values] if draw(st.booleans()) else values]
    return json.dumps(chosen).encode()


def bodies() -> st.SearchStrategy[bytes]:
    names = [
        *ChatRequest.model_fields,
        *CompletionRequest.model_fields,
        *(field.name for field in ENGINE_FIELDS),
        "other",
    ]
    usual = {"messages": [{"role": "user", "content": "a"}], "prompt": "a", "text_input": "a"}
    return changed_json(usual, tuple(names)) | st.binary(max_size=40)


OF_DIALECTS = (
    *("dflash_config", "speculators_config", "transformer_layer_config", "draft_vocab_size", "sample_from_anchor"),
    *("is_causal", "use_sliding_window", "target_hidden_size", "projector_type", "block_size", "architectures"),
)


def dialects(values: dict[str, Any]) -> list[dict[str, Any]]:
    """A drafter's configuration, and what other trainers would call it, roughly: enough to get into their readers."""
    nested = {"mask_token_id": 5, "target_layer_ids": [1, 2], "projector_type": "dspark"}
    methods = {"proposal_methods": [{"speculative_tokens": 4}]}
    own = {"block_size": 4, "draft_vocab_size": 320, "speculators_config": methods, "transformer_layer_config": values}
    return [
        values,
        values | {"architectures": ["DFlashDraftModel"], "dflash_config": nested},
        values | {"architectures": ["DSparkDraftModel"], "dflash_config": nested},
        own | {"speculators_model_type": "dspark", "aux_hidden_state_layer_ids": [1, 2], "mask_token_id": 5},
        own | {"speculators_model_type": "dflash", "architectures": ["DFlashSpeculator"]},
    ]


def strategies(readers: Readers) -> dict[str, st.SearchStrategy[bytes]]:
    def configuration(folder: Path) -> dict[str, Any]:
        values: dict[str, Any] = json.loads((folder / "config.json").read_text())
        return values

    recipe = st.dictionaries(st.sampled_from([*BuildRecipe.model_fields, "other", "x" * 20_000]), VALUES, max_size=4)
    tokenizer = json.loads((readers.target / "tokenizer_config.json").read_text())
    names = ("chat_template", "bos_token", "eos_token", "additional_special_tokens", "model_max_length")
    table = dict.fromkeys(("schema_version", "num_requests", "num_tokens", "depths", "step_ms", "provenance"), 1)
    return {
        "safetensors": safetensors(),
        "gguf": changed_bytes(readers.gguf),
        "target_config": changed_json(configuration(readers.target), ROPE),
        "drafter_config": st.sampled_from(dialects(configuration(readers.drafter))).flatmap(
            lambda values: changed_json(values, (*ROPE, *OF_DIALECTS))
        ),
        "tokenizer": changed_json(tokenizer, names),
        "recipe": recipe.map(lambda values: yaml.safe_dump(values).encode()) | st.binary(max_size=60),
        "step_table": changed_json(table),
        "manifest": changed_json(dict.fromkeys(StageManifest.model_fields, 1)),
        "calibration": changed_json(dict.fromkeys(CalibrationFile.model_fields, 1)),
        "given_calibration": changed_json(
            {"temperatures": [1.0, 1.5, 2.0], "profile": {"sts_temperatures": [1.0] * 3}}, ("greedy", "sampled")
        ),
        "prompts": changed_json({"prompt": "a", "kind": "b", "split": "fit"}) | st.binary(max_size=40),
        "engine_request": tensors([*(field.step_tensor() for field in ENGINE_FIELDS), *ENGINE_ONLY_INPUTS]),
        "prompt": tensors([field.step_tensor() for field in PREPROCESSING_FIELDS]),
        "body": bodies(),
    }


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> Readers:
    return Readers(tmp_path_factory.mktemp("readers"))


READER_NAMES = sorted(path.name for path in CORPUS.iterdir())


@pytest.mark.parametrize("seed", SEEDS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_what_was_found_once_is_refused_or_read(readers: Readers, seed: Path) -> None:
    taken = readers.take(seed.parent.name, seed.read_bytes())
    assert taken == seed.stem.startswith("taken_")


@pytest.mark.parametrize("name", READER_NAMES)
@given(data=st.data())
@settings(
    max_examples=NUM_EXAMPLES,
    derandomize=not IS_SEARCH,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_reader_takes_or_refuses_in_words(readers: Readers, name: str, data: st.DataObject) -> None:
    readers.take(name, data.draw(strategies(readers)[name]))


def test_every_reader_has_seeds(readers: Readers) -> None:
    assert {path.parent.name for path in SEEDS} == readers.by_name.keys() == strategies(readers).keys()

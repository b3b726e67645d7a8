"""Files that are damaged or made to harm: one clear message, and nothing allocated for a number that a file states."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dspark_trt.checkpoints.drafter import read_drafter
from dspark_trt.checkpoints.safetensors_store import open_safetensors
from dspark_trt.checkpoints.target import read_target
from dspark_trt.errors import CheckpointError
from tests.support.factories import write_drafter, write_target
from tests.support.gguf_factory import write_gguf

DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000
LONG_NUMBER = '{"vocab_size": ' + "9" * 5000 + "}"


@pytest.fixture(autouse=True)
def refused_at_once() -> Iterator[None]:
    """A file of a few bytes is never worth seconds."""
    start = time.process_time()
    yield
    assert time.process_time() - start < 10


def write_safetensors(folder: Path, header: str, data_bytes: int = 64) -> Path:
    encoded = header.encode()
    path = folder / "model.safetensors"
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + bytes(data_bytes))
    return folder


def header(**tensors: tuple[Any, Any]) -> str:
    """Shape and offsets by name."""
    entries = {name: {"dtype": "F32", "shape": s, "data_offsets": o} for name, (s, o) in tensors.items()}
    return json.dumps(entries)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (header(a=([2], [0, 8]), b=([2], [4, 12])), "tensor b at bytes 4 to 12 overlaps a"),
        (header(a=([2], [0, 8]), b=([2], [0, 8])), "overlaps a"),
        (header(a=([2], [-8, 0])), r"tensor a has shape \[2\] and offsets \[-8, 0\]"),
        (header(a=([-2], [0, 8])), r"shape \[-2\]"),
        (header(a=([2], [8, 0])), "overlaps itself"),
        (header(a=([2.0], [0, 8])), r"shape \[2\.0\]"),
        (header(a=([2], [0.0, 8.0])), r"offsets \[0\.0, 8\.0\]"),
        (header(a=([True, 2], [0, 8])), r"shape \[True, 2\]"),
        (header(a=([float("inf")], [0, 8])), r"shape \[inf\]"),
        (header(a=([2], [0, 8, 16])), r"offsets \[0, 8, 16\]"),
        (header(a=([2], [0, 10**30])), "ends at byte"),
        (header(a=(2, [0, 8])), "cannot be read"),
        (header(a=([2], None)), "cannot be read"),
        ('{"a": 1, "a": 2}', "a name stands there twice"),
        ("[1, 2]", "cannot be read"),
        ('{"a": {}}', "cannot be read"),
        (DEEP, "cannot be read"),
        (LONG_NUMBER, "cannot be read"),
    ],
)
def test_a_header_that_leads_to_wrong_bytes_is_refused(tmp_path: Path, text: str, message: str) -> None:
    write_safetensors(tmp_path, text)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: not a complete safetensors file: .*{message}"):
        open_safetensors(tmp_path, str)


@pytest.mark.parametrize("name", ["x" * 300 + ".safetensors", "a\0b.safetensors", "é" * 130])
def test_a_shard_that_no_file_can_be_called_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match="is not a plain file name"):
        open_safetensors(tmp_path, str)


@pytest.mark.parametrize("text", [DEEP, LONG_NUMBER, "[" * 100_000, '{"a": 1', "[]", "7", "\ufeff{}"])
def test_a_configuration_that_is_no_json_object_is_called_so(tmp_path: Path, text: str) -> None:
    folder = write_target(tmp_path)
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json: (not valid JSON|expected a JSON object)"):
        read_target(str(folder))


def test_a_configuration_that_is_a_folder_or_no_text_is_called_so(tmp_path: Path) -> None:
    folder = write_target(tmp_path)
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        read_target(str(folder))
    (folder / "config.json").rmdir()
    (folder / "config.json").write_bytes(b'{"model_type": "\xff"}')
    with pytest.raises(CheckpointError, match="not valid JSON"):
        read_target(str(folder))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"num_hidden_layers": 10**9}, "num_layers: expected 1 to 1024, found 1000000000"),
        ({"vocab_size": 10**12}, "vocab_size: expected 1 to"),
        ({"hidden_size": 2**62}, "hidden_size: expected 1 to"),
        ({"head_dim": 10**10}, "head_dim: expected 1 to"),
        ({"head_dim": 0, "num_attention_heads": 64, "num_key_value_heads": 64}, "head_dim"),
        (
            {"head_dim": None, "num_attention_heads": 64, "num_key_value_heads": 64},
            "head_dim: expected 1 to .* found 0",
        ),
        ({"num_attention_heads": 10**10, "num_key_value_heads": 1}, "num_heads: expected"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps: .*finite"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: .*finite"),
        ({"rms_norm_eps": 0}, "rms_norm_eps: .*greater than 0"),
        ({"rope_theta": float("inf"), "rope_parameters": None}, "rope_theta: .*finite"),
        ({"rope_parameters": {"rope_type": "linear", "factor": float("inf")}}, "factor: .*finite"),
        ({"model_type": []}, r"model_type \[\] is not a supported"),
        ({"model_type": {"a": 1}}, "is not a supported"),
        ({"architectures": "LlamaForCausalLM"}, "architectures"),
        ({"num_hidden_layers": [4]}, r"num_hidden_layers: .*found \[4\]"),
        ({"layer_types": [1, 2]}, "layer_types"),
        ({"rope_scaling": 3}, "rope_scaling"),
        ({"eos_token_id": "2"}, "eos_token_id"),
        ({"hidden_act": ["silu"]}, "hidden_act"),
        ({"vocab_size": "9" * 10**6}, r"vocab_size: .*found '999.*\.\.\."),
    ],
)
def test_sizes_and_types_that_no_model_has_are_named(tmp_path: Path, extra: dict, message: str) -> None:
    folder = write_target(tmp_path, config_extra=extra)
    with pytest.raises(CheckpointError, match=message) as refused:
        read_target(str(folder))
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"block_size": 10**9}, "block_size: .*less than or equal to 1024"),
        ({"num_hidden_layers": 10**9}, "num_layers: expected 1 to 1024"),
        ({"markov_rank": 10**15}, "markov_head.markov_w1.weight has shape"),
    ],
)
def test_sizes_that_no_drafter_has_are_named(tmp_path: Path, extra: dict, message: str) -> None:
    target = write_target(tmp_path / "target")
    drafter = write_drafter(tmp_path / "drafter", target, config_extra=extra)
    with pytest.raises(CheckpointError, match=message):
        read_drafter(str(drafter), read_target(str(target)))


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize(
    "values",
    [
        {"eos_token": 5},
        {"eos_token": {}},
        {"eos_token": []},
        {"chat_template": 7},
        {"chat_template": [1]},
        {"bos_token": {"a": 1}},
    ],
)
def test_odd_entries_of_the_tokenizer_files_do_not_stop_the_reading(tmp_path: Path, file: str, values: dict) -> None:
    folder = write_target(tmp_path, vocab_size=320, tokenizer=True)
    (folder / file).write_text(json.dumps(values))
    assert read_target(str(folder)).spec.eos_token_ids[:2] == (2, 3)


def gguf_bytes(num_tensors: int, num_keys: int, *rest: bytes, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys) + b"".join(rest)


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


U8, STRING, ARRAY = 0, 8, 9


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (gguf_bytes(0, 1, string(b"k"), struct.pack("<IIQ", ARRAY, U8, 2**62)), "elements of an array"),
        (gguf_bytes(0, 1, string(b"k"), struct.pack("<IIQ", ARRAY, STRING, 2**40)), "elements of an array"),
        (gguf_bytes(0, 1, string(b"k"), struct.pack("<IIQ", ARRAY, ARRAY, 1) * 1000), "an array of elements of type 9"),
        (
            gguf_bytes(0, 1, string(b"k"), struct.pack("<IIQ", ARRAY, 77, 1), bytes(8)),
            "an array of elements of type 77",
        ),
        (gguf_bytes(0, 1, string(b"k"), struct.pack("<I", 77), bytes(8)), "a value of type 77"),
        (gguf_bytes(0, 1, struct.pack("<Q", 2**63), bytes(8)), "bytes of a string"),
        (gguf_bytes(0, 2**60), "metadata keys"),
        (gguf_bytes(2**60, 0), "tensors"),
        (gguf_bytes(0, 0, version=1), "version 1"),
        (gguf_bytes(0, 0, version=3 << 24), "version"),
        (b"GGUF", "unpack_from"),
        (b"GGML" + bytes(60), "does not begin with GGUF"),
        (b"", "empty file"),
    ],
)
def test_a_gguf_header_that_leads_out_of_the_file_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"not a complete GGUF file \(.*{message}"):
        read_target(str(file))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("block_count", 4_000_000_000, "num_layers: expected 1 to 1024, found 4000000000"),
        ("attention.head_count", 0, "attention.head_count: expected positive numbers"),
        ("attention.head_count", "four", "attention.head_count: expected positive numbers"),
        ("embedding_length", 0, "embedding_length"),
        ("feed_forward_length", "x", "wrong type"),
        ("attention.layer_norm_rms_epsilon", float("inf"), "rms_norm_eps: expected a positive number, found inf"),
        ("attention.layer_norm_rms_epsilon", "tiny", "wrong type"),
        ("rope.freq_base", float("nan"), "rope theta: expected a positive number"),
    ],
)
def test_hyperparameters_that_no_model_has_are_named(tmp_path: Path, key: str, value: object, message: str) -> None:
    folder = write_target(tmp_path / "target")
    file = write_gguf(tmp_path / "model.gguf", folder, metadata={key: value})
    with pytest.raises(CheckpointError, match=message):
        read_target(str(file))


@pytest.mark.parametrize(
    ("extra", "suffixes", "name"),
    [
        ({"quantization_config": {"quant_method": "bitsandbytes", "bits": 4}}, (), "'bitsandbytes'"),
        ({"quantization_config": {"quant_method": "modelopt"}}, (), "'modelopt'"),
        ({"quantization": {"group_size": 64, "bits": 4}}, (), "MLX"),
        ({}, ("qweight", "qzeros", "scales", "g_idx"), "GPTQ"),
        ({}, ("qweight", "qzeros", "scales"), "AWQ"),
        ({}, ("weight", "scales", "biases"), "MLX"),
        ({}, ("weight_packed", "weight_scale"), "compressed-tensors"),
        ({}, ("weight", "weight_scale_inv"), "block-scaled FP8"),
        ({}, ("weight", "weight.absmax", "weight.quant_map"), "bitsandbytes 4-bit"),
        ({}, ("weight", "SCB"), "bitsandbytes 8-bit"),
    ],
)
def test_quantised_weights_are_refused_by_the_name_of_their_form(
    tmp_path: Path, extra: dict, suffixes: tuple[str, ...], name: str
) -> None:
    folder = write_target(tmp_path, config_extra=extra)
    if suffixes:
        entries = {f"model.layers.0.mlp.up_proj.{end}": ([1], [4 * i, 4 * i + 4]) for i, end in enumerate(suffixes)}
        write_safetensors(folder, header(**entries))
    with pytest.raises(CheckpointError, match=rf"{name}.* not supported; use the unquantised checkpoint"):
        read_target(str(folder))

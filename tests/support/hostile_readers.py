"""What reads files and requests of strangers, each as one function of bytes: it reads or refuses them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dspark_trt.building.manifest import hash_key, is_stage_folder, read_manifest
from dspark_trt.building.recipe import load_recipe
from dspark_trt.calibration.file import load_calibration
from dspark_trt.calibration.given import read_given
from dspark_trt.calibration.prompts import read_prompts
from dspark_trt.checkpoints.drafter import read_drafter
from dspark_trt.checkpoints.safetensors_store import open_safetensors
from dspark_trt.checkpoints.target import read_target
from dspark_trt.checkpoints.tokenizer import write_tokenizer
from dspark_trt.errors import DSparkError
from dspark_trt.runtime.request import SamplingParams, validate
from dspark_trt.server.openai.body import parse_json_object
from dspark_trt.server.openai.errors import ApiError
from dspark_trt.server.openai.generate import read_fields
from dspark_trt.server.openai.messages import chat_messages
from dspark_trt.server.openai.requests import ChatRequest, CompletionRequest
from dspark_trt.server.openai.validation import read_request as read_openai_request
from dspark_trt.serving.adapter import read_request
from dspark_trt.serving.preprocess import preprocess
from dspark_trt.steptable.table import StepTable
from dspark_trt.text import TextCodec
from tests.support.factories import write_drafter, write_target
from tests.support.gguf_factory import write_gguf
from tests.support.toy_engines import letters

MAX_MESSAGE_CHARACTERS = 3000
_NUMPY_TYPES: dict[str, Any] = {
    "BOOL": np.bool_,
    "FP32": np.float32,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT64": np.uint64,
}


class Readers:
    """The readers by name. Each returns whether it took what it was given; anything but a refusal is raised."""

    def __init__(self, folder: Path) -> None:
        self.target = write_target(folder / "target", vocab_size=320, tokenizer=True)
        self.drafter = write_drafter(folder / "drafter", self.target)
        self.gguf = write_gguf(folder / "model.gguf", self.target).read_bytes()
        self.scratch = folder / "scratch"
        self.scratch.mkdir()
        write_tokenizer(str(self.target), folder / "tokenizer")
        self._codec = TextCodec.load(folder / "tokenizer")
        self._target = read_target(str(self.target))
        self.by_name: dict[str, Callable[[bytes], object]] = {
            "safetensors": self.read_safetensors,
            "gguf": self.read_gguf,
            "target_config": self.read_target_config,
            "drafter_config": self.read_drafter_config,
            "tokenizer": self.read_tokenizer,
            "recipe": self.read_recipe,
            "step_table": self.read_step_table,
            "manifest": self.read_manifest,
            "calibration": self.read_calibration,
            "given_calibration": self.read_given_calibration,
            "prompts": self.read_prompts,
            "engine_request": self.read_engine_request,
            "prompt": self.read_prompt,
            "body": self.read_body,
        }

    def take(self, name: str, data: bytes) -> bool:
        try:
            self.by_name[name](data)
        except (DSparkError, ApiError) as error:
            refusal = str(error)
        else:
            return True
        assert 0 < len(refusal) < MAX_MESSAGE_CHARACTERS, refusal[:200]
        return False

    def read_safetensors(self, data: bytes) -> None:
        (self.scratch / "model.safetensors").write_bytes(data)
        store = open_safetensors(self.scratch, str)
        for name in store.names():
            if store.info(name).dtype in ("float32", "float16", "bfloat16"):
                assert store.array(name).shape == store.info(name).shape

    def read_gguf(self, data: bytes) -> None:
        path = self.scratch / "model.gguf"
        path.write_bytes(data)
        target = read_target(str(path))
        for name in target.weights.names():
            target.weights.array(name)

    def read_target_config(self, data: bytes) -> None:
        folder = self._beside(self.target, "config.json", data)
        read_target(str(folder))

    def read_drafter_config(self, data: bytes) -> None:
        folder = self._beside(self.drafter, "config.json", data)
        read_drafter(str(folder), self._target)

    def read_tokenizer(self, data: bytes) -> None:
        folder = self._beside(self.target, "tokenizer_config.json", data)
        write_tokenizer(str(folder), self.scratch / "tokenizer")
        TextCodec.load(self.scratch / "tokenizer").encode_prompt("a prompt")

    def read_recipe(self, data: bytes) -> None:
        path = self.scratch / "recipe.yaml"
        path.write_bytes(data)
        hash_key(load_recipe(path, {"target": "a", "drafter": "b"}).model_dump(mode="json"))

    def read_step_table(self, data: bytes) -> None:
        path = self.scratch / "step_table.json"
        path.write_bytes(data)
        StepTable.load(path)

    def read_manifest(self, data: bytes) -> None:
        (self.scratch / "manifest.json").write_bytes(data)
        is_stage_folder(self.scratch)
        read_manifest(self.scratch)

    def read_calibration(self, data: bytes) -> None:
        path = self.scratch / "calibration.json"
        path.write_bytes(data)
        load_calibration(path)

    def read_given_calibration(self, data: bytes) -> None:
        path = self.scratch / "given.json"
        path.write_bytes(data)
        read_given(path, gamma=3)

    def read_prompts(self, data: bytes) -> None:
        path = self.scratch / "prompts.jsonl"
        path.write_bytes(data)
        read_prompts(path)

    def read_engine_request(self, data: bytes) -> None:
        """`data`: a JSON object of tensors, each a pair of type and nested list."""
        tensors = {name: _tensor(*pair) for name, pair in json.loads(data).items()}
        prompt = {"input_ids": np.array([[3, 4, 5]]), "input_lengths": np.array([[3]])}
        tensors = {**prompt, "request_output_len": np.array([[9]]), **tensors}
        request = read_request(
            tensors,
            (),
            handle=17,
            client_id="mine",
            decode=lambda ids: self._codec.decode(ids) or letters([0]),
            make_sampling=lambda **given: SamplingParams(**{name: v for name, v in given.items() if v is not None}),
        )
        validate(request.generation_request, vocab_size=320, max_seq_len=64)
        assert math.isfinite(request.generation_request.sampling.temperature)

    def read_prompt(self, data: bytes) -> None:
        """`data`: as for an engine's request; the tensors are those of preprocessing."""
        tensors = {name: _tensor(*pair) for name, pair in json.loads(data).items()}
        preprocess({"QUERY": _tensor("STRING", [[""]]), **tensors}, (), self._codec, max_seq_len=64)

    def read_body(self, data: bytes) -> None:
        """A body of the front end is read as each kind of request; taken when all take it."""
        body = parse_json_object(data)
        refusal: Exception | None = None
        for read in (_read_chat, _read_completion, lambda values: read_fields(values, streams=True)):
            try:
                read(body)
            except ApiError as error:
                refusal = error
        if refusal is not None:
            raise refusal

    def _beside(self, source: Path, name: str, data: bytes) -> Path:
        """The folder `source` with another file `name`."""
        folder = self.scratch / f"{source.name}-{name}"
        if not folder.exists():
            folder.mkdir()
            for path in source.iterdir():
                if path.name != name:
                    (folder / path.name).hardlink_to(path)
        (folder / name).write_bytes(data)
        return folder


def _read_chat(body: dict[str, Any]) -> None:
    chat_messages(read_openai_request(ChatRequest, body, "m").messages)


def _read_completion(body: dict[str, Any]) -> None:
    read_openai_request(CompletionRequest, body, "m")


def _tensor(data_type: str, values: Any) -> np.ndarray:
    if data_type == "STRING":
        flat = [[value.encode("utf-8", "surrogatepass") for value in row] for row in values]
        return np.array(flat, dtype=np.object_).reshape(len(flat), -1)
    return np.array(values, dtype=_NUMPY_TYPES[data_type])

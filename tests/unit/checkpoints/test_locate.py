"""Folders, files and hub ids: what is found offline in the hub's cache, and what is said when something is not."""

from __future__ import annotations

import json
import os
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar
from urllib.parse import unquote

import pytest
from huggingface_hub import constants

from dspark_trt.checkpoints.locate import locate, source_files
from dspark_trt.checkpoints.target import read_target
from dspark_trt.errors import CheckpointError, EnvironmentMissingError
from tests.support.factories import write_target

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, with the hub out of reach."""
    cache = tmp_path / "hub"
    cache.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return cache


def put_into_cache(cache: Path, repository: str, folder: Path) -> Path:
    """Lay `folder` out as the hub client does: blobs, and a snapshot of symlinks to them."""
    root = cache / f"models--{repository.replace('/', '--')}"
    snapshot = root / "snapshots" / COMMIT
    for path in (root / "refs", root / "blobs", snapshot):
        path.mkdir(parents=True)
    (root / "refs" / "main").write_text(COMMIT)
    for index, file in enumerate(sorted(folder.iterdir())):
        blob = root / "blobs" / f"blob{index}"
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_hub_id_is_read_from_the_cache_when_offline(tmp_path: Path, hub_cache: Path, revision: str | None) -> None:
    snapshot = put_into_cache(hub_cache, "owner/tiny", write_target(tmp_path / "source", shards=2))
    target = read_target("owner/tiny", revision)
    assert target.spec == read_target(str(tmp_path / "source")).spec
    assert locate("owner/tiny", revision) == snapshot


def test_hub_id_that_is_not_cached_is_an_environment_error_when_offline(hub_cache: Path) -> None:
    with pytest.raises(
        EnvironmentMissingError, match=r"hub model owner/absent: the hub cannot be reached.*hf download"
    ):
        locate("owner/absent")


def test_unreachable_hub_is_an_environment_error(hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # the discard port: refused at once
    with pytest.raises(EnvironmentMissingError, match="hub model owner/absent: the hub cannot be reached"):
        locate("owner/absent")


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (404, "RepoNotFound", "owner/absent at revision v2 does not exist or is private.*hf auth login"),
        (404, "RevisionNotFound", "owner/absent at revision v2: no such revision"),
        (403, "GatedRepo", "owner/absent at revision v2 is gated: accept its terms"),
    ],
)
def test_answers_of_the_hub_become_checkpoint_errors(
    hub_cache: Path, monkeypatch: pytest.MonkeyPatch, status: int, code: str, message: str
) -> None:
    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        try:
            with pytest.raises(CheckpointError, match=message):
                locate("owner/absent", "v2")
        finally:
            server.shutdown()
            thread.join()


def test_revision_that_is_not_cached_is_an_environment_error_when_offline(tmp_path: Path, hub_cache: Path) -> None:
    put_into_cache(hub_cache, "owner/tiny", write_target(tmp_path / "source"))
    with pytest.raises(EnvironmentMissingError, match="hub model owner/tiny at revision v2: the hub cannot be reached"):
        locate("owner/tiny", "v2")


def test_cached_snapshot_without_weights_is_an_error_that_names_them(tmp_path: Path, hub_cache: Path) -> None:
    source = write_target(tmp_path / "source")
    (source / "model.safetensors").unlink()
    put_into_cache(hub_cache, "owner/tiny", source)
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        read_target("owner/tiny")


@pytest.mark.parametrize(
    "source", ["./absent", "/absent/folder", "a/b/c", "absent.gguf", "owner/absent.gguf", "owner/", "-x/y"]
)
def test_path_that_does_not_exist_is_never_looked_up_on_the_hub(hub_cache: Path, source: str) -> None:
    with pytest.raises(CheckpointError, match="does not exist; give a checkpoint folder"):
        read_target(source)


def test_name_that_the_hub_refuses_is_a_checkpoint_error(hub_cache: Path) -> None:
    with pytest.raises(CheckpointError, match="neither a local path nor a hub id"):
        locate("owner/a--b")


def test_revision_of_a_local_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is a local path, and revision 'main' was given"):
        locate(str(write_target(tmp_path)), "main")


def test_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    file = write_target(tmp_path) / "model.safetensors"
    with pytest.raises(CheckpointError, match=r"expected a checkpoint folder, a \.gguf file or a hub id"):
        locate(str(file))


def test_folder_without_configuration_says_what_a_checkpoint_is(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json; expected a Hugging Face checkpoint folder"):
        read_target(str(tmp_path))


def test_source_files_are_all_that_the_build_depends_on(tmp_path: Path) -> None:
    folder = write_target(tmp_path, shards=2, tokenizer=True, vocab_size=300)
    assert {file.name for file in source_files(folder)} == {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's API as a download takes, for the files of one folder; `fetched` are those that were."""

    folder: Path
    fetched: ClassVar[set[str]]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(self.path.split("?")[0])
        if path.startswith("/api/models/"):
            files = sorted(self.folder.iterdir())
            values: object = {
                "id": "owner/odd",
                "sha": COMMIT,
                "siblings": [{"rfilename": file.name} for file in files],
            }
            if "/tree/" in path:
                facts = [(file.name, file.stat().st_size) for file in files]
                values = [{"type": "file", "path": name, "size": size, "oid": name} for name, size in facts]
            self.answer(json.dumps(values).encode())
            return
        file = self.folder / path.rsplit("/", 1)[1]
        if not file.is_file():
            self.send_error(404)
            return
        if self.command == "GET":
            self.fetched.add(file.name)
        self.answer(file.read_bytes(), ETag=f'"{file.name}"', X_Repo_Commit=COMMIT)

    def answer(self, body: bytes, **headers: str) -> None:
        self.send_response(200)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.mark.parametrize("name", ["model.safetensors-{}-of-2.safetensors", "part[{}]*?.safetensors", "{}"])
def test_shards_of_a_hub_model_are_those_that_its_index_lists(
    tmp_path: Path, hub_cache: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = write_target(tmp_path / "odd", shards=2)
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    renamed = {old: name.format(number) for number, old in enumerate(sorted(set(weight_map.values())))}
    for old, new in renamed.items():
        (folder / old).rename(folder / new)
    index.write_text(json.dumps({"weight_map": {tensor: renamed[file] for tensor, file in weight_map.items()}}))
    (folder / "consolidated.safetensors").write_bytes(b"the same weights again")
    monkeypatch.setattr(Hub, "folder", folder, raising=False)
    monkeypatch.setattr(Hub, "fetched", set(), raising=False)
    with HTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        endpoint = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        template = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        try:
            found = read_target("owner/odd")
        finally:
            server.shutdown()
            thread.join()
    assert found.weights.names() == read_target(str(folder)).weights.names()
    assert Hub.fetched == {"config.json", "generation_config.json", index.name, *renamed.values()}

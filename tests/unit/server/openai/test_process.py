"""What keeps a front end from starting is said before a server is started for it."""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path

import pytest

from dspark_trt.errors import EnvironmentMissingError, ManifestError, RecipeError
from dspark_trt.server.openai.process import check_front_end, listen
from dspark_trt.server.openai.settings import FrontEndOptions, front_end_options


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "fastapi" else found(name))
    with pytest.raises(EnvironmentMissingError, match=r"--openai-port needs the packages fastapi, .*pip install"):
        check_front_end(tmp_path, FrontEndOptions())


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(RecipeError, match=rf"--openai-port: cannot listen on 127.0.0.1 port {port}"):
            listen(FrontEndOptions(port))


def test_half_of_tls_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="--tls-certificate, --tls-key: expected both or neither"):
        check_front_end(tmp_path, FrontEndOptions(tls_key=tmp_path / "key.pem"))
    both = FrontEndOptions(tls_key=tmp_path / "key.pem", tls_certificate=tmp_path / "certificate.pem")
    with pytest.raises(RecipeError, match="--tls-certificate: expected a PEM file, found none"):
        check_front_end(tmp_path, both)


def test_a_folder_that_is_no_build_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ManifestError):
        check_front_end(tmp_path, FrontEndOptions())


def test_options_of_the_front_end_need_its_port(tmp_path: Path) -> None:
    assert front_end_options(None, None, None, None, None) is None
    with pytest.raises(RecipeError, match="--served-model-name, --tls-key: expected with --openai-port only"):
        front_end_options(None, "m", None, None, tmp_path)

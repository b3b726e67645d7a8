"""Which doors other machines may use; no release of Triton before 2.59.1 is shown to them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dspark_trt.errors import EnvironmentMissingError, RecipeError
from dspark_trt.server import exposure
from dspark_trt.server.exposure import BUNDLED_VERSION, confine, is_fixed, is_loopback, server_version
from dspark_trt.server.openai.settings import FrontEndOptions
from dspark_trt.server.options import ServeOptions
from dspark_trt.server.server_tree import ServerTree, find_server

FRONT_END = FrontEndOptions(9000)
OUTSIDE = ServeOptions(address="0.0.0.0")


@pytest.fixture
def fixed_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposure, "find_server", lambda: ServerTree(Path("/opt/tritonserver")))
    monkeypatch.setattr(exposure, "server_version", lambda tree: "2.60.0")


@pytest.mark.parametrize("address", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_this_machine_alone_needs_no_check(address: str) -> None:
    assert is_loopback(address)
    options, front_end = confine(ServeOptions(address=address), FRONT_END)
    assert options.address == address
    assert front_end is not None
    assert front_end.address == address


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "10.0.0.1", "example.org"])
def test_addresses_of_others(address: str) -> None:
    assert not is_loopback(address)


@pytest.mark.parametrize("front_end", [None, FRONT_END])
def test_metrics_of_an_old_server_are_not_shown_either(front_end: FrontEndOptions | None) -> None:
    """Its port for metrics parses HTTP with the same code."""
    with pytest.raises(RecipeError, match=r"--metrics-address 0.0.0.0: the tritonserver here is 2.51.0"):
        confine(ServeOptions(metrics_address="0.0.0.0"), front_end)


def test_metrics_of_a_fixed_server_may_be_shown_alone(fixed_server: None) -> None:
    options = ServeOptions(metrics_address="0.0.0.0")
    assert confine(options, None) == (options, None)


def test_an_old_server_is_not_shown_to_other_machines() -> None:
    with pytest.raises(RecipeError, match=r"--address 0.0.0.0: the tritonserver here is 2.51.0.*--openai-port 9000"):
        confine(OUTSIDE, None)


def test_before_an_old_server_only_the_front_end_is_shown() -> None:
    options, front_end = confine(OUTSIDE, FRONT_END)
    assert options.address == "127.0.0.1"
    assert front_end is not None
    assert front_end.address == "0.0.0.0"


def test_a_fixed_server_may_be_shown(fixed_server: None) -> None:
    assert confine(OUTSIDE, None) == (OUTSIDE, None)


@pytest.mark.parametrize(
    ("version", "expected"),
    [("2.59.1", True), ("2.73.0", True), ("3.0.0", True), ("2.60.0-rc1", True), ("2.59.0", False), ("2.9.9", False)],
)
def test_versions_are_compared_as_numbers(version: str, expected: bool) -> None:
    assert is_fixed(version) is expected


@pytest.mark.parametrize("version", ["", "unknown", "2.x"])
def test_a_version_that_cannot_be_read_is_old(version: str) -> None:
    assert not is_fixed(version)


@pytest.mark.triton
def test_a_server_on_the_path_is_asked_for_its_version() -> None:
    """The bundled server, as if it were one on PATH: started without a model, it says what it is."""
    bundled = find_server()
    assert server_version(bundled) == BUNDLED_VERSION
    assert server_version(ServerTree(bundled.executable)) == BUNDLED_VERSION


def test_a_server_that_does_not_start_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "tritonserver"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(EnvironmentMissingError, match="does not say its version"):
        server_version(ServerTree(broken))

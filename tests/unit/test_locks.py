"""S9: `make` installs what the locks name, and they name all that pyproject.toml asks for."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import requires, version
from pathlib import Path

import pytest
from bill_of_materials import bill_of_materials, locked_wheels, read_lock
from lock import CPU_BUILDS
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from dspark_trt.server import server_tree

REPOSITORY = Path(__file__).parents[2]
LOCKS = sorted((REPOSITORY / "locks").glob("*.txt"))
PYTHONS = ["3.11", "3.12", "3.13"]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
WANTED = {
    "serve": [
        *PROJECT["project"]["dependencies"],
        *(
            line
            for extra in ("onnxruntime", "client", "openai")
            for line in PROJECT["project"]["optional-dependencies"][extra]
        ),
        *PROJECT["dependency-groups"]["install"],
    ],
    "test": [
        *PROJECT["project"]["dependencies"],
        *(
            line
            for extra, lines in PROJECT["project"]["optional-dependencies"].items()
            if extra != "tensorrt"
            for line in lines
        ),
        *PROJECT["dependency-groups"]["dev"],
        *PROJECT["dependency-groups"]["torch-needs"],
    ],
    "torch": [line for line in PROJECT["project"]["optional-dependencies"]["reference"] if line.startswith("torch==")],
    "kernels": PROJECT["dependency-groups"]["kernels"],
    "uv": PROJECT["dependency-groups"]["lock"],
}


def lock(name: str) -> Path:
    return REPOSITORY / "locks" / f"{name}.txt"


def under(python: str) -> dict[str, str]:
    return {
        "python_version": python,
        "python_full_version": f"{python}.1",
        "sys_platform": "linux",
        "platform_machine": "x86_64",
    }


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.stem)
def test_lock_pins_every_entry_by_version_and_sha256_and_names_no_place(path: Path) -> None:
    for requirement, hashes in read_lock(path):
        assert [specifier.operator for specifier in requirement.specifier] == ["=="], requirement
        assert hashes, requirement
    words = "\n".join(line for line in path.read_text().splitlines() if not line.startswith("#"))
    assert not re.search(r"://|--index|--find-links|--extra|(^|\s)[./~]\S*/", words)


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("name", WANTED)
def test_lock_fits_what_the_project_asks_for(name: str, python: str) -> None:
    """Otherwise run `make lock`."""
    pins = {
        canonicalize_name(requirement.name): next(iter(requirement.specifier)).version
        for requirement, _ in read_lock(lock(name))
        if requirement.marker is None or requirement.marker.evaluate(under(python))
    }
    for line in WANTED[name]:
        wanted = Requirement(line)
        if wanted.name != "torch" or name == "torch":
            assert wanted.specifier.contains(pins[canonicalize_name(wanted.name)], prereleases=True), wanted


def test_lock_of_torch_names_the_builds_of_both_indexes() -> None:
    """PyPI has those for CUDA, PyTorch's own index those for a CPU; pip takes the one whose sha256 stands here."""
    ((requirement, hashes),) = read_lock(lock("torch"))
    (pin,) = requirement.specifier
    of_cpu = CPU_BUILDS[pin.version]
    assert len(of_cpu) == len(PYTHONS)
    assert set(of_cpu) < set(hashes)
    assert version("torch").split("+")[0] == pin.version


def test_locks_name_what_the_installed_build_of_torch_needs() -> None:
    """Its build for CUDA needs CUDA's libraries, and a triton in place of which `kernels` has its own."""
    locked = {
        canonicalize_name(wheel.package) for name in ("test", "kernels", "cuda") for wheel in locked_wheels(lock(name))
    }
    needed = [Requirement(line) for line in requires("torch") or []]
    assert {
        canonicalize_name(each.name) for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})
    } <= locked


@pytest.mark.parametrize("name", ["serve", "test", "kernels"])
def test_what_is_installed_here_is_what_the_lock_names(name: str) -> None:
    for wheel in locked_wheels(lock(name)):
        assert version(wheel.package) == wheel.version, f"{wheel.package}: run `make venv`"


@pytest.mark.parametrize("name", ["serve", "test"])
def test_lock_names_what_its_packages_need(name: str) -> None:
    """It is installed without looking at dependencies."""
    locked = {canonicalize_name(wheel.package): wheel for wheel in locked_wheels(lock(name))}
    for wheel in locked.values():
        for line in requires(wheel.package) or []:
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                assert canonicalize_name(needed.name) in locked.keys() | {"torch"}, f"{wheel} needs {needed}"


def test_bill_of_materials_names_every_file_that_serving_may_install_or_unpack() -> None:
    bill = bill_of_materials()
    listed = {component["purl"]: component for component in bill["components"]}
    wheels = [*locked_wheels(lock("serve")), server_tree.WHEEL, server_tree.NUMPY]
    assert listed.keys() == {f"pkg:pypi/{wheel.package}@{wheel.version}" for wheel in wheels}
    for wheel in wheels:
        component = listed[f"pkg:pypi/{wheel.package}@{wheel.version}"]
        (files,) = component["externalReferences"]
        assert {entry["content"] for entry in files["hashes"]} == set(wheel.sha256)
        assert component["licenses"], f"{wheel} says nothing of its licence"

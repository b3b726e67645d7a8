"""Known vulnerabilities of what is locked: found in a copy of the advisories, without a network."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import audit
import pytest
import yaml
from audit import Package, locked_packages, main, read_advisories
from bill_of_materials import bill_of_materials

NUMPY = Package("numpy", "2.1.0")


def advisory(name: str = "numpy", *, id: str = "PYSEC-2026-1", **affected: Any) -> dict[str, Any]:
    package = {"ecosystem": "PyPI", "name": name}
    return {"id": id, "modified": "2026-11-02T00:00:00Z", "affected": [{"package": package, **affected}]}


def released(*events: dict[str, str]) -> dict[str, Any]:
    return {"ranges": [{"type": "ECOSYSTEM", "events": list(events)}]}


@pytest.mark.parametrize(
    ("affected", "is_found"),
    [
        (released({"introduced": "0"}), True),
        (released({"introduced": "0"}, {"fixed": "2.1.1"}), True),
        (released({"introduced": "0"}, {"fixed": "2.1.0"}), False),
        (released({"introduced": "0"}, {"last_affected": "2.1"}), True),  # 2.1 and 2.1.0 are one release
        (released({"introduced": "0"}, {"last_affected": "2.0.9"}), False),
        (released({"introduced": "2.1.0"}), True),
        (released({"introduced": "2.1.0.post1"}), False),
        (released({"introduced": "1"}, {"fixed": "2"}, {"introduced": "2.1.0rc1"}, {"fixed": "2.2"}), True),
        (released({"fixed": "2"}, {"introduced": "2.0.5"}, {"introduced": "0"}), True),  # in any order
        ({"versions": ["2.0.0", "2.1.0"]}, True),
        ({"versions": ["2.0.0"]}, False),
        ({"ranges": [{"type": "GIT", "events": [{"introduced": "0"}]}]}, False),
    ],
)
def test_a_release_is_affected_as_osv_says(affected: dict[str, Any], is_found: bool) -> None:
    found = audit.audit([NUMPY], [advisory(**affected)])
    assert [finding.package for finding in found] == [NUMPY] * is_found


def test_other_packages_ecosystems_and_withdrawn_advisories_are_passed_over() -> None:
    everywhere = released({"introduced": "0"})
    of_npm = advisory(**everywhere)
    of_npm["affected"][0]["package"]["ecosystem"] = "npm"
    withdrawn = {**advisory(**everywhere), "withdrawn": "2026-01-01T00:00:00Z"}
    assert audit.audit([NUMPY], [of_npm, withdrawn, advisory("num-py", **everywhere)]) == []


def test_names_are_compared_in_the_normal_form_of_pypi() -> None:
    (found,) = audit.audit([Package("ml-dtypes", "0.5.0")], [advisory("ML_dtypes", **released({"introduced": "0"}))])
    assert found.package.name == "ml-dtypes"


def test_one_fault_of_several_databases_is_named_once_with_its_fix() -> None:
    ours = {**advisory(**released({"introduced": "0"}, {"fixed": "2.2"})), "aliases": ["CVE-2026-5"], "summary": "a b"}
    theirs = {**advisory(id="GHSA-x", **released({"introduced": "0"})), "aliases": ["CVE-2026-5", "PYSEC-2026-1"]}
    (found,) = audit.audit([NUMPY], [ours, theirs])
    assert str(found) == "numpy 2.1.0: PYSEC-2026-1, CVE-2026-5; fixed in 2.2; a b"


@pytest.mark.parametrize("form", ["zip of JSON", "folder of YAML"])
def test_a_copy_of_the_advisories_is_read(tmp_path: Path, form: str) -> None:
    given = advisory(**released({"introduced": "0"}))
    if form == "zip of JSON":
        path = tmp_path / "all.zip"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("PYSEC-2026-1.json", json.dumps(given))
            archive.writestr("readme.txt", "no advisory")
    else:
        path = tmp_path
        (tmp_path / "numpy").mkdir()
        (tmp_path / "numpy" / "PYSEC-2026-1.yaml").write_text(yaml.safe_dump(given))
    assert list(read_advisories(path)) == [given]


@pytest.fixture
def bill(tmp_path: Path) -> Path:
    path = tmp_path / "bom.json"
    path.write_text(json.dumps(bill_of_materials()))
    return path


def test_locks_and_bill_are_all_asked_about(bill: Path) -> None:
    locks = (audit.REPOSITORY / "locks").glob("*.txt")
    names = {package.name for package in locked_packages(locks, bill)}
    assert {"torch", "nvidia-cublas", "onnxruntime", "mypy", "uv", "triton", "nvidia-pytriton"} <= names


def test_the_command_ends_with_what_it_found(
    bill: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a copy at hand nothing is fetched."""
    monkeypatch.setattr(audit.urllib.request, "urlopen", None)
    folder = tmp_path / "advisories"
    folder.mkdir()
    (folder / "a.json").write_text(json.dumps(advisory("nvidia-pytriton", **released({"introduced": "0"}))))
    arguments = [f"--bill={bill}", f"--advisories={folder}"]
    assert main(arguments) == 4
    output = capsys.readouterr().out
    assert "against 1 advisories, the newest of 2026-11-02" in output
    assert "nvidia-pytriton 0.7.0: PYSEC-2026-1; no fixed release is named" in output
    assert main([*arguments, "--ignore=PYSEC-2026-1"]) == 0


@pytest.mark.parametrize("content", [None, "[]", "{", '{"no": "id"}'])
def test_without_advisories_it_does_not_say_that_all_is_well(
    bill: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    folder = tmp_path / "advisories"
    folder.mkdir()
    if content is not None:
        (folder / "a.json").write_text(content)
    assert main([f"--bill={bill}", f"--advisories={folder}"]) == 3
    assert "advisor" in capsys.readouterr().err


def test_without_a_network_the_refusal_says_what_to_do(
    bill: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(audit.urllib.request, "urlopen", refuse)
    monkeypatch.setattr(audit, "REPOSITORY", tmp_path)
    assert main([f"--bill={bill}"]) == 3
    assert "no advisories (no network); without a network: --advisories" in capsys.readouterr().err

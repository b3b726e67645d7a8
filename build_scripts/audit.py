"""Say which packages that we lock or bundle have a known vulnerability, by advisories in OSV's form.

    make audit                               # with those for PyPI that osv.dev publishes: a download
    make audit ADVISORIES=all.zip            # without a network: that file, or a folder, of JSON or YAML
    make audit IGNORE="--ignore=GHSA-..."    # leave out what was looked into

Every entry of locks/*.txt, whatever Python it is for, and every component of build/bom.json, the wheels that `serve`
unpacks among them. A folder may be a copy of github.com/pypa/advisory-database. Exit code 4 when something is found, 3
without advisories.

Source of the form: https://ossf.github.io/osv-schema/ ("affected" and its evaluation).
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import urllib.request
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from bill_of_materials import read_lock
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

REPOSITORY = Path(__file__).parents[1]
PUBLISHED = "https://osv-vulnerabilities.storage.googleapis.com/PyPI/all.zip"
_TIMEOUT_S = 60.0
_MAX_ADVISORY_BYTES = 8 << 20
_SUFFIXES = {".json", ".yaml", ".yml"}


@dataclass(frozen=True, slots=True, order=True)
class Package:
    """One release of a package; the name in PyPI's normal form."""

    name: str
    version: str


@dataclass(frozen=True, slots=True)
class Finding:
    """A release that an advisory says is affected."""

    package: Package
    ids: tuple[str, ...]  # the advisory's own, then those that others gave to the same fault
    fixed_in: tuple[str, ...]
    summary: str

    def __str__(self) -> str:
        fix = f"fixed in {', '.join(self.fixed_in)}" if self.fixed_in else "no fixed release is named"
        return f"{self.package.name} {self.package.version}: {', '.join(self.ids)}; {fix}; {self.summary}"


def locked_packages(locks: Iterable[Path], bill: Path) -> set[Package]:
    """Every release that a lock or a bill of materials (CycloneDX) names."""
    packages = set()
    for lock in locks:
        for requirement, _ in read_lock(lock):
            (pin,) = requirement.specifier
            packages.add(Package(canonicalize_name(requirement.name), pin.version))
    for component in json.loads(bill.read_text())["components"]:
        packages.add(Package(canonicalize_name(component["name"]), component["version"]))
    return packages


def read_advisories(path: Path) -> Iterator[dict[str, Any]]:
    """Every advisory of a zip file or below a folder. Raises ValueError for a file that is none, with its name."""
    for name, text in _files(path):
        try:
            found = json.loads(text) if name.endswith(".json") else yaml.load(text, Loader=yaml.CSafeLoader)
        except (ValueError, RecursionError, yaml.YAMLError) as error:
            raise ValueError(f"{name}: not JSON or YAML ({error})") from None
        if not isinstance(found, dict) or not isinstance(found.get("id"), str):
            raise ValueError(f"{name}: expected an advisory in OSV's form, found no id")
        yield found


def _files(path: Path) -> Iterator[tuple[str, str]]:
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            if file.suffix in _SUFFIXES and file.is_file():
                yield str(file), file.read_text(encoding="utf-8")
        return
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            if Path(member.filename).suffix not in _SUFFIXES:
                continue
            if member.file_size > _MAX_ADVISORY_BYTES:
                raise ValueError(f"{path}: {member.filename} has {member.file_size} bytes; no advisory is that long")
            yield member.filename, archive.read(member).decode("utf-8")


def audit(packages: Iterable[Package], advisories: Iterable[Mapping[str, Any]]) -> list[Finding]:
    """What is affected, each fault once, however many databases describe it."""
    by_name: dict[str, list[Package]] = {}
    for package in packages:
        by_name.setdefault(package.name, []).append(package)
    findings: list[Finding] = []
    for advisory in advisories:
        if advisory.get("withdrawn"):
            continue
        for affected in advisory.get("affected") or ():
            described = affected.get("package") or {}
            if described.get("ecosystem") != "PyPI":
                continue
            for package in by_name.get(canonicalize_name(described.get("name", "")), ()):
                if _is_affected(package.version, affected):
                    findings.append(_finding(package, advisory, affected))
    return sorted(_each_once(findings), key=lambda finding: (finding.package, finding.ids))


def _is_affected(version: str, affected: Mapping[str, Any]) -> bool:
    if version in (affected.get("versions") or ()):
        return True
    ranges = (each for each in affected.get("ranges") or () if each.get("type") == "ECOSYSTEM")
    return any(_is_within(Version(version), each.get("events") or ()) for each in ranges)


def _is_within(version: Version, events: Iterable[Mapping[str, str]]) -> bool:
    """A range begins with `introduced`, and ends before `fixed` or behind `last_affected`; several may follow."""
    is_within = False
    for at, kind in sorted((_version(text), kind) for event in events for kind, text in event.items()):
        if kind == "introduced" and at <= version:
            is_within = True
        elif (kind == "fixed" and at <= version) or (kind == "last_affected" and at < version):
            is_within = False
    return is_within


def _version(text: str) -> Version:
    """ "0" is before every release, its own pre-releases too."""
    try:
        return Version("0.dev0" if text == "0" else text)
    except InvalidVersion:
        raise ValueError(f"an advisory names the version {text!r}, which is none of PyPI's") from None


def _finding(package: Package, advisory: Mapping[str, Any], affected: Mapping[str, Any]) -> Finding:
    ids = (advisory["id"], *sorted(set(advisory.get("aliases") or ()) - {advisory["id"]}))
    events = [event for each in affected.get("ranges") or () for event in each.get("events") or ()]
    text = advisory.get("summary") or advisory.get("details") or ""
    return Finding(
        package, ids, tuple(event["fixed"] for event in events if "fixed" in event), " ".join(text.split())[:100]
    )


def _each_once(findings: Sequence[Finding]) -> Iterator[Finding]:
    seen: set[tuple[Package, str]] = set()
    for finding in findings:
        keys = {(finding.package, name) for name in finding.ids}
        if not keys & seen:
            yield finding
        seen |= keys


def fetch(destination: Path) -> Path:
    """The advisories that osv.dev publishes for PyPI, fetched anew. Raises OSError."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    partial = destination.with_suffix(".partial")
    with urllib.request.urlopen(PUBLISHED, timeout=_TIMEOUT_S) as answer, partial.open("wb") as file:
        shutil.copyfileobj(answer, file)
    return partial.replace(destination)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bill", type=Path, default=REPOSITORY / "build/bom.json", help="written by `make bom`")
    parser.add_argument("--advisories", type=Path, help="a zip file or a folder; nothing is fetched")
    parser.add_argument("--ignore", action="append", default=[], metavar="ID", help="of a fault that is known; repeat")
    options = parser.parse_args(arguments)
    packages = locked_packages(sorted((REPOSITORY / "locks").glob("*.txt")), options.bill)
    try:
        source = options.advisories or fetch(REPOSITORY / "build/advisories.zip")
        advisories = list(read_advisories(source))
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        print(f"error: no advisories ({error}); without a network: --advisories, see --help", file=sys.stderr)
        return 3
    if not advisories:
        print(f"error: {source} holds no advisory", file=sys.stderr)
        return 3
    newest = max(str(advisory.get("modified", "")) for advisory in advisories)[:10]
    print(f"{len(packages)} releases held against {len(advisories)} advisories, the newest of {newest}")
    found = [finding for finding in audit(packages, advisories) if not set(finding.ids) & set(options.ignore)]
    print("\n".join(map(str, found)) or "none has a known vulnerability")
    return 4 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Write what serving needs as a bill of materials: CycloneDX 1.6, JSON.

    make bom                     # build/bom.json

Every package of locks/serve.txt that this Python installs, and the wheels that `serve` unpacks, each with its version,
the sha256 of its files, and its licence where the package is installed and says it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from dspark_trt import __version__
from dspark_trt.server import server_tree
from dspark_trt.server.tool_cache import Wheel

LOCK = Path(__file__).parents[1] / "locks/serve.txt"
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


def read_lock(path: Path) -> Iterator[tuple[Requirement, list[str]]]:
    """Each entry of a lock: the pinned requirement, and the sha256 of the files that may be taken for it."""
    text = "\n".join(line for line in path.read_text().splitlines() if not line.startswith("#"))
    for entry in text.replace("\\\n", " ").splitlines():
        if entry.strip():
            yield Requirement(entry.split(" --hash=")[0]), _HASH.findall(entry)


def locked_wheels(path: Path) -> Iterator[Wheel]:
    """What a lock installs under this Python."""
    for requirement, hashes in read_lock(path):
        if requirement.marker is None or requirement.marker.evaluate():
            (pin,) = requirement.specifier
            yield Wheel(requirement.name, pin.version, tuple(hashes))


def bill_of_materials() -> dict[str, Any]:
    """The document: what is installed, then what `serve` unpacks."""
    components = [_component(wheel, _licences(wheel.package)) for wheel in locked_wheels(LOCK)]
    bundled = {server_tree.WHEEL: "Apache-2.0", server_tree.NUMPY: "BSD-3-Clause"}
    components += [_component(wheel, [licence]) for wheel, licence in bundled.items()]
    product = {"type": "application", "bom-ref": "dspark-trt", "name": "dspark-trt", "version": __version__}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": product | {"licenses": [{"expression": "Apache-2.0"}]}},
        "components": components,
        "dependencies": [{"ref": "dspark-trt", "dependsOn": [component["bom-ref"] for component in components]}],
    }


def _component(wheel: Wheel, licences: list[str]) -> dict[str, Any]:
    url = f"pkg:pypi/{wheel.package}@{wheel.version}"
    files = [{"alg": "SHA-256", "content": digest} for digest in wheel.sha256]
    component: dict[str, Any] = {
        "type": "library",
        "bom-ref": url,
        "name": wheel.package,
        "version": wheel.version,
        "purl": url,
        "externalReferences": [{"type": "distribution", "url": url, "hashes": files}],
    }
    return component | ({"licenses": [{"license": {"name": name}} for name in licences]} if licences else {})


def _licences(package: str) -> list[str]:
    """What the installed package says of its licence, in the newest of the three ways to say it."""
    try:
        said = metadata(package)
    except PackageNotFoundError:
        return []
    if expression := said.get("License-Expression"):
        return [expression]
    classifiers = [name for name in said.get_all("Classifier", []) if name.startswith("License ::")]
    text = said.get("License") or ""
    return [name.rsplit(" :: ", 1)[1] for name in classifiers] or ([text] if 0 < len(text) < 80 else [])


if __name__ == "__main__":
    output = Path(sys.argv[1])
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(bill_of_materials(), indent=1) + "\n")
    print(output)

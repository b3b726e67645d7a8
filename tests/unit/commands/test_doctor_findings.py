"""What `doctor` tells a person to do can be done, and is shown as it is written."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from dspark_trt.commands import doctor
from dspark_trt.commands.doctor import Finding, examine
from dspark_trt.commands.report import print_findings
from dspark_trt.machine.gpu import Gpu


def test_extras_to_install_are_not_taken_for_markup() -> None:
    written = io.StringIO()
    finding = Finding("onnxruntime", "missing", "not [here]", "pip install 'dspark-trt[onnxruntime]'")
    print_findings([finding], False, Console(file=written, width=200))
    assert "pip install 'dspark-trt[onnxruntime]'" in written.getvalue()
    assert "not [here]" in written.getvalue()


@pytest.mark.parametrize(("sm", "status"), [(75, "optional"), (89, "ok"), (121, "optional")])
def test_gpu_that_the_plugins_have_no_kernels_for_is_not_called_ready(
    monkeypatch: pytest.MonkeyPatch, sm: int, status: str
) -> None:
    monkeypatch.setattr(doctor, "look_for_gpu", lambda: Gpu("a GPU", sm, 1, "CUDA 13.0"))
    found = {finding.name: finding for finding in examine()}["tensorrt_rtx"]
    assert found.status == status
    assert status == "ok" or found.fix == f"makes no engines for SM {sm}"


def test_python_that_cannot_assemble_a_server_is_not_promised_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def advice() -> str:
        return {finding.name: finding.fix for finding in examine()}["tritonserver"]

    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert "on first use" in advice()
    monkeypatch.setattr(doctor, "LAST_PYTHON", (3, 10))
    assert "Python 3.10 or older" in advice()

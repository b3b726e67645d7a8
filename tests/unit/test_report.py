"""Tables for people show what they are given, square brackets too."""

from __future__ import annotations

import io

from rich.console import Console

from dspark_trt.doctor import Finding
from dspark_trt.report import print_findings


def test_extras_to_install_are_not_taken_for_markup() -> None:
    written = io.StringIO()
    finding = Finding("onnxruntime", "missing", "not [here]", "pip install 'dspark-trt[onnxruntime]'")
    print_findings([finding], False, Console(file=written, width=200))
    assert "pip install 'dspark-trt[onnxruntime]'" in written.getvalue()
    assert "not [here]" in written.getvalue()

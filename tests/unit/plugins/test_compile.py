"""The kernels compile for every supported GPU architecture on a machine without a GPU,
and what they take is written down."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from compile_plugins import problems
from dspark_trt_plugins.bundle import SUPPORTED_SMS, read_bundle
from dspark_trt_plugins.markov_head.form import MarkovHeadForm
from dspark_trt_plugins.markov_head.function_body import markov_head_node
from dspark_trt_plugins.markov_head.launches import MarkovHeadOperation
from dspark_trt_plugins.named_forms import NAMED_FORMS
from dspark_trt_plugins.registry import operations_in
from onnx import helper

REPOSITORY = Path(__file__).parents[3]
REPORT = REPOSITORY / "plugins" / "resources.json"
COMPILED_HERE = (
    "smollm2-135m",
    "prefix-select",
    "row-attention-smollm2-135m",
)  # the others take minutes; their report is committed


def run_script(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPOSITORY / "build_scripts" / "compile_plugins.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with bundles and the report of a fresh compilation."""
    folder = tmp_path_factory.mktemp("compiled")
    forms = [word for form in COMPILED_HERE for word in ("--form", form)]
    outputs = ["--output", str(folder), "--report", str(folder / "resources.json")]
    result = run_script(*forms, *outputs, TRITON_CACHE_DIR=str(folder / "cache"))
    assert result.returncode == 0, result.stderr
    return folder


@pytest.mark.parametrize("form", COMPILED_HERE)
def test_every_kernel_has_code_for_every_supported_architecture(form: str, compiled: Path) -> None:
    bundle = read_bundle(compiled / f"{form}.kernels")
    assert sorted(bundle.kernels) == list(SUPPORTED_SMS)
    for kernels in bundle.kernels.values():
        assert [kernel.name for kernel in kernels] == [kernel.name for kernel in NAMED_FORMS[form].kernels]
        for kernel in kernels:
            assert kernel.cubin.startswith(b"\x7fELF")
            assert kernel.entry.encode() in kernel.cubin
            assert kernel.num_hidden_pointers == 2
            assert str(REPOSITORY).encode() not in kernel.cubin
    assert bundle.attributes == NAMED_FORMS[form].attributes


def test_the_committed_resource_report_is_that_of_a_fresh_compilation(compiled: Path) -> None:
    fresh, committed = (json.loads(path.read_text()) for path in (compiled / "resources.json", REPORT))
    assert fresh["compiler"] == committed["compiler"]
    for form in COMPILED_HERE:
        assert fresh["forms"][form] == committed["forms"][form]


@pytest.mark.parametrize("form", NAMED_FORMS)
def test_no_kernel_spills_or_takes_more_shared_memory_than_a_block_may_have(form: str) -> None:
    used = json.loads(REPORT.read_text())["forms"][form]
    assert list(problems(used)) == []
    assert {name: {int(sm) for sm in by_sm} for name, by_sm in used.items()} == {
        kernel.name: set(SUPPORTED_SMS) for kernel in NAMED_FORMS[form].kernels
    }


def test_spills_and_too_much_shared_memory_are_found() -> None:
    used = {"good": {"80": [64, 166_912, 0]}, "spilling": {"90": [255, 0, 8]}, "large": {"120": [64, 101_377, 0]}}
    found = list(problems(used))
    assert len(found) == 2
    assert found[0].startswith("spilling for SM 90 spills: 8 bytes")
    assert found[1].startswith("large for SM 120 takes 101377 bytes of shared memory")


def test_a_process_that_interprets_kernels_says_why_it_cannot_compile() -> None:
    script = (
        "from dspark_trt_plugins.compile import compile_operation\n"
        "from dspark_trt_plugins.named_forms import NAMED_FORMS\n"
        "compile_operation(NAMED_FORMS['prefix-select'], [90])\n"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert "RuntimeError: TRITON_INTERPRET is set" in result.stderr


def test_kernels_are_found_by_the_nodes_of_a_graph() -> None:
    form = MarkovHeadForm(7, 1000, 16, "rnn", hidden_size=64, weight_type="float16", top_n=9)
    node = markov_head_node(form, form.input_names, form.output_names)
    (operation,) = operations_in(_model(node))
    assert operation.name == "MarkovHead"
    assert operation.attributes == MarkovHeadOperation(form).attributes


def test_a_node_of_another_version_is_refused() -> None:
    node = helper.make_node("MarkovHead", [], ["y"], name="head", domain="dspark", plugin_version="0")
    with pytest.raises(
        ValueError,
        match=r"node head: expected dspark::MarkovHead or PageWrite or PrefixSelect or RowAttention of version 1",
    ):
        operations_in(_model(node))


def _model(node: Any) -> Any:
    return helper.make_model(helper.make_graph([node], "graph", [], []))

"""What TensorRT's documentation says of a plugin's inputs and outputs, and what kernels make of 16-bit products."""

from __future__ import annotations

from typing import Any

import pytest
import triton
from dspark_trt_plugins.bundle import CompiledKernel, KernelBundle
from dspark_trt_plugins.compile import check_resources, compile_operation
from dspark_trt_plugins.named_forms import NAMED_FORMS
from dspark_trt_plugins.registry import _KINDS
from dspark_trt_plugins.row_attention.form import RowAttentionForm
from dspark_trt_plugins.row_attention.launches import RowAttentionOperation

# PluginTensorDesc::type of TensorRT 10.14 excludes bool and uint8; of the others these are what the project uses
TYPES_OF_A_PLUGIN = {"float32", "float16", "bfloat16", "int32", "int64"}


def test_every_plugin_has_a_named_form() -> None:
    assert {operation.name for operation in NAMED_FORMS.values()} >= set(_KINDS)


@pytest.mark.parametrize("form", NAMED_FORMS)
def test_plugins_have_no_input_or_output_of_a_type_that_tensorrt_does_not_give_them(form: str) -> None:
    operation = NAMED_FORMS[form]
    types = {tensor.name: tensor.element_type for tensor in (*operation.inputs, *operation.outputs)}
    assert {name: each for name, each in types.items() if each not in TYPES_OF_A_PLUGIN} == {}


@pytest.mark.parametrize("sm", [80, 90, 100])
def test_products_of_float16_are_summed_in_float32(sm: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum of 65504 or more would be infinite in float16, and one of many terms inexact."""
    code: list[str] = []
    compile_with_triton = triton.compile

    def keep(*arguments: Any, **options: Any) -> Any:
        result = compile_with_triton(*arguments, **options)
        code.append(result.asm["ptx"])
        return result

    monkeypatch.setattr(triton, "compile", keep)
    compile_operation(RowAttentionOperation(RowAttentionForm(4, 2, 64, 64, 2, 3, 0, True, "float16")), [sm])
    products = {line.split()[0] for ptx in code for line in ptx.splitlines() if "mma" in line}
    assert products == {"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"}


def kernel(name: str, shared_bytes: int) -> CompiledKernel:
    return CompiledKernel(name, name, (), 0, 4, shared_bytes, b"")


def test_a_kernel_that_no_gpu_could_launch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dspark_trt_plugins.compile.resources", lambda kernel: SpillsNothing)
    fits, large = kernel("fits", 101_376), kernel("large", 101_377)
    assert check_resources(KernelBundle("Any", {}, "", {89: (fits,), 90: (large,)})) == []
    with pytest.raises(RuntimeError, match=r"large for SM 120: expected 101376 bytes .* found 101377"):
        check_resources(KernelBundle("Any", {}, "", {90: (large,), 120: (fits, large)}))


class SpillsNothing:
    stack_bytes = 0

"""Compiles the kernels of an operation to machine code with Triton. Needs no GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import triton
from dspark_trt_plugins.bundle import SHARED_BYTES_LIMIT, SUPPORTED_SMS, CompiledKernel, KernelBundle
from dspark_trt_plugins.operation import POINTER_ALIGNMENT, Kernel, Operation, kernel_function
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

# Fused multiply-add is Triton's default today and will not be tomorrow; the numbers must not change with it.
FP_FUSION = True
WARP_SIZE = 32
_TYPES = {"int32": "i32", "int64": "i64", "float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}


@dataclass(frozen=True, slots=True)
class Resources:
    """What one compiled kernel takes. Registers that do not fit are spilled to the stack: 0 stack bytes, no spills."""

    registers: int  # of a thread
    stack_bytes: int  # of a thread
    shared_bytes: int  # of a block
    cubin_bytes: int


def compile_operation(
    operation: Operation, sms: Sequence[int], progress: Callable[[int, str], None] = lambda sm, name: None
) -> KernelBundle:
    """All kernels of an operation for some architectures.

    Raises ValueError for an architecture that is not supported, and RuntimeError when kernels cannot be compiled here.
    """
    if unknown := sorted(set(sms) - set(SUPPORTED_SMS)):
        raise ValueError(f"expected SM among {SUPPORTED_SMS}, found {unknown}")
    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: Triton interprets kernels and cannot compile them; unset it")
    kernels: dict[int, tuple[CompiledKernel, ...]] = {}
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.disable_line_info = True  # no source paths in the code
        for sm in sms:
            compiled = []
            for kernel in operation.kernels:
                progress(sm, kernel.name)
                compiled.append(_compile(operation, kernel, sm))
            kernels[sm] = tuple(compiled)
    compiler = f"triton {triton.__version__}, fp fusion {'on' if FP_FUSION else 'off'}"
    return KernelBundle(operation.name, operation.attributes, compiler, kernels)


def _compile(operation: Operation, kernel: Kernel, sm: int) -> CompiledKernel:
    function = kernel_function(operation, kernel)
    tensors = {tensor.name: tensor for tensor in (*operation.inputs, *operation.outputs, *operation.workspace)}
    values = {**operation.arguments, **kernel.constants}
    signature: dict[str, str] = {}
    constants: dict[str, int | None] = {}
    hints: dict[tuple[int], Any] = {}
    for position, name in enumerate(function.arg_names):
        value = values.get(name, "")
        if name not in values:
            signature[name] = "i32"
        elif isinstance(value, str):
            signature[name] = "*" + _TYPES[tensors[value].element_type]
            if tensors[value].is_aligned:
                hints[(position,)] = [["tt.divisibility", POINTER_ALIGNMENT]]
        else:
            signature[name] = "constexpr"
            constants[name] = value
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=hints)
    options = {"num_warps": kernel.num_warps, "num_stages": kernel.num_stages, "enable_fp_fusion": FP_FUSION}
    result = triton.compile(source, target=GPUTarget("cuda", sm, WARP_SIZE), options=options)
    metadata = result.metadata
    if metadata.global_scratch_size or metadata.profile_scratch_size or metadata.num_ctas != 1:
        raise RuntimeError(f"{kernel.name} for SM {sm}: expected no scratch memory and one block a cluster")
    parameters = tuple(name for name in function.arg_names if signature[name] != "constexpr")
    entry = result.asm["ptx"].split(".entry", 1)[1].split("{", 1)[0]
    return CompiledKernel(
        name=kernel.name,
        entry=metadata.name,
        parameters=parameters,
        num_hidden_pointers=entry.count(".param") - len(parameters),
        num_warps=kernel.num_warps,
        shared_bytes=metadata.shared,
        cubin=result.asm["cubin"],
    )


def resources(kernel: CompiledKernel) -> Resources:
    """Read off the machine code by cuobjdump, which Triton carries."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    usage = {name: int(value) for name, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", text)}
    return Resources(
        registers=usage["REG"],
        stack_bytes=usage["STACK"] + usage["LOCAL"],
        shared_bytes=kernel.shared_bytes,
        cubin_bytes=len(kernel.cubin),
    )


def check_resources(bundle: KernelBundle) -> list[str]:
    """What spills, in words: slower than it should be, and right.

    Raises RuntimeError when a kernel takes more shared memory than a block may have: no launch of it would succeed.
    """
    return [spill for sm, kernels in bundle.kernels.items() for kernel in kernels for spill in _spills(sm, kernel)]


def _spills(sm: int, kernel: CompiledKernel) -> Iterator[str]:
    if kernel.shared_bytes > SHARED_BYTES_LIMIT[sm]:
        raise RuntimeError(
            f"{kernel.name} for SM {sm}: expected {SHARED_BYTES_LIMIT[sm]} bytes of shared memory or fewer, found "
            f"{kernel.shared_bytes}"
        )
    if stack_bytes := resources(kernel).stack_bytes:
        yield f"{kernel.name} for SM {sm} spills {stack_bytes} bytes a thread"

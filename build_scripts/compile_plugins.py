"""Compile the plugins' kernels for every supported GPU architecture, on a machine with or without a GPU.

    python build_scripts/compile_plugins.py --output build/plugins               # one bundle for each form below
    python build_scripts/compile_plugins.py --report plugins/resources.json      # registers, shared memory, stack
    python build_scripts/compile_plugins.py --form qwen3-8b --sm 90 --output build/plugins
    python build_scripts/compile_plugins.py --graph graphs/drafter_draft.onnx --sm 90 --output build/plugins

An engine build compiles the forms of its own graph through dspark_trt_plugins.compile and embeds the result; the named
forms are those that the resource report and the microbenchmark look at. Exit status 4: a kernel spills registers or
takes more shared memory than a block may have.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
from dspark_trt_plugins.bundle import SHARED_BYTES_LIMIT, SUPPORTED_SMS, KernelBundle
from dspark_trt_plugins.named_forms import NAMED_FORMS
from dspark_trt_plugins.registry import operations_in


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--form", action="append", choices=list(NAMED_FORMS), help="a named form, repeatable; default: all"
    )
    parser.add_argument("--graph", type=Path, help="instead of named forms: those of the dspark nodes of an ONNX file")
    parser.add_argument("--sm", action="append", type=int, choices=SUPPORTED_SMS, help="repeatable; default: all")
    parser.add_argument("--output", type=Path, help="folder that gets NAME.kernels files")
    parser.add_argument("--report", type=Path, help="JSON file that gets the resources")
    options = parser.parse_args(arguments)
    os.environ.pop("TRITON_INTERPRET", None)  # read when Triton is imported
    from dspark_trt_plugins.compile import compile_operation

    report: dict[str, Any] = {"columns": ["registers", "shared_bytes", "stack_bytes"], "forms": {}}
    failures = []
    operations = {name: NAMED_FORMS[name] for name in options.form or NAMED_FORMS}
    if options.graph:
        model = onnx.load(options.graph, load_external_data=False)
        operations = {f"{each.name}-{index}": each for index, each in enumerate(operations_in(model))}
    for name, operation in operations.items():
        print(f"{name}:", end="", flush=True)
        bundle = compile_operation(operation, options.sm or SUPPORTED_SMS, _show_progress)
        print()
        used = usage(bundle)
        failures += [f"{name}: {problem}" for problem in problems(used)]
        report["compiler"] = bundle.compiler
        report["forms"][name] = used
        if options.output:
            bundle.write(options.output / f"{name}.kernels")
    if options.report:
        _write(options.report, to_json(report))
    for failure in failures:
        print(failure, file=sys.stderr)
    return 4 if failures else 0


def usage(bundle: KernelBundle) -> dict[str, dict[str, list[int]]]:
    """[registers, shared bytes, stack bytes] by kernel and SM."""
    from dspark_trt_plugins.compile import resources

    table: dict[str, dict[str, list[int]]] = {}
    for sm, kernels in bundle.kernels.items():
        for kernel in kernels:
            used = resources(kernel)
            table.setdefault(kernel.name, {})[str(sm)] = [used.registers, used.shared_bytes, used.stack_bytes]
    return table


def problems(used: dict[str, dict[str, list[int]]]) -> Iterator[str]:
    for kernel, by_sm in used.items():
        for sm, (_, shared_bytes, stack_bytes) in by_sm.items():
            if stack_bytes:
                yield f"{kernel} for SM {sm} spills: {stack_bytes} bytes of stack a thread"
            if shared_bytes > SHARED_BYTES_LIMIT[int(sm)]:
                limit = SHARED_BYTES_LIMIT[int(sm)]
                yield f"{kernel} for SM {sm} takes {shared_bytes} bytes of shared memory, {limit} allowed"


def to_json(report: dict[str, Any]) -> str:
    """Indented, but each kernel's table in one line."""
    text = json.dumps(report, indent=1, sort_keys=True)
    for used in report["forms"].values():
        for by_sm in used.values():
            flat = json.dumps(by_sm, sort_keys=True)
            indented = json.dumps(by_sm, indent=1, sort_keys=True).replace("\n", "\n   ")
            text = text.replace(indented, flat)
    return text + "\n"


def _show_progress(sm: int, kernel: str) -> None:
    print(f" {kernel}/{sm}", end="", flush=True)


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".partial")
    temporary.write_text(text)
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

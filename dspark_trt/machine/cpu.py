"""What this machine is, told without importing any engine:
the fingerprint of measurements and the facts of `doctor`."""

from __future__ import annotations

import os
import platform
from pathlib import Path

CONTROL_GROUP = Path("/sys/fs/cgroup")  # of this process, in a container
# x86, then arm64; as /proc/cpuinfo writes them
_EXTENSIONS = (
    *("avx2", "fma", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_int8", "amx_bf16"),
    *("asimddp", "i8mm", "bf16", "sve", "sve2", "sme"),
)


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def instruction_sets() -> str:
    """What of this processor's extensions changes the speed of an engine, in a fixed order; empty: nobody tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    flags = next((line.split(":", 1)[1].split() for line in lines if line.startswith(("flags", "Features"))), [])
    return " ".join(name for name in _EXTENSIONS if name in flags)


def has_exact_byte_products() -> bool:
    """Whether products of an unsigned and a signed byte are summed in 32 bits.

    An x86 processor without VNNI adds pairs of them in 16 bits, where large ones saturate.
    """
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    return any(name.endswith("vnni") for name in instruction_sets().split())


def memory_bytes() -> int:
    """Memory that this process may use: the machine's, or less where its container says so."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = (CONTROL_GROUP / "memory.max").read_text().strip()
    except OSError:  # control groups of the first version, or none
        return installed
    return min(installed, int(limit)) if limit.isdecimal() else installed


def fingerprint() -> dict[str, str | int]:
    """What a step table depends on besides the engine."""
    return {
        "cpu": cpu_model(),
        "num_cores": num_cores(),
        "machine": platform.machine(),
        "instructions": instruction_sets(),
    }

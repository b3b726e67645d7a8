"""What this machine is: the memory that a container allows counts, not that of its host."""

from __future__ import annotations

from pathlib import Path

import pytest

from dspark_trt.machine import cpu


def test_the_memory_of_a_container_is_what_it_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "CONTROL_GROUP", tmp_path)
    installed = cpu.memory_bytes()
    assert installed > 0
    for text, expected in (("max\n", installed), ("1048576\n", 1048576), (f"{2 * installed}\n", installed)):
        (tmp_path / "memory.max").write_text(text)
        assert cpu.memory_bytes() == expected

"""The compiler's own progress as one rising fraction."""

from __future__ import annotations

from typing import Any

from dspark_trt.log import Progress


class BuildMonitor:
    """Follows one build. Phases nest: one inside of another is a part of that one's current step;
    one phase is outermost."""

    def __init__(self, trt: Any, progress: Progress) -> None:
        running: dict[str, tuple[float, float]] = {}  # begin of the current step and width of every step
        told = 0.0
        outer = self

        class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
            def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
                begin, width = running.get(parent_phase or "", (told, 1 - told))
                running[phase_name] = (begin, width / max(num_steps, 1))

            def step_complete(self, phase_name: str, step: int) -> bool:
                nonlocal told
                begin, width = running.get(phase_name, (told, 0.0))
                running[phase_name] = (begin + width, width)
                try:
                    if begin + width > told:
                        told = min(begin + width, 1.0)
                        progress(told)
                except BaseException as error:  # TensorRT would print it and go on
                    outer._interruption = error
                return outer._interruption is None

            def phase_finish(self, phase_name: str) -> None:
                running.pop(phase_name, None)

        self.monitor = Monitor()
        self._interruption: BaseException | None = None

    def check(self) -> None:
        """After the build: raises what interrupted it (Ctrl-C, for example)."""
        if self._interruption is not None:
            raise self._interruption

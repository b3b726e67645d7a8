"""How verify lengths are chosen: one language for recipes, commands and the server.

auto | off | fixed | fixed:K | threshold:C | early_stop | lagged_budget
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from dspark_trt.errors import RecipeError

DEFAULT_MAX_STRETCH = 4.0  # a step that reads prompts beside answers takes at most so many times a plain one

SchedulerMode = Literal["off", "fixed", "threshold", "early_stop", "lagged_budget", "auto"]


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The way verify lengths are chosen; fixed for the life of a loop."""

    mode: SchedulerMode = "auto"
    verify_len: int | None = None  # fixed: drafts of every step; None: gamma
    threshold: float | None = None  # threshold: a draft of lower confidence, and all behind it, is cut
    corrects: bool = True  # prices and confidences follow what is seen while serving

    def __post_init__(self) -> None:
        if self.mode not in get_args(SchedulerMode):
            raise RecipeError(f"scheduler mode: expected one of {get_args(SchedulerMode)}, found {self.mode!r}")
        if self.verify_len is not None and (self.mode != "fixed" or self.verify_len < 0):
            raise RecipeError(
                f"scheduler verify_len: expected an integer >= 0 and mode 'fixed', found {self.verify_len} and "
                f"mode {self.mode!r}"
            )
        if (self.mode == "threshold") != (self.threshold is not None):
            raise RecipeError(
                f"scheduler threshold: expected with mode 'threshold' and only there, found {self.threshold} and "
                f"mode {self.mode!r}"
            )
        if self.threshold is not None and not 0.0 <= self.threshold <= 1.0:
            raise RecipeError(f"scheduler threshold: expected a number in [0, 1], found {self.threshold}")

    @property
    def is_adaptive(self) -> bool:
        """Whether the mode needs a step table."""
        return self.mode in ("early_stop", "lagged_budget", "auto")

    def max_verify_len(self, gamma: int) -> int:
        """The longest prefix this mode ever verifies; 0: nothing needs to be drafted."""
        if self.mode == "off":
            return 0
        return gamma if self.verify_len is None else min(self.verify_len, gamma)


def parse_scheduler(text: str) -> SchedulerConfig:
    """`auto`, `early_stop`, `lagged_budget`, `off`, `fixed` (gamma drafts), `fixed:K` or `threshold:C`.

    Raises RecipeError.
    """
    mode, colon, value = text.partition(":")
    if colon and mode not in ("fixed", "threshold"):
        raise RecipeError(f"scheduler: {mode} takes no number, found {text!r}")
    try:
        return SchedulerConfig(
            mode=mode,  # type: ignore[arg-type]  # checked by SchedulerConfig
            verify_len=int(value) if colon and mode == "fixed" else None,
            threshold=float(value) if colon and mode == "threshold" else None,
        )
    except ValueError:
        raise RecipeError(f"scheduler: expected a number behind {mode}:, found {text!r}") from None

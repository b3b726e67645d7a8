"""What the loop reports: one record per step, one per finished request, and totals since the start."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(slots=True)
class RequestStatistics:
    """How one request went. Entry i of `accepted_lens` and `verify_lens` belongs to its i-th verification step.

    1 + sum(accepted_lens) tokens are generated: the first comes from the prompt's own logits, without a verification.
    """

    num_prompt_tokens: int
    num_prompt_tokens_reused: int = 0  # whose K/V another request had computed
    num_generated_tokens: int = 0
    num_drafts_proposed: int = 0  # by the drafter or looked up
    num_drafts_verified: int = 0
    num_drafts_accepted: int = 0  # and kept: what an EOS or a stop string cut off is not counted
    accepted_lens: list[int] = field(default_factory=list)  # tokens emitted by the step, its bonus included
    verify_lens: list[int] = field(default_factory=list)  # drafts verified in the step
    verified_per_position: list[int] = field(default_factory=list)  # entry j - 1: steps that verified draft j
    accepted_per_position: list[int] = field(default_factory=list)
    queue_ms: float = 0.0  # submission to a KV row
    first_token_ms: float = 0.0  # submission to the first token
    total_ms: float = 0.0  # submission to the end
    draft_ms: float = 0.0  # summed over the steps that the request took part in
    verify_ms: float = 0.0

    @property
    def num_steps(self) -> int:
        return len(self.accepted_lens)

    @property
    def accepted_len(self) -> float:
        """Mean accepted_len of the steps (tau); 0 when there was none."""
        return sum(self.accepted_lens) / self.num_steps if self.accepted_lens else 0.0

    @property
    def mean_verify_len(self) -> float:
        return sum(self.verify_lens) / self.num_steps if self.verify_lens else 0.0

    def record_step(self, *, num_proposed: int, verify_len: int, num_accepted: int, num_emitted: int) -> None:
        """One verification step: `num_accepted` drafts among the `num_emitted` tokens."""
        self.num_drafts_proposed += num_proposed
        self.num_drafts_verified += verify_len
        self.num_drafts_accepted += num_accepted
        self.accepted_lens.append(num_emitted)
        self.verify_lens.append(verify_len)
        for per_position, reached in (
            (self.verified_per_position, verify_len),
            (self.accepted_per_position, num_accepted),
        ):
            per_position.extend([0] * (verify_len - len(per_position)))
            for position in range(reached):
                per_position[position] += 1

    def as_dict(self) -> dict[str, Any]:
        """Everything, derived values included, ready for JSON."""
        return {
            **asdict(self),
            "num_steps": self.num_steps,
            "accepted_len": self.accepted_len,
            "mean_verify_len": self.mean_verify_len,
        }


@dataclass(slots=True)
class StepRecord:
    """One step of the loop. Times are wall-clock milliseconds."""

    num_requests: int = 0  # R: requests that decode
    num_prefill_tokens: int = 0
    batch_tokens: int = 0  # B: prefill tokens + sum(1 + verify_len)
    num_drafting: int = 0  # requests that the drafter drafted for
    num_looking_up: int = 0  # requests whose drafts were copied from their own text
    num_ingested_tokens: int = 0
    num_drafts_proposed: int = 0
    num_drafts_verified: int = 0
    num_drafts_accepted: int = 0
    num_tokens_emitted: int = 0
    expected_ms: float = 0.0  # total_ms by the step table and its corrections; 0: not priced
    ingest_ms: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    copy_ms: float = 0.0  # KV rows moved, and prefixes copied from one to another
    total_ms: float = 0.0

    def add_emitted(self, num_tokens: int, num_accepted_drafts: int) -> None:
        """One request was given tokens. Accepted drafts behind the end of its text are not counted."""
        self.num_tokens_emitted += num_tokens
        self.num_drafts_accepted += min(num_accepted_drafts, num_tokens)

    @property
    def outside_ms(self) -> float:
        """The step outside the two engines."""
        return self.total_ms - self.ingest_ms - self.draft_ms - self.verify_ms - self.copy_ms


@dataclass(slots=True)
class LoopTotals:
    """Counters since the start of the loop; they never fall."""

    num_finished: Counter[str] = field(default_factory=Counter)  # by finish reason
    num_rows_moved: int = 0
    num_steps: int = 0
    num_steps_not_drafting: int = 0  # of those in which a request decoded
    num_requests_not_drafting: int = 0  # summed over steps
    num_requests_looking_up: int = 0  # of these, with drafts copied from their own text
    num_prefill_tokens: int = 0
    num_prompt_tokens_reused: int = 0
    num_drafts_proposed: int = 0
    num_drafts_verified: int = 0
    num_drafts_accepted: int = 0
    num_tokens_emitted: int = 0

    def add_step(self, record: StepRecord) -> None:
        self.num_steps += 1
        self.num_steps_not_drafting += record.num_requests > 0 and record.num_drafting == 0
        self.num_requests_not_drafting += record.num_requests - record.num_drafting
        self.num_requests_looking_up += record.num_looking_up
        self.num_prefill_tokens += record.num_prefill_tokens
        self.num_drafts_proposed += record.num_drafts_proposed
        self.num_drafts_verified += record.num_drafts_verified
        self.num_drafts_accepted += record.num_drafts_accepted
        self.num_tokens_emitted += record.num_tokens_emitted

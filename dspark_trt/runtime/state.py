"""One request on its way through the loop.

    QUEUED -> PREFILL -> DECODE -> FINISHED        (from every phase straight to FINISHED: cancelled, failed)

QUEUED: no KV row yet. PREFILL: `num_prefilled` of the prompt's positions are committed. DECODE: all positions but the
anchor's are committed; every step starts from the anchor.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import lru_cache, partial
from typing import cast

import numpy as np
from numpy.typing import NDArray

from dspark_trt.runtime.lookup import Lookup, TokenIndex
from dspark_trt.runtime.metrics import RequestStatistics
from dspark_trt.runtime.request import MAX_SEED, GenerationRequest, SamplingParams
from dspark_trt.runtime.rng import Purpose, RngKey, random_words, request_key
from dspark_trt.runtime.rows import NO_ROW
from dspark_trt.runtime.sampling import LogitProcessors, is_greedy
from dspark_trt.runtime.text_stream import Decode, TextStream
from dspark_trt.runtime.trajectories import TrajectoryIndex


class Phase(Enum):
    QUEUED = auto()
    PREFILL = auto()
    DECODE = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class RequestState:
    """Everything the loop knows about one request, apart from its KV rows. Only its own methods write to it."""

    request: GenerationRequest
    params: SamplingParams  # max_tokens cut to what the row can hold
    prompt_ids: NDArray[np.int64]
    key: RngKey
    ending_ids: frozenset[int]  # EOS and stop_token_ids
    processors: LogitProcessors
    stream: TextStream
    statistics: RequestStatistics
    submitted_at: float  # seconds of the monotonic clock
    phase: Phase = Phase.QUEUED
    row: int = NO_ROW
    generation: int = -1
    has_equal_key: bool = False  # has been live together with a request of the same random key
    num_prefilled: int = 0  # prompt tokens whose K/V are there: read, or reused
    awaits_prefix: bool = False  # its prompt is not read while another request reads the same tokens
    has_failed: bool = False  # what its KV row holds is undefined
    step_index: int = 0  # 0: the first token; then one for every verification step
    anchor_id: int = -1  # the last token; its K/V come with the next step
    generated_ids: list[int] = field(default_factory=list)
    words: NDArray[np.uint64] = field(
        default_factory=lambda: np.empty((0, 4), dtype=np.uint64)
    )  # this step's randomness
    looks_up: bool = False  # whether drafts may be copied from its own text
    keeps_trajectories: bool = False  # and taken from what the target predicted behind rejected drafts
    token_index: TokenIndex | None = None  # of prompt and generated tokens
    lookup: Lookup | None = None  # what was found last

    @property
    def num_generated(self) -> int:
        return self.statistics.num_generated_tokens

    @property
    def num_remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.params.max_tokens - self.num_generated

    @property
    def num_unfilled(self) -> int:
        """Prompt tokens that no step has read yet."""
        return len(self.prompt_ids) - self.num_prefilled

    @property
    def next_id(self) -> int:
        """The token behind all that are committed: the prompt's, or the anchor."""
        return self.anchor_id if self.num_unfilled == 0 else int(self.prompt_ids[self.num_prefilled])

    @property
    def may_draft(self) -> bool:
        """Whether a later step may draft for this request; once false, it stays so and its taps are not needed."""
        num_drawn_without_drafts = 0 if self.num_generated else 1  # the first token comes from the prompt
        return self.request.max_verify_len != 0 and self.num_remaining - num_drawn_without_drafts >= 2

    @property
    def needs_taps(self) -> bool:
        """Whether the drafter's context has to follow."""
        return self.phase is not Phase.FINISHED and self.may_draft

    def occupy(self, row: int, generation: int) -> None:
        """The request got a KV row: its prompt is read from now on."""
        self.row, self.generation = row, generation
        self.phase = Phase.PREFILL
        self.statistics.queue_ms = self.elapsed_ms()

    def move_to(self, row: int) -> None:
        """The request lives in another row now, or in none (NO_ROW)."""
        self.row = row

    def share_key(self) -> None:
        """Another live request has the same random key. For good: what one has drawn, the other will draw."""
        self.has_equal_key = True

    def token_ids(self) -> NDArray[np.int64]:
        """Prompt and generated tokens; token i belongs to position i of its row."""
        return np.concatenate((self.prompt_ids, np.array(self.generated_ids, dtype=np.int64)))

    def await_prefix(self, is_waiting: bool) -> None:
        self.awaits_prefix = is_waiting

    def reuse_prompt(self, num_tokens: int) -> None:
        """The K/V of so many prompt tokens were there already."""
        self.statistics.num_prompt_tokens_reused = num_tokens
        self.commit_prompt(num_tokens)

    def commit_prompt(self, num_tokens: int) -> None:
        """The K/V of prompt tokens are there."""
        self.num_prefilled += num_tokens
        if self.num_unfilled == 0:
            self.phase = Phase.DECODE

    def push_token(self, token_id: int) -> None:
        """A token was generated: it is the anchor of the next step."""
        self.statistics.num_generated_tokens += 1
        self.anchor_id = token_id
        self.generated_ids.append(token_id)
        if self.looks_up:
            if self.token_index is None:
                kind = TrajectoryIndex if self.keeps_trajectories else TokenIndex
                self.token_index = kind(self.prompt_ids.tolist())
            self.token_index.append(token_id)

    def look_up(self, num_drafts: int) -> Lookup | None:
        """Drafts without a model; None: nothing is known behind the anchor, or it does not look up."""
        self.lookup = None if self.token_index is None else self.token_index.look_up(num_drafts)
        return self.lookup

    def next_step(self) -> None:
        """A step gave tokens: the next one draws other random words."""
        if self.step_index == 0:
            self.statistics.first_token_ms = self.elapsed_ms()
        self.step_index += 1

    def took_part(self, *, draft_ms: float = 0.0, verify_ms: float = 0.0) -> None:
        """In a call that took so long."""
        self.statistics.draft_ms += draft_ms
        self.statistics.verify_ms += verify_ms

    def record_step(self, *, num_proposed: int, verify_len: int, num_accepted: int, num_emitted: int) -> None:
        """One verification step, as in RequestStatistics."""
        self.statistics.record_step(
            num_proposed=num_proposed, verify_len=verify_len, num_accepted=num_accepted, num_emitted=num_emitted
        )

    def finish(self, has_failed: bool = False) -> None:
        self.phase = Phase.FINISHED
        self.has_failed = has_failed
        self.statistics.total_ms = self.elapsed_ms()

    def draw_words(self, num_slots: int) -> None:
        """Draw the randomness of this step, once: slots 1 .. num_slots, every purpose. Nobody looks at that of a
        greedy request whose logits are not edited."""
        if is_greedy(self.params.temperature) and not self.processors.has_edits:
            self.words = _unread_words(num_slots)
            return
        self.words = random_words(self.key, step_index=self.step_index, num_slots=num_slots)

    def elapsed_ms(self) -> float:
        return (time.perf_counter() - self.submitted_at) * 1e3


def share_keys(state: RequestState, others: Iterable[RequestState]) -> None:
    """Tell `state` and those of the others that have its random key of each other."""
    for other in others:
        if other.key == state.key:
            state.share_key()
            other.share_key()


@lru_cache(maxsize=64)
def _unread_words(num_slots: int) -> NDArray[np.uint64]:
    words = np.zeros((num_slots, len(Purpose)), dtype=np.uint64)
    words.flags.writeable = False  # shared by all requests
    return words


def new_state(
    request: GenerationRequest,
    *,
    max_seq_len: int,
    eos_token_ids: tuple[int, ...],
    decode: Decode,
    looks_up: bool = False,
    keeps_trajectories: bool = False,
) -> RequestState:
    """A queued request. `request` has passed `validate`.

    A row holds max_seq_len positions and the last token generated needs none, so a prompt of P tokens has room for
    max_seq_len - P + 1 tokens.
    """
    prompt_ids = np.array(request.prompt_ids, dtype=np.int64)
    room = max_seq_len - len(prompt_ids) + 1
    params = replace(request.sampling, max_tokens=min(request.sampling.max_tokens, room))
    seed = secrets.randbelow(MAX_SEED + 1) if params.seed is None else params.seed
    ending_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos_token_ids))
    return RequestState(
        request=request,
        params=params,
        prompt_ids=prompt_ids,
        key=request_key(seed, prompt_ids, request.sequence_index),
        ending_ids=ending_ids,
        processors=LogitProcessors(params, prompt_ids, sorted(ending_ids)),
        stream=TextStream(
            decode
            if params.skip_special_tokens
            else partial(cast(Callable[..., str], decode), skip_special_tokens=False),
            request.prompt_ids,
            stop_strings=params.stop_strings,
            include_stop_string=params.include_stop_string,
        ),
        statistics=RequestStatistics(num_prompt_tokens=len(prompt_ids)),
        submitted_at=time.perf_counter(),
        looks_up=looks_up and request.max_verify_len != 0,
        keeps_trajectories=keeps_trajectories,
    )

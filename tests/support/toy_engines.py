"""Small engines whose every answer is known: a target over a toy language, and a drafter of chosen quality.

Both keep a real KV store and refuse what a cache cannot do: reading a position that was never written or was rolled
back, a wrong row, a wrong position. Their output buffers are overwritten by the next call, as the protocol allows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from dspark_trt.contract.acceptance import AcceptEngine
from dspark_trt.contract.calibration import Calibration
from dspark_trt.contract.lookup import LookupAcceptance
from dspark_trt.contract.protocol import (
    DraftBatch,
    DraftOutput,
    EngineLimits,
    IngestBatch,
    StepEngine,
    TargetBatch,
    TargetOutput,
)
from dspark_trt.contract.scheduler import SchedulerConfig
from dspark_trt.errors import EngineBuildError
from dspark_trt.runtime.emission import Emission
from dspark_trt.runtime.loop import DecodingLoop, OnVerified
from dspark_trt.runtime.request import GenerationRequest
from dspark_trt.steptable.table import StepTable

EMPTY = -1


@dataclass(frozen=True)
class ToyLanguage:
    """Next-token logits as a fixed function of the last `order` tokens."""

    vocab_size: int
    seed: int = 0
    order: int = 2
    num_patterns: int = 61
    scale: float = 2.0
    table: np.ndarray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        random = np.random.default_rng(self.seed)
        table = random.normal(scale=self.scale, size=(self.num_patterns, self.vocab_size)).astype(np.float32)
        object.__setattr__(self, "table", table)

    def logits(self, context: Sequence[int]) -> np.ndarray:
        pattern = 0
        for token in context[-self.order :]:
            pattern = pattern * 31 + int(token) + 1
        return self.table[pattern % self.num_patterns]


class _Store:
    """Tokens by row and position; what lies behind a call's past is erased by that call."""

    def __init__(self, limits: EngineLimits) -> None:
        self.tokens = np.full((limits.max_requests, limits.max_seq_len), EMPTY, dtype=np.int64)

    def write(self, row: int, past: int, tokens: Sequence[int]) -> None:
        if (self.tokens[row, :past] == EMPTY).any():
            raise AssertionError(f"row {row}: the past of {past} positions has holes")
        if past + len(tokens) > self.tokens.shape[1]:
            raise AssertionError(f"row {row}: position {past + len(tokens) - 1} is outside the row")
        self.tokens[row, past:] = EMPTY
        self.tokens[row, past : past + len(tokens)] = tokens

    def read(self, row: int, length: int) -> list[int]:
        context = self.tokens[row, :length].tolist()
        if EMPTY in context:
            raise AssertionError(f"row {row}: position {context.index(EMPTY)} was never written, or was rolled back")
        return context

    def move(self, source: int, destination: int, num_positions: int) -> None:
        moved = self.read(source, num_positions)
        self.tokens[destination] = EMPTY
        self.tokens[destination, :num_positions] = moved


class FailingEngine:
    """Raises at the calls whose names are in `failures`, once each."""

    def __init__(self) -> None:
        self.failures: list[str] = []
        self.num_calls: dict[str, int] = {}

    def _called(self, name: str) -> None:
        self.num_calls[name] = self.num_calls.get(name, 0) + 1
        if name in self.failures:
            self.failures.remove(name)
            raise EngineBuildError(f"{name} failed, as the test wants it")


class ToyTarget(FailingEngine):
    """A target over a ToyLanguage. Its taps are (token id, position)."""

    def __init__(self, language: ToyLanguage, limits: EngineLimits) -> None:
        super().__init__()
        self.language = language
        self._limits = limits
        self.store = _Store(limits)
        self.batches: list[TargetBatch] = []
        self.edit_logits: Callable[[TargetBatch, np.ndarray], None] | None = None
        self._last: TargetOutput | None = None

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    @property
    def vocab_size(self) -> int:
        return self.language.vocab_size

    def forward(self, batch: TargetBatch) -> TargetOutput:
        self._called("forward")
        self._check(batch)
        self.batches.append(batch)
        if self._last is not None:
            self._last.logits[:] = np.nan
            self._last.taps[:] = np.nan
        logits = np.empty((len(batch.logit_rows), self.vocab_size), dtype=np.float32)
        taps = np.empty((len(batch.token_ids), 2), dtype=np.float32)
        logit_row = {int(packed): at for at, packed in enumerate(batch.logit_rows)}
        first = 0
        for row, past, length in zip(batch.rows, batch.past_lengths, batch.query_lengths, strict=True):
            self.store.write(int(row), int(past), batch.token_ids[first : first + length])
            for offset in range(length):
                packed = first + offset
                taps[packed] = batch.token_ids[packed], past + offset
                if packed in logit_row:
                    logits[logit_row[packed]] = self.language.logits(self.store.read(int(row), int(past) + offset + 1))
            first += length
        if self.edit_logits:
            self.edit_logits(batch, logits)
        self._last = TargetOutput(logits=logits, taps=taps)
        return self._last

    def move_row(self, source: int, destination: int, num_positions: int) -> None:
        self._called("move_row")
        self.store.move(source, destination, num_positions)

    def _check(self, batch: TargetBatch) -> None:
        assert len(set(batch.rows.tolist())) == len(batch.rows), "a row stands twice in one call"
        assert batch.query_lengths.min() >= 1
        assert batch.query_lengths.sum() == len(batch.token_ids) <= self._limits.max_batch_tokens
        assert (np.diff(batch.logit_rows) > 0).all(), "logit rows must ascend"
        assert 0 <= batch.token_ids.min() <= batch.token_ids.max() < self.vocab_size
        for name in ("token_ids", "rows", "past_lengths", "query_lengths", "logit_rows"):
            assert getattr(batch, name).dtype == np.int64, name


# confidence logits [G] from (context up to the anchor, [x_0 .. x_{G-1}], acceptance probability of each slot)
Confidence = Callable[[Sequence[int], Sequence[int], Sequence[float]], Sequence[float]]


def honest_confidence(context: Sequence[int], seen: Sequence[int], acceptance: Sequence[float]) -> list[float]:
    """The true probability that each draft is accepted by a target at the same temperature without processors."""
    clipped = np.clip(acceptance, 1e-4, 1 - 1e-4)
    return np.log(clipped / (1 - clipped)).tolist()


def capricious_confidence(context: Sequence[int], seen: Sequence[int], acceptance: Sequence[float]) -> list[float]:
    """High or low by the token before: what tempts a scheduler that looks ahead."""
    return [4.0 if token % 2 else -2.0 for token in seen]


class ToyDrafter(FailingEngine):
    """Drafts from skill * target logits + (1 - |skill|) * noise.
    skill 1 is perfect, -1 proposes what the target avoids."""

    def __init__(
        self,
        language: ToyLanguage,
        limits: EngineLimits,
        *,
        gamma: int = 4,
        skill: float = 0.6,
        confidence: Confidence | None = honest_confidence,
        draft_vocab: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.language = language
        self._noise = ToyLanguage(language.vocab_size, seed=language.seed + 1, num_patterns=53)
        self._limits = limits
        self._gamma = gamma
        self._skill = skill
        self._confidence = confidence
        self._draft_vocab = None if draft_vocab is None else np.array(draft_vocab, dtype=np.int64)
        self.batches: list[DraftBatch] = []
        self.store = _Store(limits)
        self.edit_output: Callable[[DraftBatch, DraftOutput], None] | None = None
        self._last: DraftOutput | None = None
        # of each position that was ingested, the token behind it
        self._next_ids = np.full((limits.max_requests, limits.max_seq_len), EMPTY, dtype=np.int64)

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    @property
    def gamma(self) -> int:
        return self._gamma

    def ingest(self, batch: IngestBatch) -> None:
        self._called("ingest")
        self._forget()
        assert len(set(batch.rows.tolist())) == len(batch.rows), "a row stands twice in one call"
        assert len(batch.taps) == batch.query_lengths.sum() <= self._limits.max_batch_tokens
        first = 0
        for row, past, length in zip(batch.rows, batch.past_lengths, batch.query_lengths, strict=True):
            taps = batch.taps[first : first + length]
            assert taps[:, 1].tolist() == list(range(past, past + length)), "taps of other positions"
            self.store.write(int(row), int(past), taps[:, 0].astype(np.int64))
            self._check_ids(batch, int(row), int(past), taps[:, 0], slice(first, first + length))
            first += length

    def _check_ids(self, batch: IngestBatch, row: int, past: int, tokens: np.ndarray, part: slice) -> None:
        """Ids are those of the positions; what was said to follow the last one of a call came next."""
        assert batch.token_ids is not None
        assert batch.next_ids is not None
        assert batch.token_ids[part].tolist() == tokens.tolist(), "ids of other positions"
        assert batch.next_ids[part][:-1].tolist() == tokens[1:].tolist(), "another token follows"
        assert not past or self._next_ids[row, past - 1] == tokens[0], "another token follows the call before"
        self._next_ids[row, past : past + len(tokens)] = batch.next_ids[part]

    @property
    def draft_vocab(self) -> np.ndarray | None:
        return self._draft_vocab

    def draft(self, batch: DraftBatch, ingest: IngestBatch | None = None) -> DraftOutput:
        if ingest is not None:
            self.ingest(ingest)
        self._called("draft")
        self._forget()
        num_requests, num_slots = batch.uniforms.shape
        self.batches.append(batch)
        assert len(set(batch.rows.tolist())) == num_requests == len(batch.rows), "a row stands twice in one call"
        assert 1 <= num_slots <= self._gamma
        assert batch.uniforms.dtype == batch.temperatures.dtype == np.float32
        assert batch.wants_logits or not batch.temperatures.any(), "drafts that are drawn need their logits"
        width = self.language.vocab_size if self._draft_vocab is None else len(self._draft_vocab)
        output = DraftOutput(
            draft_ids=np.empty((num_requests, num_slots), dtype=np.int64),
            draft_logits=np.empty((num_requests, num_slots, width), np.float32) if batch.wants_logits else None,
            confidence_logits=np.empty((num_requests, num_slots), np.float32),
        )
        for at in range(num_requests):
            self._draft_one(at, batch, output)
        if self.edit_output:
            self.edit_output(batch, output)
        self._last = output
        return output

    def logits(self, context: Sequence[int]) -> np.ndarray:
        return self._skill * self.language.logits(context) + (1 - abs(self._skill)) * self._noise.logits(context)

    def _draft_one(self, at: int, batch: DraftBatch, output: DraftOutput) -> None:
        temperature = float(batch.temperatures[at])
        row, anchor_id = int(batch.rows[at]), int(batch.anchor_ids[at])
        context = [*self.store.read(row, int(batch.past_lengths[at])), anchor_id]
        assert self._next_ids[row, len(context) - 2] == anchor_id, "the anchor does not follow what was ingested"
        begin, acceptance, margins = len(context), [], []
        num_slots = batch.uniforms.shape[1]
        ids = np.arange(self.language.vocab_size) if self._draft_vocab is None else self._draft_vocab
        for slot in range(num_slots):
            target_logits, logits = self.language.logits(context), self.logits(context)[ids]
            probs = softmax(logits, temperature)
            if output.draft_logits is not None:
                output.draft_logits[at, slot] = logits
            output.draft_ids[at, slot] = ids[np.sum(np.cumsum(probs) <= batch.uniforms[at, slot] * (1 - 1e-9))]
            acceptance.append(float(np.minimum(probs, softmax(target_logits, temperature)[ids]).sum()))
            second, first = np.sort(logits)[-2:]
            margins.append(float(first - second))
            context.append(int(output.draft_ids[at, slot]))
        if self._confidence is None:
            output.confidence_logits[at] = margins
        else:
            seen = context[begin - 1 : begin - 1 + num_slots]
            output.confidence_logits[at] = self._confidence(context[:begin], seen, acceptance)

    def move_row(self, source: int, destination: int, num_positions: int) -> None:
        self._called("move_row")
        self.store.move(source, destination, num_positions)
        self._next_ids[destination, :num_positions] = self._next_ids[source, :num_positions]

    def _forget(self) -> None:
        if self._last is not None:
            if self._last.draft_logits is not None:
                self._last.draft_logits[:] = np.nan
            self._last.draft_ids[:] = EMPTY


def softmax(logits: np.ndarray, temperature: float) -> np.ndarray:
    """float64; a point mass at temperature 0."""
    if temperature == 0.0:
        probs = np.zeros(len(logits))
        probs[np.argmax(logits)] = 1.0
        return probs
    weights = np.exp((logits.astype(np.float64) - float(logits.max())) / temperature)
    return weights / weights.sum()


def step_table(price: Callable[[int], float], *, num_tokens: int = 64, draft_ms: float = 0.0) -> StepTable:
    """A step table whose milliseconds depend on batch_tokens alone."""
    counts = (1, 2, 4, 8, 16, 32, 64)
    return StepTable(
        num_requests=counts,
        extra_tokens=tuple(range(num_tokens)),
        step_ms=(tuple(tuple(price(count + extra) for extra in range(num_tokens)) for count in counts),),
        draft_ms=(((draft_ms,),) * len(counts),),
    )


FLAT = step_table(lambda count: 10.0)
STEEP = step_table(lambda count: float(count))
MODERATE = step_table(lambda count: 10.0 + count)
DEAR = step_table(lambda count: 10.0 + count, draft_ms=40.0)
STAIRS = step_table(lambda count: 10.0 + 4.0 * (-(-count // 4)))

LIMITS = EngineLimits(max_requests=4, max_seq_len=64, max_batch_tokens=64)


def letters(ids: Sequence[int]) -> str:
    """One letter for each token."""
    return "".join(chr(97 + token) for token in ids)


def make_loop(
    target: ToyTarget,
    drafter: ToyDrafter | None,
    scheduler: SchedulerConfig,
    *,
    table: StepTable = MODERATE,
    eos_token_ids: Sequence[int] = (),
    decode: Callable[[Sequence[int]], str] = letters,
    step_engine: StepEngine | None = None,
    acceptance: AcceptEngine | None = None,
    calibration: Calibration | None = None,
    lookup: LookupAcceptance | None = None,
    num_lookup_drafts: int = 4,
    keeps_trajectories: bool = False,
    on_verified: OnVerified | None = None,
    prefix_cache: bool = False,
) -> DecodingLoop:
    """`calibration` is neutral where none is given; num_lookup_drafts: where nothing but `lookup` drafts."""
    num_slots = drafter.gamma if drafter else num_lookup_drafts if lookup else 0
    return DecodingLoop(
        target=target,
        drafter=drafter,
        step_engine=step_engine,
        acceptance=acceptance,
        step_table=table,
        calibration=calibration or Calibration.from_temperatures([1.0] * num_slots),
        lookup=lookup,
        keeps_trajectories=keeps_trajectories,
        on_verified=on_verified,
        eos_token_ids=eos_token_ids,
        decode=decode,
        scheduler=scheduler,
        prefix_cache=prefix_cache,
    )


@dataclass
class Output:
    """All that one request got."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    log_probs: list[float] = field(default_factory=list)
    top_log_probs: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    emissions: list[Emission] = field(default_factory=list)

    @property
    def last(self) -> Emission:
        return self.emissions[-1]


def run(loop: DecodingLoop, requests: Sequence[GenerationRequest], max_steps: int = 100_000) -> dict[str, Output]:
    """Submit everything and step until the loop is empty; integrity is checked after every step."""
    outputs: dict[str, Output] = {}
    for request in requests:
        loop.submit(request)
        outputs[request.request_id] = Output()
    for _ in range(max_steps):
        if not loop.has_work:
            return outputs
        collect(loop, outputs)
    raise AssertionError("the loop does not come to an end")


def collect(loop: DecodingLoop, outputs: dict[str, Output]) -> None:
    """One step, into `outputs`."""
    for emission in loop.step():
        output = outputs.setdefault(emission.request_id, Output())
        output.token_ids.extend(emission.token_ids)
        output.text += emission.text
        output.log_probs.extend(emission.log_probs or ())
        output.top_log_probs.extend(emission.top_log_probs or ())
        output.emissions.append(emission)
    loop.check_integrity()

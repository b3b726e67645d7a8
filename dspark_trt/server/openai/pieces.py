"""What comes back from the engine: the pieces of several sequences in the order they are made, and how they add up."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dspark_trt.server.openai.errors import timed_out
from dspark_trt.server.openai.jobs import Job
from dspark_trt.server.openai.triton import Alternatives, Models, Piece

_MAX_UNREAD = 64  # pieces held for a client that reads slowly; then its requests wait


async def run(models: Models, jobs: Sequence[Job], timeout_s: float) -> AsyncGenerator[tuple[int, Piece], None]:
    """Every piece of every job with the job's index. The first failure ends all. Closing the iterator ends them too.

    Raises ApiError, also when `timeout_s` are over before the last piece.
    """
    pieces: asyncio.Queue[tuple[int, Piece | Exception | None]] = asyncio.Queue(_MAX_UNREAD)

    async def follow(index: int, job: Job) -> None:
        stream = models.generate(job.tensors, job.request_id, num_log_probs=job.num_log_probs)
        try:
            async with contextlib.aclosing(stream):
                async for piece in stream:
                    await pieces.put((index, piece))
            await pieces.put((index, None))
        except Exception as error:
            await pieces.put((index, error))

    tasks = [asyncio.create_task(follow(index, job)) for index, job in enumerate(jobs)]
    deadline = asyncio.get_running_loop().time() + timeout_s
    try:
        num_open = len(tasks)
        while num_open:
            try:
                async with asyncio.timeout_at(deadline):
                    index, piece = await pieces.get()
            except TimeoutError:
                raise timed_out(f"timeout_ms: the request did not end within {timeout_s * 1e3:.0f} ms") from None
            if isinstance(piece, Exception):
                raise piece
            if piece is None:
                num_open -= 1
            else:
                yield index, piece
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(slots=True)
class Tally:
    """One answer so far: its text, its tokens, and what speculation did for it.

    The engine sends one piece for the prompt's own token and one for every verification step after it.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    top_log_probs: list[Alternatives] = field(default_factory=list)
    finish_reason: str = ""
    _tokens_of_steps: list[int] = field(default_factory=list)
    _last: Piece | None = None

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.token_ids += piece.token_ids
        self.log_probs += piece.log_probs
        self.top_log_probs += piece.top_log_probs
        self.finish_reason = piece.finish_reason
        self._tokens_of_steps.append(len(piece.token_ids))
        self._last = piece

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that another request had computed; known with the last piece."""
        return 0 if self._last is None else self._last.num_cached_tokens

    def speculation(self, gamma: int) -> dict[str, Any] | None:
        """vLLM's `metrics.speculative_decoding` of a whole answer; None where no draft was verified.

        `acceptance_histogram` is dense: entry j counts the steps that accepted j drafts.
        """
        last = self._last
        if last is None or not last.num_drafts_verified:
            return None
        accepted = [num_tokens - 1 for num_tokens in self._tokens_of_steps[1:]]
        # The last step may be cut: by an EOS or a stop word among its drafts, or by max_tokens.
        accepted[-1] = last.num_drafts_accepted - sum(accepted[:-1])
        if len(accepted) != last.num_steps or not all(0 <= count <= gamma for count in accepted):
            return None  # a piece held more than one step: rather nothing than a guess
        return {
            "mean_acceptance_length": 1.0 + last.num_drafts_accepted / last.num_steps,
            "draft_acceptance_rate": last.num_drafts_accepted / last.num_drafts_verified,
            "acceptance_histogram": [accepted.count(count) for count in range(gamma + 1)],
            "num_spec_steps": last.num_steps,
            "num_accepted_draft_tokens": last.num_drafts_accepted,
            "num_draft_tokens": last.num_drafts_verified,
            "num_spec_tokens": gamma,
        }

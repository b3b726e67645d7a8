"""Requests from their submission to their end: who waits for a KV row, and who is to end before the next step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from dspark_trt.contract.protocol import TargetEngine
from dspark_trt.errors import RequestError
from dspark_trt.runtime.request import GenerationRequest, validate
from dspark_trt.runtime.state import Phase, RequestState, new_state
from dspark_trt.runtime.text_stream import Decode


class RequestQueue:
    """All requests of one loop that are not finished. Those without a row wait, first come first served."""

    def __init__(
        self,
        target: TargetEngine,
        *,
        eos_token_ids: Sequence[int],
        decode: Decode,
        looks_up: bool,
        keeps_trajectories: bool = False,
    ) -> None:
        self._target = target
        self._eos_token_ids = tuple(eos_token_ids)
        self._decode = decode
        self._looks_up = looks_up
        self._keeps_trajectories = keeps_trajectories
        self._waiting: deque[RequestState] = deque()
        self._unfinished: dict[str, RequestState] = {}  # by request id
        self._cancelled: dict[str, RequestState] = {}  # of these, since the last step

    @property
    def request_ids(self) -> list[str]:
        """Of all that are not finished."""
        return list(self._unfinished)

    @property
    def num_unfinished(self) -> int:
        return len(self._unfinished)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def submit(self, request: GenerationRequest) -> None:
        """Raises RequestError when the request is not acceptable; nothing is queued then."""
        max_seq_len = self._target.limits.max_seq_len
        validate(request, vocab_size=self._target.vocab_size, max_seq_len=max_seq_len)
        if request.request_id in self._unfinished:
            raise RequestError(f"request_id: {request.request_id!r} is in use; wait for its end or choose another")
        state = new_state(
            request,
            max_seq_len=max_seq_len,
            eos_token_ids=self._eos_token_ids,
            decode=self._decode,
            looks_up=self._looks_up,
            keeps_trajectories=self._keeps_trajectories,
        )
        self._unfinished[request.request_id] = state
        self._waiting.append(state)

    def cancel(self, request_id: str) -> bool:
        """False when there is no such request."""
        if request_id not in self._unfinished:
            return False
        self._cancelled[request_id] = self._unfinished[request_id]
        return True

    def take_cancelled(self) -> list[RequestState]:
        """Those cancelled since the last call. None of them waits any more."""
        cancelled, self._cancelled = list(self._cancelled.values()), {}
        for state in cancelled:
            if state.phase is Phase.QUEUED:
                self._waiting.remove(state)
        return cancelled

    def take_next(self) -> RequestState:
        """The request that has waited longest; it gets a row."""
        return self._waiting.popleft()

    def forget(self, state: RequestState) -> None:
        """A request is finished: its id may be used again."""
        del self._unfinished[state.request.request_id]

"""StepEngine on one device: draft, select and verify without waiting for the host.

Shape letters: `R` requests that decode, `R_d` those of them that draft, `G` gamma, `T` packed tokens; `B` rows of
the target's decode group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from dspark_trt.contract import bindings
from dspark_trt.contract.protocol import DraftBatch, HostDrafts, SelectBatch, SelectedOutput, TargetBatch
from dspark_trt.engines.device.blocks import DeviceDrafter
from dspark_trt.engines.device.buckets import bucket
from dspark_trt.engines.device.calls import TargetCall, check_batch, num_decode_tokens
from dspark_trt.engines.device.errors import torch_errors
from dspark_trt.engines.device.graphs import Capture
from dspark_trt.engines.device.select import VERIFY_LEN, SelectCalls, select_arrays
from dspark_trt.engines.device.session import DeviceSession
from dspark_trt.engines.device.target import DeviceTargetEngine

_SELECTED = (bindings.TOKEN_IDS, bindings.POSITIONS)  # of packed tokens


class DeviceStepEngine:
    """Draft, selection and verification of a step, enqueued in one go on torch's current stream.

    The draft's ids and confidences are the selection's inputs, and what the selection writes is the very memory that
    the target's index inputs stand in: nothing goes over the host.

    Where the host waits, in a step of `lagged_budget`:

    - `SelectedOutput.wait`, for the copy of draft ids, confidences and verify_len, behind the selection and in front of
      the verification: the request's processors and the packing of acceptance need ids and lengths. The GPU verifies
      meanwhile.
    - acceptance (runtime), for the verification, where it first reads a result: accepted ids decide the next step.
    - `StagedInputs.send`, for a copy four sends ago, because pinned memory is written again: long over in practice.

    Nothing else waits. `draft_and_verify` itself does not, but for a step's first appearance in a bucket and its
    second, where a backend may load kernels and a CUDA graph is captured.
    """

    def __init__(
        self,
        target: DeviceTargetEngine,
        drafter: DeviceDrafter,
        select_session: DeviceSession,
        *,
        capture: Capture | None = None,
    ) -> None:
        """Raises EngineBuildError where the device has no room."""
        self._target = target
        self._drafter = drafter
        with torch_errors("buffers of the selection"):
            self._select = SelectCalls(select_session, drafter.dims, drafter.select_begin, target.device, capture)

    def draft_and_verify(self, draft: DraftBatch, select: SelectBatch, plain: TargetBatch) -> SelectedOutput:
        """One draft block, the selection of its drafts, and their verification (`StepEngine`).

        T is known beforehand: an anchor of every request, the forced drafts, and K of the others or all that are
        offered.
        Raises CapacityError when the step exceeds the limits, EngineBuildError when the backend fails.
        """
        caps, is_forced = select.caps, select.is_forced
        num_offered, num_forced = int(caps[~is_forced].sum()), int(caps[is_forced].sum())
        num_selected = num_forced + min(select.num_admitted, num_offered)
        n, num_drafting = plain.num_decode, len(draft.rows)
        assert len(caps) == n, "a cap for every request that decodes"
        assert not caps[num_drafting:].any(), "requests that do not draft have cap 0 and stand last"
        assert 0 <= caps.min() <= caps.max() <= self._drafter.gamma, "a cap is beyond the block"
        assert (plain.query_lengths[:n] == 1).all(), "the plain step decodes anchors alone"
        assert (draft.rows == plain.rows[:num_drafting]).all(), "those that draft stand first"
        new_positions = plain.query_lengths.copy()
        new_positions[:n] += caps
        target, drafter = self._target, self._drafter
        check_batch(plain, new_positions, target.gamma, target.limits, num_selected)
        draft_call = drafter.draft_call(draft)
        calls = target.calls(plain, num_selected)
        num_rows, num_requests = calls[0].shape.decode[0], bucket(n, target.limits.max_requests)
        arrays = select_arrays(select, plain.token_ids[:n], plain.past_lengths[:n], num_requests, num_rows)
        with torch_errors("draft, selection and verification"):
            drafter.inputs.send(*draft_call.parts, (self._select.layout(num_requests, num_rows), arrays))
            target.send(calls[0])
            drafted = drafter.enqueue(draft_call)
            self._select_into(calls[0], num_requests, num_rows, num_decode_tokens(plain, num_selected))
            fetched = drafter.fetched.fetch()
            verified = target.enqueue(calls)
        return SelectedOutput(_host_drafts(fetched, num_drafting, n), drafted.draft_logits, verified)

    def _select_into(self, call: TargetCall, num_requests: int, num_rows: int, num_tokens: int) -> None:
        """Into the index inputs of the step's first call: the decode tokens are its first ones."""
        index = dict(self._target.index_tensors(call.shape))
        is_bucket = call.shape.prefill is None
        if not is_bucket:
            index |= {name: index[name][:num_tokens] for name in _SELECTED}
        drafter = self._drafter
        self._select.enqueue(
            num_requests, num_rows, drafter.inputs.memory, drafter.fetched.tensors, index, is_bucket=is_bucket
        )


def _host_drafts(
    fetched: Callable[[], dict[str, NDArray[Any]]], num_drafting: int, num_requests: int
) -> Callable[[], HostDrafts]:
    def wait() -> HostDrafts:
        with torch_errors("draft and selection"):
            found = fetched()
        return HostDrafts(
            draft_ids=found[bindings.DRAFT_IDS][:num_drafting],
            confidence_logits=found[bindings.CONFIDENCE_LOGITS][:num_drafting],
            verify_lens=found[VERIFY_LEN][:num_requests],
        )

    return wait

# mypy: ignore-errors
# (Triton's language is Python by syntax only: its types are not Python's.)
"""What W2 turns into the transition bias, for heads that project: gated and rnn.

The part of the projection that meets the hidden state is computed once for all slots; the rest is small and per slot.

Shape letters: `R` requests, `G` gamma, `V` vocabulary, `D` hidden, `r` Markov rank.
"""

from __future__ import annotations

import triton
import triton.language as tl
from dspark_trt_plugins.markov_head.kernel import precise_dot, previous_ids


@triton.jit
def project_hidden(
    hidden,  # [R * G, D]
    projection,  # [OUT, STRIDE], of which COLUMN .. COLUMN + D meet the hidden state
    projection_bias,  # [OUT]
    projected,  # [R * G, OUT] float32
    num_rows,
    D: tl.constexpr,
    OUT: tl.constexpr,
    STRIDE: tl.constexpr,
    COLUMN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_HIDDEN: tl.constexpr,
):
    """The part of a gated or recurrent projection that no draft changes: all slots at once."""
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    outs = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    is_row, is_out = rows < num_rows, outs < OUT
    total = tl.zeros([BLOCK_OUT, BLOCK_R], tl.float32)
    for first in range(0, D, BLOCK_HIDDEN):
        ks = first + tl.arange(0, BLOCK_HIDDEN)
        is_k = ks < D
        w = tl.load(
            projection + outs[:, None] * STRIDE + COLUMN + ks[None, :], mask=is_out[:, None] & is_k[None, :], other=0.0
        )
        h = tl.load(
            hidden + rows[None, :].to(tl.int64) * D + ks[:, None], mask=is_row[None, :] & is_k[:, None], other=0.0
        )
        total = tl.dot(w, h, total, input_precision="ieee")
    total += tl.load(projection_bias + outs, mask=is_out, other=0.0).to(tl.float32)[:, None]
    tl.store(projected + rows[None, :] * OUT + outs[:, None], total, mask=is_row[None, :] & is_out[:, None])


@triton.jit
def embedded_part(w1, previous, is_request, weight, outs, is_out, total, RANK, STRIDE, COLUMN, BLOCK_K: tl.constexpr):
    """total [OUT, R] plus weight[outs, COLUMN ..] times W1[previous]."""
    for first in range(0, RANK, BLOCK_K):
        ks = first + tl.arange(0, BLOCK_K)
        is_k = ks < RANK
        w = tl.load(
            weight + outs[:, None] * STRIDE + COLUMN + ks[None, :], mask=is_out[:, None] & is_k[None, :], other=0.0
        )
        e = tl.load(w1 + previous[None, :] * RANK + ks[:, None], mask=is_request[None, :] & is_k[:, None], other=0.0)
        total = tl.dot(w, e, total, input_precision="ieee")
    return total


@triton.jit
def state_part(state, requests, is_request, weight, outs, is_out, total, RANK, STRIDE, BLOCK_K: tl.constexpr):
    """total [OUT, R] plus weight[outs, 0 ..] times the recurrent state."""
    for first in range(0, RANK, BLOCK_K):
        ks = first + tl.arange(0, BLOCK_K)
        is_k = ks < RANK
        w = tl.load(weight + outs[:, None] * STRIDE + ks[None, :], mask=is_out[:, None] & is_k[None, :], other=0.0)
        s = tl.load(state + requests[None, :] * RANK + ks[:, None], mask=is_request[None, :] & is_k[:, None], other=0.0)
        total = precise_dot(w, s, total)
    return total


@triton.jit
def gated_feature(
    projected,  # [R, G, r] float32
    projection,  # [r, D + r]
    w1,  # [V, r]
    anchor_ids,
    draft_ids,
    feature,  # [R, r] float32
    num_requests,
    slot,
    GAMMA: tl.constexpr,
    VOCAB: tl.constexpr,
    RANK: tl.constexpr,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """sigmoid(gate_proj([h_j; W1[x_{j-1}]])) * W1[x_{j-1}] of one slot."""
    requests = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    outs = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    is_request, is_out = requests < num_requests, outs < RANK
    is_value = is_out[:, None] & is_request[None, :]
    previous = previous_ids(anchor_ids, draft_ids, requests, slot, is_request, GAMMA, VOCAB)
    gate = tl.load(projected + (requests[None, :] * GAMMA + slot) * RANK + outs[:, None], mask=is_value, other=0.0)
    gate = embedded_part(w1, previous, is_request, projection, outs, is_out, gate, RANK, D + RANK, D, BLOCK_K)
    embedded = tl.load(w1 + previous[None, :] * RANK + outs[:, None], mask=is_value, other=0.0).to(tl.float32)
    tl.store(feature + requests[None, :] * RANK + outs[:, None], tl.sigmoid(gate) * embedded, mask=is_value)


@triton.jit
def tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def recurrent_feature(
    projected,  # [R, G, 3r] float32
    projection,  # [3r, 2r + D]: columns meet the state, W1[x_{j-1}] and h_j
    w1,  # [V, r]
    anchor_ids,
    draft_ids,
    state,  # [2, R, r] float32: of the even slots and of the odd ones
    feature,  # [R, r] float32
    num_requests,
    slot,
    GAMMA: tl.constexpr,
    VOCAB: tl.constexpr,
    RANK: tl.constexpr,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """tanh(out) of one slot and the state that the next slot starts from."""
    STRIDE: tl.constexpr = 2 * RANK + D
    requests = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    outs = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    is_request, is_out = requests < num_requests, outs < RANK
    is_value = is_out[:, None] & is_request[None, :]
    has_state = requests < tl.where(slot > 0, num_requests, 0)  # s_0 = 0
    old_state = state + (slot % 2) * num_requests * RANK
    new_state = state + ((slot + 1) % 2) * num_requests * RANK
    previous = previous_ids(anchor_ids, draft_ids, requests, slot, is_request, GAMMA, VOCAB)
    of_slot = projected + (requests[None, :] * GAMMA + slot) * (3 * RANK) + outs[:, None]
    at = requests[None, :] * RANK + outs[:, None]

    gate = tl.load(of_slot, mask=is_value, other=0.0)
    gate = state_part(old_state, requests, has_state, projection, outs, is_out, gate, RANK, STRIDE, BLOCK_K)
    gate = embedded_part(w1, previous, is_request, projection, outs, is_out, gate, RANK, STRIDE, RANK, BLOCK_K)
    gate = tl.sigmoid(gate)
    rows = projection + RANK * STRIDE
    candidate = tl.load(of_slot + RANK, mask=is_value, other=0.0)
    candidate = state_part(old_state, requests, has_state, rows, outs, is_out, candidate, RANK, STRIDE, BLOCK_K)
    candidate = embedded_part(w1, previous, is_request, rows, outs, is_out, candidate, RANK, STRIDE, RANK, BLOCK_K)
    kept = tl.load(old_state + at, mask=is_value & has_state[None, :], other=0.0)
    tl.store(new_state + at, gate * kept + (1 - gate) * tanh(candidate), mask=is_value)

    rows = projection + 2 * RANK * STRIDE
    out = tl.load(of_slot + 2 * RANK, mask=is_value, other=0.0)
    out = state_part(old_state, requests, has_state, rows, outs, is_out, out, RANK, STRIDE, BLOCK_K)
    out = embedded_part(w1, previous, is_request, rows, outs, is_out, out, RANK, STRIDE, RANK, BLOCK_K)
    tl.store(feature + at, tanh(out), mask=is_value)

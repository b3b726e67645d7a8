# mypy: ignore-errors
# (Triton's language is Python by syntax only: its types are not Python's.)
"""MarkovHead in OpenAI Triton. `launches.py` says in which order these kernels run.

Per slot, W2 is read once: a program holds one tile of the vocabulary for all requests of its block, writes the
corrected logits and keeps of them only the largest, its id and the sum of the weights. The draw finds its tile from
these summaries and its token from the tile's logits, which are read again for that one tile only.

Nothing is accumulated with atomics and every sum has a fixed order, so the same inputs give the same bits. Masses are
summed as integers (multiples of 2^-40 of the largest weight), which makes cumulative sums exact: they never fall,
whatever order a parallel scan takes, and a token or tile without weight is never chosen.

Shape letters: `R` requests, `G` gamma, `V` vocabulary, `D` hidden, `r` Markov rank, `C` tiles, `N` top_n.
"""

from __future__ import annotations

import triton
import triton.language as tl
from dspark_trt_plugins.markov_head.form import LARGEST_LOGIT

LARGEST = tl.constexpr(LARGEST_LOGIT)
MASS_UNIT = tl.constexpr(2.0**40)
LARGEST_FRACTION = tl.constexpr(1 - 2.0**-30)  # of at most 2^62 units in float64: stays below the whole


@triton.jit
def finite(logits):
    """Float32 within +-LARGEST; NaN becomes the smallest."""
    known = tl.where(logits == logits, logits, -LARGEST)
    return tl.minimum(tl.maximum(known, -LARGEST), LARGEST)


@triton.jit
def previous_ids(anchor_ids, draft_ids, requests, slot, is_request, GAMMA: tl.constexpr, VOCAB: tl.constexpr):
    """The token before `slot`: the anchor, then the drafts. An id that is none is the nearest one that is."""
    if slot == 0:
        ids = tl.load(anchor_ids + requests, mask=is_request)
    else:
        ids = tl.load(draft_ids + requests * GAMMA + slot - 1, mask=is_request)
    return tl.minimum(tl.maximum(ids, 0), VOCAB - 1)


@triton.jit
def precise_dot(weights, features, products):
    """products plus weights [A, K] times float32 features [K, B]; 16-bit weights meet features in two 16-bit parts."""
    if weights.dtype == tl.float32:
        products = tl.dot(weights, features, products, input_precision="ieee")
    else:
        high = features.to(weights.dtype)
        rest = tl.where(tl.abs(high.to(tl.float32)) < LARGEST, features - high.to(tl.float32), 0.0)
        products = tl.dot(weights, high, products)
        products = tl.dot(weights, rest.to(weights.dtype), products)
    return products


@triton.jit
def tile_logits(
    base_logits,  # [R, G, V]
    w1,  # [V, r]
    w2,  # [V, r]
    feature,  # [R, r] float32; vanilla: none, W1 itself
    anchor_ids,  # [R]
    draft_ids,  # [R, G]
    temperatures,  # [R]
    draft_logits,  # [R, G, V] float32
    tile_max,  # [R, C] float32
    tile_argmax,  # [R, C] int32
    tile_sum,  # [R, C] float32
    num_requests,
    slot,
    GAMMA: tl.constexpr,
    VOCAB: tl.constexpr,
    RANK: tl.constexpr,
    NUM_TILES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Corrected logits of one tile of the vocabulary in one slot, and their summary."""
    requests = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    tile = tl.program_id(1)
    tokens = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    is_request, is_token = requests < num_requests, tokens < VOCAB
    is_value = is_token[:, None] & is_request[None, :]
    bias = tl.zeros([BLOCK_V, BLOCK_R], tl.float32)
    if RANK > 0:
        if feature is None:
            previous = previous_ids(anchor_ids, draft_ids, requests, slot, is_request, GAMMA, VOCAB)
        for first in range(0, RANK, BLOCK_K):
            ks = first + tl.arange(0, BLOCK_K)
            is_k = ks < RANK
            w = tl.load(w2 + tokens[:, None] * RANK + ks[None, :], mask=is_token[:, None] & is_k[None, :], other=0.0)
            is_feature = is_k[:, None] & is_request[None, :]
            if feature is None:
                f = tl.load(w1 + previous[None, :] * RANK + ks[:, None], mask=is_feature, other=0.0)
                bias = tl.dot(w, f, bias, input_precision="ieee")
            else:
                f = tl.load(feature + requests[None, :] * RANK + ks[:, None], mask=is_feature, other=0.0)
                bias = precise_dot(w, f, bias)
    at = (requests[None, :].to(tl.int64) * GAMMA + slot) * VOCAB + tokens[:, None]
    logits = finite(tl.load(base_logits + at, mask=is_value, other=0.0).to(tl.float32) + bias)
    tl.store(draft_logits + at, logits, mask=is_value)
    summarise(
        tl.where(is_token[:, None], logits, -float("inf")),
        temperatures,
        tile_max,
        tile_argmax,
        tile_sum,
        requests,
        is_request,
        tile,
        NUM_TILES,
        BLOCK_V,
    )


@triton.jit
def summarise(
    logits,  # [BLOCK, BLOCK_R], -inf where there is no token
    temperatures,
    tile_max,
    tile_argmax,
    tile_sum,
    requests,
    is_request,
    tile,
    NUM_TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Largest logit, its place (the lowest of equals) and the sum of weights exp((logit - largest) / temperature)."""
    largest, place = tl.max(logits, axis=0, return_indices=True)
    temperature = tl.load(temperatures + requests, mask=is_request, other=1.0)
    temperature = tl.where(temperature > 0, temperature, 1.0)
    weights = tl.exp((logits - largest[None, :]) / temperature[None, :])
    at = requests * NUM_TILES + tile
    tl.store(tile_max + at, largest, mask=is_request)
    tl.store(tile_argmax + at, tile * BLOCK + place, mask=is_request)
    tl.store(tile_sum + at, tl.sum(weights, axis=0), mask=is_request)


@triton.jit
def draw_token(
    draft_logits,  # [R, G, V] float32
    candidates,  # [R, G, N] int32; without top_n: none
    temperatures,  # [R]
    uniforms,  # [R, G]
    tile_max,  # [R, C] float32
    tile_argmax,  # [R, C] int32
    tile_sum,  # [R, C] float32
    draft_ids,  # [R, G] int64
    slot,
    GAMMA: tl.constexpr,
    VOCAB: tl.constexpr,
    NUM_PLACES: tl.constexpr,  # V, or N
    NUM_TILES: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Argmax, or the first token whose cumulative probability exceeds the uniform:
    the tile first, then the token in it."""
    request = tl.program_id(0)
    row = request.to(tl.int64) * GAMMA + slot
    tiles = tl.arange(0, BLOCK_TILES)
    is_tile = tiles < NUM_TILES
    largest_of = tl.load(tile_max + request * NUM_TILES + tiles, mask=is_tile, other=-float("inf"))
    largest, tile = tl.max(largest_of, axis=0, return_indices=True)
    place = tl.load(tile_argmax + request * NUM_TILES + tile)
    temperature = tl.load(temperatures + request)
    if temperature > 0:
        sums = tl.load(tile_sum + request * NUM_TILES + tiles, mask=is_tile, other=0.0)
        masses = as_mass(tl.exp((largest_of - largest) / temperature) * sums)
        uniform = tl.load(uniforms + row).to(tl.float64)
        tile, position, mass = search(masses, uniform, tiles)
        places = tile * BLOCK_V + tl.arange(0, BLOCK_V)
        is_place = places < NUM_PLACES
        tokens = places
        if candidates is not None:
            tokens = tl.load(candidates + row * NUM_PLACES + places, mask=is_place, other=0)
        logits = tl.load(draft_logits + row * VOCAB + tokens, mask=is_place, other=-float("inf"))
        weights = as_mass(tl.exp((logits - tl.max(logits, axis=0)) / temperature))
        in_tile, _, _ = search(weights, position.to(tl.float64) / mass.to(tl.float64), tl.arange(0, BLOCK_V))
        place = tile * BLOCK_V + in_tile
    token = place
    if candidates is not None:
        token = tl.load(candidates + row * NUM_PLACES + place)
    tl.store(draft_ids + row, token.to(tl.int64))


@triton.jit
def as_mass(weights):
    """Non-negative float32 as integers, so that their sums are exact."""
    return (weights.to(tl.float64) * MASS_UNIT).to(tl.int64)


@triton.jit
def search(masses, fraction, indices):
    """First index whose cumulative mass exceeds `fraction` of the whole; where that is inside its mass; its mass."""
    cumulative = tl.cumsum(masses, axis=0)
    whole = tl.max(cumulative, axis=0)
    inside = tl.minimum(tl.maximum(fraction, 0.0), LARGEST_FRACTION)
    position = (inside * whole.to(tl.float64)).to(tl.int64)
    index = tl.sum((cumulative <= position).to(tl.int32), axis=0)
    mass = tl.sum(tl.where(indices == index, masses, 0), axis=0)
    before = tl.sum(tl.where(indices == index, cumulative, 0), axis=0) - mass
    return index, position - before, mass


@triton.jit
def confidence(
    hidden,  # [R, G, D]
    scored_w1,  # [V, r]; without Markov input: none
    scorer,  # [1, D + r] or [1, D]
    scorer_bias,  # [1]; none without a bias
    anchor_ids,
    draft_ids,
    confidence_logits,  # [R, G] float32
    GAMMA: tl.constexpr,
    VOCAB: tl.constexpr,
    RANK: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
):
    """w . [h_j; W1[x_{j-1}]] + b of one slot: it scores x_j and does not see it."""
    request = tl.program_id(0)
    slot = tl.program_id(1)
    row = request.to(tl.int64) * GAMMA + slot
    products = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, D, BLOCK_D):
        ds = first + tl.arange(0, BLOCK_D)
        h = tl.load(hidden + row * D + ds, mask=ds < D, other=0.0).to(tl.float32)
        products += h * tl.load(scorer + ds, mask=ds < D, other=0.0).to(tl.float32)
    total = tl.sum(products, axis=0)
    if scored_w1 is not None:
        ks = tl.arange(0, BLOCK_RANK)
        previous = previous_ids(anchor_ids, draft_ids, request, slot, None, GAMMA, VOCAB)
        e = tl.load(scored_w1 + previous * RANK + ks, mask=ks < RANK, other=0.0).to(tl.float32)
        total += tl.sum(e * tl.load(scorer + D + ks, mask=ks < RANK, other=0.0).to(tl.float32), axis=0)
    if scorer_bias is not None:
        total += tl.load(scorer_bias).to(tl.float32)
    tl.store(confidence_logits + row, total)

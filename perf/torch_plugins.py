"""MarkovHead and PrefixSelect in plain torch, as one would write them first:
what the microbenchmark compares the kernels with.

Shape letters: `R` requests, `G` gamma, `V` vocabulary, `D` hidden, `r` Markov rank, `T` packed tokens, `B` KV rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from dspark_trt_plugins.markov_head.form import EXCLUDED_LOGIT, LARGEST_LOGIT, W1, W2, MarkovHeadForm
from dspark_trt_plugins.prefix_select.form import PrefixSelectForm

Tensors = dict[str, torch.Tensor]


def torch_markov_head(form: MarkovHeadForm, inputs: Mapping[str, torch.Tensor]) -> Tensors:
    """Whole-vocabulary calls, slot after slot; inputs and outputs by name as the operation has them."""
    hidden = inputs["hidden"].float()
    state = hidden.new_zeros(hidden.shape[0], form.markov_rank)
    previous = inputs["anchor_ids"]
    ids, logits, confidences = [], [], []
    temperatures = inputs["temperatures"]
    is_greedy = temperatures <= 0
    for slot in range(form.gamma):
        base = inputs["base_logits"][:, slot].float()
        features = hidden[:, slot]
        slot_logits = base
        if form.has_markov_head:
            embedded = inputs[W1][previous].float()
            feature, state = _feature(form, inputs, features, embedded, state)
            slot_logits = base + torch.nn.functional.linear(feature.to(inputs[W2].dtype), inputs[W2]).float()
            if form.is_confidence_with_markov:
                features = torch.cat([features, embedded], dim=1)
        if form.has_confidence_head:
            confidences.append(_linear(inputs, "confidence_head.proj", features)[:, 0])
        slot_logits = torch.nan_to_num(slot_logits, nan=-LARGEST_LOGIT).clamp(-LARGEST_LOGIT, LARGEST_LOGIT)
        if form.top_n:
            kept = torch.zeros_like(slot_logits, dtype=torch.bool)
            kept.scatter_(1, base.topk(form.top_n, dim=1).indices, True)
            slot_logits = torch.where(kept, slot_logits, torch.full_like(slot_logits, EXCLUDED_LOGIT))
        probs = (slot_logits / torch.where(is_greedy, 1.0, temperatures)[:, None]).softmax(dim=1)
        cumulative = probs.double().cumsum(dim=1)
        points = inputs["uniforms"][:, slot].double()[:, None] * cumulative[:, -1:]
        sampled = torch.searchsorted(cumulative, points, right=True)[:, 0]
        previous = torch.where(is_greedy, slot_logits.argmax(dim=1), sampled)
        ids.append(previous)
        logits.append(slot_logits)
    outputs = {"draft_ids": torch.stack(ids, dim=1), "draft_logits": torch.stack(logits, dim=1)}
    return outputs | ({"confidence_logits": torch.stack(confidences, dim=1)} if confidences else {})


def _feature(
    form: MarkovHeadForm,
    inputs: Mapping[str, torch.Tensor],
    hidden: torch.Tensor,
    embedded: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    if form.head_type == "vanilla":
        return embedded, state
    if form.head_type == "gated":
        return _linear(
            inputs, "markov_head.gate_proj", torch.cat([hidden, embedded], dim=1)
        ).sigmoid() * embedded, state
    joint = _linear(inputs, "markov_head.joint_proj", torch.cat([state, embedded, hidden], dim=1))
    gate, candidate, out = joint.chunk(3, dim=1)
    return out.tanh(), torch.lerp(candidate.tanh(), state, gate.sigmoid())


def _linear(inputs: Mapping[str, torch.Tensor], name: str, features: torch.Tensor) -> torch.Tensor:
    weight, bias = inputs[f"{name}.weight"], inputs.get(f"{name}.bias")
    return torch.nn.functional.linear(features.to(weight.dtype), weight, bias).float()


def torch_prefix_select(form: PrefixSelectForm, inputs: Mapping[str, torch.Tensor]) -> Tensors:
    """A sort over all drafts, then gathers; inputs and outputs by name as the operation has them."""
    logits, caps, is_forced = inputs["confidence_logits"].double(), inputs["caps"], inputs["is_forced"] > 0
    is_finite = logits.isfinite()
    confidence = torch.where(is_finite, torch.where(is_finite, logits, 0.0) / inputs["temperatures"], 0.0).sigmoid()
    survival = torch.where(is_finite, confidence, 0.0).cumprod(dim=1)
    slots = torch.arange(form.gamma, device=caps.device)
    is_offered = slots < torch.where(is_forced, 0, caps)[:, None]
    keys = torch.where(is_offered, survival, -1.0).T.flatten()
    ranked, order = keys.sort(descending=True, stable=True)
    rank = torch.arange(len(keys), device=caps.device)
    is_taken = (rank < inputs["num_admitted"]) & (ranked >= 0)
    taken = torch.zeros_like(order).scatter(0, order, is_taken.long())
    verify_len = torch.where(is_forced, caps, taken.view(form.gamma, -1).sum(dim=0))
    ends = (verify_len + 1).cumsum(dim=0)
    first_tokens = ends - verify_len - 1
    token = torch.minimum(inputs["token_index"], ends[-1] - 1)
    request = torch.searchsorted(first_tokens, token, right=True) - 1
    slot = token - first_tokens[request]
    blocks = torch.cat([inputs["anchor_ids"][:, None], inputs["draft_ids"]], dim=1)
    is_used = inputs["row_query_lengths"] > 0
    of_row = torch.where(is_used, inputs["row_requests"], 0)
    length = torch.where(is_used, verify_len[of_row], 0)
    inside = torch.minimum(torch.arange(form.gamma + 1, device=caps.device), length[:, None])
    return {
        "verify_len": verify_len,
        "num_tokens": ends[-1:],
        "first_tokens": first_tokens,
        "token_requests": request,
        "token_ids": blocks[request, slot],
        "positions": inputs["past_lengths"][request] + slot,
        "padded_indices": inputs["block_rows"][request] * (form.gamma + 1) + slot,
        "decode.tokens": torch.where(is_used, first_tokens[of_row], 0)[:, None] + inside,
        "decode.past_lengths": torch.where(is_used, inputs["past_lengths"][of_row], 0),
        "decode.query_lengths": torch.where(is_used, length + 1, 0),
    }

"""A mixture of experts in plain PyTorch: every expert for every token, weighted by the router.

Nothing here depends on the values of a tensor, so all of it can be captured; a step reads every expert.

Shape letters: `T` tokens, `D` hidden, `E` experts, `I` width of one.
"""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from dspark_trt.checkpoints.spec import ExpertsSpec
from dspark_trt.reference.weights import ReferenceWeights


def mixture(weights: ReferenceWeights, spec: ExpertsSpec, module: str, x: torch.Tensor) -> torch.Tensor:
    """[T, D] -> [T, D]. `module` is the layer's `mlp`."""
    probs = weights.linear(f"{module}.gate", x).float().softmax(dim=-1)  # [T, E]
    values, chosen = probs.topk(spec.num_active, dim=-1)
    if spec.is_normalised:
        values = values / values.sum(dim=-1, keepdim=True)
    routed = torch.zeros_like(probs).scatter(1, chosen, values).to(x.dtype)
    products = torch.einsum("td,eid->eti", x, weights.typed(f"{module}.experts.gate_up.weight", x.dtype))
    hidden = silu(products[..., 0::2]) * products[..., 1::2]  # [E, T, I]
    outputs = torch.einsum("eti,edi->etd", hidden, weights.typed(f"{module}.experts.down.weight", x.dtype))
    mixed = torch.einsum("te,etd->td", routed, outputs)
    if spec.shared_intermediate_size is None:
        return mixed
    shared = f"{module}.shared_expert"
    hidden = silu(weights.linear(f"{shared}.gate_proj", x)) * weights.linear(f"{shared}.up_proj", x)
    openness = weights.linear(f"{module}.shared_expert_gate", x).sigmoid()
    return mixed + openness * weights.linear(f"{shared}.down_proj", hidden)

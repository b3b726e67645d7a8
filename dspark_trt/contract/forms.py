"""The forms of the `dspark` custom nodes that a drafter takes: what graphs place and devices launch."""

from __future__ import annotations

from dspark_trt_plugins.acceptance.form import MAX_SLOTS, MAX_VOCAB_SIZE, AcceptanceForm
from dspark_trt_plugins.acceptance.launches import AcceptanceOperation
from dspark_trt_plugins.markov_head.form import MarkovHeadForm
from dspark_trt_plugins.prefix_select.form import PrefixSelectForm

from dspark_trt.checkpoints.spec import BlockDrafterSpec
from dspark_trt.contract.dims import DrafterDims, FloatType, TargetDims


def markov_head_form(
    spec: BlockDrafterSpec,
    element_type: FloatType,
    top_n: int = 0,
    *,
    num_slots: int | None = None,
    vocab_size: int | None = None,
) -> MarkovHeadForm:
    """The form with weights, hidden states and base logits of one type; `top_n` 0 draws from the whole vocabulary.

    num_slots and vocab_size are the drafter's own where they are not given.
    """
    return MarkovHeadForm(
        gamma=num_slots or spec.gamma,
        vocab_size=vocab_size or spec.decoder.vocab_size,
        hidden_size=spec.decoder.hidden_size,
        markov_rank=spec.markov_rank,
        head_type=spec.markov_head_type,
        has_confidence_head=spec.has_confidence_head,
        has_confidence_bias=spec.has_confidence_bias,
        is_confidence_with_markov=spec.is_confidence_with_markov,
        top_n=top_n,
        weight_type=element_type,
        logits_type=element_type,
    )


def select_form(dims: DrafterDims) -> PrefixSelectForm:
    """The selection that runs between draft and verification on a device, where K is known beforehand."""
    return PrefixSelectForm(dims.gamma)


def acceptance_operation(target: TargetDims, drafter: DrafterDims) -> AcceptanceOperation | None:
    """What accepts the drafts of this pair on a device; None where the sizes are beyond its kernels."""
    if target.vocab_size > MAX_VOCAB_SIZE or drafter.gamma >= MAX_SLOTS:
        return None
    return AcceptanceOperation(AcceptanceForm(target.vocab_size, drafter.gamma + 1))

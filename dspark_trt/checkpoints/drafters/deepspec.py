"""DeepSpec's dialect, which NeMo AutoModel writes too: `Qwen3DSparkModel`, every key at the top level.

Anchor first, unless sample_from_anchor says otherwise; layer ids count from 0, and taps are Hugging Face's
`hidden_states[id + 1]`, so that the last layer's is normalised (NeMo hooks the final norm for it). Attention is
bidirectional over the whole context. Source: DeepSpec and NeMo AutoModel, their DSpark models and target wrappers.
"""

from __future__ import annotations

from typing import Any

from dspark_trt.checkpoints.drafters.description import (
    ANCHOR_KEYS,
    Description,
    describe,
    flattened,
    stated_mask_first,
    without,
)
from dspark_trt.errors import CheckpointError

ARCHITECTURE = "Qwen3DSparkModel"
DIALECT = "DeepSpec"


def read(values: dict[str, Any], where: str) -> Description:
    """Raises CheckpointError as `describe` does."""
    flat = flattened(values, "dflash_config", where)  # some exporters repeat keys there
    if flat.get("causal") is False:
        flat = without(flat, "causal")
    if flat.get("causal"):
        raise CheckpointError(
            f"{where}: causal = true: DeepSpec's {ARCHITECTURE} sees its whole block; remove the key, or use another "
            "architecture's name"
        )
    if (draft_vocab := flat.get("draft_vocab_size")) not in (None, flat.get("vocab_size")):
        raise CheckpointError(
            f"{where}: draft_vocab_size = {draft_vocab} is not vocab_size = {flat.get('vocab_size')}: DeepSpec's form "
            "has no reduced draft vocabulary; use the drafter in the speculators form, which has d2t and t2d"
        )
    return describe(
        without(flat, *ANCHOR_KEYS),
        where,
        dialect=DIALECT,
        is_mask_first=bool(stated_mask_first(flat, where)),
        is_last_tap_normed=True,
    )

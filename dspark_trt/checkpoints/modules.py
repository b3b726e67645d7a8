"""Tensors of the MTP modules that a target's checkpoint holds beside the target: MiMo's, `model.mtp_layers.{i}`."""

from __future__ import annotations

_PREFIX = "mtp_layers."


def is_of_module(name: str) -> bool:
    """Whether a tensor, by its name without `model.`, belongs to an MTP module and not to the target."""
    return name.startswith(_PREFIX)

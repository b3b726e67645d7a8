"""The precisions of an engine: of its weights, and with them of its activations."""

from __future__ import annotations

from typing import Literal

Precision = Literal["fp32", "int8", "int4", "bf16", "fp16"]

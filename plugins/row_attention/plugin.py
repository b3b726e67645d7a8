"""RowAttention as a TensorRT plugin. README.md says what was run of it and where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dspark_trt_plugins import trt_plugin
from dspark_trt_plugins.bundle import KernelBundle
from dspark_trt_plugins.operation import form_from_attributes
from dspark_trt_plugins.row_attention.form import RowAttentionForm
from dspark_trt_plugins.row_attention.launches import RowAttentionOperation

NAME = "RowAttention"


def operation(attributes: Mapping[str, int | str]) -> RowAttentionOperation:
    """Raises ValueError when the attributes are not those of a form."""
    return RowAttentionOperation(form_from_attributes(RowAttentionForm, attributes))


def register(trt: Any, bundles: Sequence[KernelBundle] = ()) -> None:
    """Let `trt` make this plugin. Parsing a graph needs a bundle of its form; running an engine needs none."""
    trt_plugin.register(trt, NAME, RowAttentionForm, operation, bundles)

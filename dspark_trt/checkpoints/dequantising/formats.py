"""Which format a target's weights are quantised in, and the store that de-quantises them when they are read.

Weights become plain numbers of the build's precision. Activations are not quantised, whatever the checkpoint says of
them: the output is that of the de-quantised model, not of a kernel that computes in few bits. Every other format is
refused by its name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dspark_trt.checkpoints.dequantising import awq, compressed_tensors, fp8, gptq
from dspark_trt.checkpoints.derived import Derived, DerivedStore
from dspark_trt.checkpoints.quantised import refuse_quantised
from dspark_trt.checkpoints.safetensors_store import SafetensorsStore
from dspark_trt.checkpoints.spec import WeightStore
from dspark_trt.errors import CheckpointError

logger = logging.getLogger(__name__)

CONFIG_KEYS = ("quantization_config", "compression_config")
Values = Mapping[str, Any]  # of quantization_config


@dataclass(frozen=True, slots=True)
class Reader:
    """What reads one format."""

    name: str
    check: Callable[[Values, str], None]
    weights_of: Callable[[SafetensorsStore, Values, str], dict[str, Derived]]
    of_activations: tuple[str, ...] = ()  # endings of tensors that say how activations and KV are quantised


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """A format, and what the checkpoint says about it."""

    reader: Reader
    values: Values


_READERS: Mapping[str, Reader] = {  # by quant_method
    "fp8": Reader(fp8.NAME, fp8.check, fp8.weights_of, fp8.OF_ACTIVATIONS),
    "compressed-tensors": Reader(
        compressed_tensors.NAME,
        compressed_tensors.check,
        compressed_tensors.weights_of,
        compressed_tensors.OF_ACTIVATIONS,
    ),
    "gptq": Reader(gptq.NAME, gptq.check, gptq.weights_of),
    "awq": Reader(awq.NAME, awq.check, awq.weights_of),
}


def weight_format(values: Mapping[str, Any], where: str) -> WeightFormat | None:
    """From config.json's `values`; None: plain weights. Raises CheckpointError that names an unsupported format."""
    stated = values.get(CONFIG_KEYS[0]) or values.get(CONFIG_KEYS[1])
    method = stated.get("quant_method") if isinstance(stated, Mapping) else None
    if not isinstance(stated, Mapping) or not isinstance(method, str) or method not in _READERS:
        refuse_quantised(values, (), where)
        return None
    _READERS[method].check(stated, where)
    return WeightFormat(_READERS[method], stated)


def dequantised(weights: SafetensorsStore, form: WeightFormat | None, where: str) -> WeightStore:
    """The same tensors with the quantised ones as float32, each made when it is read.

    Raises CheckpointError where tensors are missing or do not fit together, where none is quantised though the
    configuration says so, and where some are though it does not.
    """
    if form is None:
        try:
            refuse_quantised({}, weights.names(), where)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}, or, if config.json has lost its quantization_config, the one that belongs to these weights"
            ) from None
        return weights
    name = form.reader.name
    found = form.reader.weights_of(weights, form.values, where)
    if not found:
        raise CheckpointError(
            f"{where}: quantization_config says that weights are in {name} form, but no tensor is; remove the key if "
            "the weights are plain numbers"
        )
    unused = [each for each in weights.names() if each.endswith(form.reader.of_activations)]
    logger.warning(
        "%s: %d weights are in %s form: they are de-quantised, and activations and KV are not quantised. The output is "
        "that of the de-quantised model, not of a kernel for %s",
        where,
        len(found),
        name,
        name,
    )
    return DerivedStore(weights, found, left_out=unused)

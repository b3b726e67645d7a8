"""Tensors that are made of stored ones when they are read: experts in one stack, de-quantised weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dspark_trt.checkpoints.spec import TensorInfo, WeightStore


@dataclass(frozen=True, slots=True)
class Derived:
    """One such tensor, and what it is made of, which is then no tensor of its own any more."""

    info: TensorInfo
    sources: tuple[str, ...]
    make: Callable[[], NDArray[np.generic]]


class DerivedStore:
    """A WeightStore over another one, without some of its tensors and with derived ones. Nothing is kept in memory."""

    def __init__(
        self, store: WeightStore, derived: Mapping[str, Derived] | None = None, left_out: Iterable[str] = ()
    ) -> None:
        self._store = store
        self._derived = dict(derived or {})
        gone = {name for each in self._derived.values() for name in each.sources} | set(left_out)
        self._names = tuple(sorted((set(store.names()) - gone) | set(self._derived)))

    def names(self) -> tuple[str, ...]:
        return self._names

    def info(self, name: str) -> TensorInfo:
        return self._derived[name].info if name in self._derived else self._store.info(name)

    def array(self, name: str) -> NDArray[np.generic]:
        return self._derived[name].make() if name in self._derived else self._store.array(name)

"""Stores of weights that show a part of another store, or show it under other names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dspark_trt.checkpoints.spec import TensorInfo, WeightStore


class SelectedRows:
    """A store in which some tensors have chosen rows only, in a chosen order."""

    def __init__(self, store: WeightStore, rows: Mapping[str, NDArray[np.int64]]) -> None:
        self._store = store
        self._rows = dict(rows)

    def names(self) -> tuple[str, ...]:
        return self._store.names()

    def info(self, name: str) -> TensorInfo:
        info = self._store.info(name)
        if name not in self._rows:
            return info
        return TensorInfo(info.dtype, (len(self._rows[name]), *info.shape[1:]))

    def array(self, name: str) -> NDArray[np.generic]:
        array = self._store.array(name)
        return array[self._rows[name]] if name in self._rows else array


class FirstRows:
    """A store in which matrices of some names end early; their bytes stay where they are."""

    def __init__(self, store: WeightStore, names: Iterable[str], count: int) -> None:
        self._store = store
        self._shortened = frozenset(names)
        self._count = count

    def names(self) -> tuple[str, ...]:
        return self._store.names()

    def info(self, name: str) -> TensorInfo:
        info = self._store.info(name)
        return replace(info, shape=(self._count, *info.shape[1:])) if name in self._shortened else info

    def array(self, name: str) -> NDArray[np.generic]:
        array = self._store.array(name)
        return array[: self._count] if name in self._shortened else array


class OneTensor:
    """One tensor of a store, under another name."""

    def __init__(self, store: WeightStore, name: str, stored_name: str) -> None:
        self._store = store
        self._name, self._stored_name = name, stored_name

    def names(self) -> tuple[str, ...]:
        return (self._name,)

    def info(self, name: str) -> TensorInfo:
        assert name == self._name
        return self._store.info(self._stored_name)

    def array(self, name: str) -> NDArray[np.generic]:
        assert name == self._name
        return self._store.array(self._stored_name)

"""The request to a system, and the build that it returns.

A build is named tensors plus a recipe, a short JSON text with everything else. torch's operators
see only tensors and text, so plans can be saved, traced and exported.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from sparsetile.core.device import Machine, machine
from sparsetile.formats.column_pairs import distinct_pairs
from sparsetile.intake.csr import CSR
from sparsetile.launch.interface import Tensors
from sparsetile.reorder import Permutation

__all__ = [
    "BuildTimer",
    "BuiltSystem",
    "EngineBuild",
    "Request",
    "make_recipe",
    "order_tensor",
    "part",
    "prefixed",
    "tensor_bytes",
]

_Found = TypeVar("_Found")


def prefixed(name: str, tensors: Tensors) -> dict[str, Tensor]:
    """Return the tensors of a part under prefixed names: ``exact.indptr``."""
    return {f"{name}.{key}": tensor for key, tensor in tensors.items()}


def part(name: str, tensors: Tensors) -> dict[str, Tensor]:
    """Return the tensors that :func:`prefixed` was given."""
    start = f"{name}."
    return {
        key.removeprefix(start): tensor for key, tensor in tensors.items() if key.startswith(start)
    }


@dataclass(frozen=True, eq=False)
class Request:
    """The product that the caller wants, and its options."""

    csr: CSR
    n: int
    dtype: torch.dtype
    permutation: Permutation
    deterministic: bool = False
    ablation: str | None = None  # one of the system's ablations; everything is on if None
    timed: bool = False  # wait for the device before each reading of the clock
    ceilings: Machine | None = None  # predict for this machine instead of the request's own
    counts_pairs: bool = True  # whether predictions may count pairs, or assume random entries
    in_place: bool = False  # values are read from the caller's memory: nothing may copy them
    _counted: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def device(self) -> torch.device:
        return self.csr.device

    @property
    def machine(self) -> Machine:
        """The machine to predict for."""
        return self.ceilings or machine(self.device)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of B."""
        return self.n * self.dtype.itemsize

    def changed(self, **fields: Any) -> Request:
        """Return the same request with fields other than A and its order changed; keeps counts."""
        other = replace(self, **fields)
        object.__setattr__(other, "_counted", self._counted)
        return other

    def once(self, what: Any, count: Callable[[], _Found]) -> _Found:
        """Return ``count()``, called once per A and row order for the key ``what``."""
        if what not in self._counted:
            self._counted[what] = count()
        return self._counted[what]

    def pairs(self, window: int) -> int:
        """Count the distinct (window of ``window`` rows, column) pairs, each height once.

        Counting sorts all entries; the choice of a system and its build need the same heights.
        """
        return self.once(window, lambda: distinct_pairs(self.csr, window, self.permutation.perm))

    def counted_pairs(self, window: int) -> int:
        """The same if counting is allowed; otherwise for randomly scattered entries.

        Similar rows have fewer pairs than the estimate.
        """
        if self.counts_pairs or window in self._counted:
            return self.pairs(window)
        rows, cols = self.csr.shape
        if self.csr.nnz == 0:
            return 0
        met = 1 - (1 - self.csr.nnz / (rows * cols)) ** window
        return min(self.csr.nnz, round(rows * cols / window * met))


@dataclass(frozen=True, eq=False)
class BuiltSystem:
    """A system's build: tensors by name, recipe, its choices in words, and its time."""

    system: str
    tensors: dict[str, Tensor]
    recipe: str
    choices: Mapping[str, str] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)  # of format and schedule

    @property
    def bytes(self) -> int:
        """Memory of the tensors."""
        return tensor_bytes(self.tensors.values())


@dataclass(frozen=True, eq=False)
class EngineBuild:
    """An engine's build for a system: like :class:`BuiltSystem`, with ``meta`` for a recipe."""

    tensors: dict[str, Tensor]
    choices: dict[str, str]
    seconds: dict[str, float]
    meta: dict[str, Any]


class BuildTimer:
    """Seconds of the parts of a build: ``timer("format")`` records the time since the last call.

    The device works on after a call has returned. With ``Request.timed`` each reading waits for the
    device, so that a part's time includes its own work and not the previous part's.
    """

    def __init__(self, request: Request) -> None:
        self._device = request.device
        self._waits = request.timed and request.device.type == "cuda"
        self.seconds = {"format": 0.0, "schedule": 0.0}
        self._last = self._now()

    def _now(self) -> float:
        if self._waits:
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def __call__(self, part: str) -> None:
        now = self._now()
        self.seconds[part] += now - self._last
        self._last = now


def make_recipe(name: str, csr: CSR, tensors: Iterable[str], **meta: Any) -> str:
    """Return the recipe text: sizes of A, names of the tensors, and the runner's ``meta``."""
    sizes = {"rows": csr.shape[0], "cols": csr.shape[1], "nnz": csr.nnz}
    body = {**sizes, "tensors": list(tensors), **meta}
    return f"{name}:{json.dumps(body, sort_keys=True)}"


def order_tensor(order: Tensor | None, csr: CSR) -> Tensor:
    """Return a row order as kernels take it: int32, empty for the given order."""
    if order is None:
        return torch.empty(0, dtype=torch.int32, device=csr.device)
    return order.to(torch.int32)


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the memory of some tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

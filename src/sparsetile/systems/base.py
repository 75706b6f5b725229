"""What a system is: it says whether it can, builds its parts once, and runs them many times.

``System.build`` turns a request into a ``Stage``: a tuple of tensors plus a recipe, a short JSON
text that says everything else. ``runner(recipe)`` gives the object that multiplies. Tensors and
text are all that torch's operators see, so plans can be saved, traced and exported.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparsetile.formats.pairs import distinct_pairs
from sparsetile.intake.csr import CSR
from sparsetile.reorder import Permutation

__all__ = [
    "Epilogue",
    "Laps",
    "Request",
    "Runner",
    "Stage",
    "System",
    "make_recipe",
    "tensor_bytes",
]


@dataclass(frozen=True, eq=False)
class Request:
    """What the caller wants multiplied, and how."""

    csr: CSR
    n: int
    dtype: torch.dtype
    permutation: Permutation
    deterministic: bool = False
    ablation: str | None = None  # one of the system's ablations; everything is on when None
    timed: bool = False  # wait for the device before each reading of the clock
    _pairs: dict[int, int] = field(default_factory=dict, init=False, repr=False)

    @property
    def device(self) -> torch.device:
        return self.csr.device

    def pairs(self, window: int) -> int:
        """Count the distinct (window of ``window`` rows, column) pairs, each height once.

        Counting sorts all entries; choosing a system and building it ask for the same heights.
        """
        if window not in self._pairs:
            self._pairs[window] = distinct_pairs(self.csr, window, self.permutation.perm)
        return self._pairs[window]


@dataclass(frozen=True, eq=False)
class Stage:
    """What a system built: tensors, recipe, its choices in words for ``explain``, and its time."""

    system: str
    parts: tuple[Tensor, ...]
    recipe: str
    choices: Mapping[str, str] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)  # of format and schedule

    @property
    def bytes(self) -> int:
        """Memory of the parts."""
        return tensor_bytes(self.parts)


class Laps:
    """Seconds of the parts of a build: ``laps("format")`` books the time since the last call.

    The device works on after a call has returned. Where ``Request.timed`` asks for it each reading
    waits for the device, so that a part is booked with its own work and not with the next one's.
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


@dataclass(frozen=True, eq=False)
class Epilogue:
    """What happens to a sum before it is stored: alpha, mean, beta, bias, ReLU, in that order.

    ``bias`` is along C's columns. ``row_bias`` [M] (float32) is along its rows; it is given to
    runners that say ``fuses_linear`` alone.
    """

    alpha: float = 1.0
    beta: float = 0.0
    mean: bool = False
    bias: Tensor | None = None
    relu: bool = False
    row_bias: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether a sum is stored as it is."""
        return (
            self.alpha == 1.0
            and self.beta == 0.0
            and self.bias is None
            and self.row_bias is None
            and not self.mean
            and not self.relu
        )


PLAIN = Epilogue()


class Runner(ABC):
    """Multiplies with the parts of one recipe. Never synchronises.

    ``values`` are A's values in canonical order, None for a pattern. A system whose kernel reads
    them in another order or shape sets ``packs`` and makes that copy in :meth:`pack`; a plan
    keeps the copy, so that packing is paid when values change and not when they are used.
    A runner that sets ``any_strides`` is given B and ``out`` as the caller has them; others get
    row-major ones, through copies where need be. One that sets ``fuses_linear`` takes B and ``out``
    as transposes of row-major matrices without copies, and ``Epilogue.row_bias``.
    """

    packs: bool = False
    any_strides: bool = False
    fuses_linear: bool = False

    def __init__(self, meta: Mapping[str, Any]) -> None:
        self.meta = meta
        self.rows = int(meta["rows"])
        self.cols = int(meta["cols"])
        self.nnz = int(meta["nnz"])

    @abstractmethod
    def spmm(
        self,
        parts: Sequence[Tensor],
        values: Tensor | None,
        packed: Tensor | None,
        B: Tensor,
        out: Tensor,
        epilogue: Epilogue = PLAIN,
    ) -> None:
        """Write C into ``out``. B is [K, N] or [batch, K, N].

        Columns of both have unit stride unless the runner takes ``any_strides``.
        """

    def new_output(self, B: Tensor, dtype: torch.dtype) -> Tensor:
        """Return uninitialised memory for C."""
        return B.new_empty((*B.shape[:-2], self.rows, B.shape[-1]), dtype=dtype)

    def bind(
        self, parts: Sequence[Tensor], values: Tensor | None, packed: Tensor | None
    ) -> Callable[[Tensor], Tensor] | None:
        """Return a function B [K, N] -> C with the least host time, or None to use ``spmm``.

        It is called with tensors that are already checked, and only while ``parts``, ``values``
        and ``packed`` stay the same tensors.
        """
        return None

    def pack(self, parts: Sequence[Tensor], values: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return the copy of A's values that :meth:`spmm` wants as ``packed``."""
        raise NotImplementedError(f"{type(self).__name__} does not pack values")

    def prepare(self, n: int, dtype: torch.dtype, weighted: bool, device: torch.device) -> None:
        """Compile what a product of width ``n`` will need (nothing by default)."""
        return


class PatternRunner(Runner):
    """A runner that also serves max, min and the gradient of the values (``csr``, ``cpu``)."""

    @abstractmethod
    def extremum(
        self,
        parts: Sequence[Tensor],
        values: Tensor | None,
        B: Tensor,
        out: Tensor,
        args: Tensor | None,
        maximum: bool,
    ) -> None:
        """Write the max or min over each row's entries and, if asked for, which entry it was."""

    @abstractmethod
    def sddmm(self, parts: Sequence[Tensor], G: Tensor, B: Tensor) -> Tensor:
        """Return dot(G[row], B[column]) for each entry, summed over batches."""


class System(ABC):
    """One way to multiply. Subclasses are stateless; one instance is registered each."""

    name: ClassVar[str]
    summary: ClassVar[str]
    devices: ClassVar[tuple[str, ...]]
    dtypes: ClassVar[tuple[torch.dtype, ...]]
    deterministic: ClassVar[bool]
    architectures: ClassVar[str] = "any"
    ordered: ClassVar[bool] = False  # visits rows in the plan's order; else as they come
    ablations: ClassVar[tuple[str, ...]] = ()  # parts off that a benchmark may ask for, by name

    def reasons(self, request: Request) -> list[str]:
        """Return every reason why this system cannot serve the request; empty if it can."""
        found = []
        if request.device.type not in self.devices:
            found.append(f"runs on {' or '.join(self.devices)}, A is on {request.device.type}")
        if request.dtype not in self.dtypes:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
            found.append(f"takes {names}, not {str(request.dtype).removeprefix('torch.')}")
        if request.deterministic and not self.deterministic:
            found.append("is not bit-reproducible, and determinism was asked for")
        return [*found, *self.further_reasons(request)]

    def further_reasons(self, request: Request) -> list[str]:
        """Return reasons beyond device, dtype and determinism."""
        return []

    @abstractmethod
    def build(self, request: Request) -> Stage:
        """Do all the work that does not depend on B."""

    @abstractmethod
    def make_runner(self, meta: Mapping[str, Any]) -> Runner:
        """Return the runner for a recipe of this system."""


def make_recipe(name: str, csr: CSR, **meta: Any) -> str:
    """Return the recipe text of a stage."""
    body = {"rows": csr.shape[0], "cols": csr.shape[1], "nnz": csr.nnz, **meta}
    return f"{name}:{json.dumps(body, sort_keys=True)}"


def tensor_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the memory of some tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

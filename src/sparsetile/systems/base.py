"""What a system is: it says whether it can, predicts its time, builds once, and runs many times.

``System.build`` turns a request into a ``BuiltSystem``: named tensors plus a recipe, a short JSON
text that says everything else. ``runner(recipe)`` gives the object that multiplies. Tensors and
text are all that torch's operators see, so plans can be saved, traced and exported.

A product may have parts that own disjoint rows of C (``rsh``): whatever happens to a row after its
sum (alpha, mean, beta, bias, ReLU, the exact redo) belongs to the part that owns the row.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from sparsetile.core.device import Machine, machine
from sparsetile.formats.pairs import distinct_pairs
from sparsetile.intake.csr import CSR
from sparsetile.reorder import Permutation

__all__ = [
    "PLAIN",
    "Bound",
    "BuildTimer",
    "BuiltSystem",
    "Epilogue",
    "ExactRunner",
    "Prepared",
    "Request",
    "Runner",
    "System",
    "Tensors",
    "make_recipe",
    "order_tensor",
    "part",
    "prefixed",
    "tensor_bytes",
]

Tensors = Mapping[str, Tensor]
_Found = TypeVar("_Found")


def prefixed(name: str, tensors: Tensors) -> dict[str, Tensor]:
    """Return the tensors of a part under names of their own: ``exact.indptr``."""
    return {f"{name}.{key}": tensor for key, tensor in tensors.items()}


def part(name: str, tensors: Tensors) -> dict[str, Tensor]:
    """Return what :func:`prefixed` was given."""
    start = f"{name}."
    return {
        key.removeprefix(start): tensor for key, tensor in tensors.items() if key.startswith(start)
    }


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
    ceilings: Machine | None = None  # predict for this machine instead of the request's own
    counts_pairs: bool = True  # whether predictions may count pairs, or take entries as random
    _counted: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def device(self) -> torch.device:
        return self.csr.device

    @property
    def machine(self) -> Machine:
        """What is predicted for."""
        return self.ceilings or machine(self.device)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of B."""
        return self.n * self.dtype.itemsize

    def changed(self, **fields: Any) -> Request:
        """Return the same request with other fields than A and its order; counts are kept."""
        other = replace(self, **fields)
        object.__setattr__(other, "_counted", self._counted)
        return other

    def once(self, what: Any, count: Callable[[], _Found]) -> _Found:
        """Return ``count()``, called once for this A and row order under the name ``what``."""
        if what not in self._counted:
            self._counted[what] = count()
        return self._counted[what]

    def pairs(self, window: int) -> int:
        """Count the distinct (window of ``window`` rows, column) pairs, each height once.

        Counting sorts all entries; choosing a system and building it ask for the same heights.
        """
        return self.once(window, lambda: distinct_pairs(self.csr, window, self.permutation.perm))

    def counted_pairs(self, window: int) -> int:
        """The same where counting is allowed; else of entries scattered at random.

        Rows that are alike have fewer pairs than the estimate.
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
    """What a system built: tensors by name, recipe, its choices in words, and its time."""

    system: str
    tensors: dict[str, Tensor]
    recipe: str
    choices: Mapping[str, str] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)  # of format and schedule

    @property
    def bytes(self) -> int:
        """Memory of the tensors."""
        return tensor_bytes(self.tensors.values())


class BuildTimer:
    """Seconds of the parts of a build: ``timer("format")`` books the time since the last call.

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

    ``bias`` is along C's columns. ``row_bias`` [M] (float32) is along its rows; only runners with
    ``fuses_linear`` are given one.
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


class Prepared(Protocol):
    """A launch that lacks addresses: ``jit``'s, or a runner's own around it."""

    def launch(self, stream: int, *values: Any) -> None:
        """Multiply B, at the first address, into C, at the second.

        Launches that were prepared with an epilogue also take the bias's address and alpha.
        """


class Bound(Protocol):
    """A product whose A does not change, of matrices B [K, N] whose columns have unit stride."""

    def __call__(self, B: Tensor) -> Tensor:
        """Return A·B."""

    def fused(self, B: Tensor, bias: Tensor | None, alpha: float, mean: bool, relu: bool) -> Tensor:
        """Return relu(alpha · A·B + bias), or of the mean of each row's entries."""


class Runner(ABC):
    """Multiplies with the tensors of one recipe. Never synchronises.

    ``values`` are A's values in canonical order, None for a pattern. A system whose kernels read
    them in another order or shape names those copies in ``packed_names`` and makes them in
    :meth:`pack`; a plan keeps the copies, so that packing is paid when values change and not when
    they are used. A runner that sets ``any_strides`` is given B and ``out`` as the caller has
    them; others get row-major ones, through copies where need be. One that sets ``fuses_linear``
    takes B and ``out`` as transposes of row-major matrices without copies, and
    ``Epilogue.row_bias``.
    """

    packed_names: tuple[str, ...] = ()
    pack_only: tuple[str, ...] = ()  # tensors that :meth:`pack` alone reads
    reads_values: bool = True  # whether :meth:`spmm` reads ``values`` where it has ``packed``
    any_strides: bool = False
    fuses_linear: bool = False

    def __init__(self, meta: Mapping[str, Any]) -> None:
        self.meta = meta
        self.rows = int(meta["rows"])
        self.cols = int(meta["cols"])
        self.nnz = int(meta["nnz"])
        self.tensor_names = tuple(meta["tensors"])

    @property
    def needs_packed_values(self) -> bool:
        """Whether :meth:`pack` must be called when values change."""
        return bool(self.packed_names)

    @abstractmethod
    def spmm(
        self,
        tensors: Tensors,
        values: Tensor | None,
        packed: Tensors | None,
        B: Tensor,
        out: Tensor,
        epilogue: Epilogue = PLAIN,
    ) -> None:
        """Write C into ``out``. B is [K, N] or [batch, K, N].

        Columns of both have unit stride unless the runner takes ``any_strides``. ``packed`` is
        what :meth:`pack` returned for ``values``, or None where nobody has packed them.
        """

    def new_output(self, B: Tensor, dtype: torch.dtype) -> Tensor:
        """Return uninitialised memory for C."""
        return B.new_empty((*B.shape[:-2], self.rows, B.shape[-1]), dtype=dtype)

    def bind(self, tensors: Tensors, values: Tensor | None, packed: Tensors | None) -> Bound | None:
        """Return the product with the least host time, or None to use ``spmm``.

        It is called with tensors that are already checked, and only while ``tensors``, ``values``
        and ``packed`` stay the same.
        """
        return None

    def pack(self, tensors: Tensors, values: Tensor | None, dtype: torch.dtype) -> Tensors:
        """Return the copies of A's values that :meth:`spmm` wants as ``packed``, by name."""
        return {}

    def prepare(self, n: int, dtype: torch.dtype, weighted: bool, device: torch.device) -> None:
        """Compile what a product of width ``n`` will need (nothing by default)."""
        return


class ExactRunner(Runner):
    """A runner that computes from A's entries alone (``csr``, ``cpu``).

    It also serves max, min and the gradient of the values, and repairs products of systems that
    multiply zeros which A does not have.
    """

    @abstractmethod
    def extremum(
        self,
        tensors: Tensors,
        values: Tensor | None,
        B: Tensor,
        out: Tensor,
        args: Tensor | None,
        maximum: bool,
    ) -> None:
        """Write the max or min over each row's entries and, if asked for, which entry it was."""

    @abstractmethod
    def sddmm(self, tensors: Tensors, G: Tensor, B: Tensor) -> Tensor:
        """Return dot(G[row], B[column]) for each entry, summed over batches.

        In the type of the sums: float32, or float64 of such operands.
        """

    @abstractmethod
    def repair(
        self,
        tensors: Tensors,
        values: Tensor | None,
        B: Tensor,
        out: Tensor,
        epilogue: Epilogue = PLAIN,
        only_if: Tensor | None = None,
    ) -> None:
        """Recompute, from A's entries alone, the elements of ``out`` that are not finite.

        A zero that a tile or a dense A invents is NaN times an Inf or NaN of B, and stays NaN
        through an epilogue, which is then part of what is computed again. ``beta`` must be 0: what
        ``out`` held is gone. Where ``only_if`` [1] (int64) is 0, ``out`` is not even read.
        """

    def prepare_repair(
        self, n: int, dtype: torch.dtype, weighted: bool, device: torch.device
    ) -> None:
        """Compile what :meth:`repair` of a product of width ``n`` will need."""
        return

    def prepare_repairs(
        self, tensors: Tensors, values: Tensor | None, B: Tensor, out_dtype: torch.dtype
    ) -> Sequence[Prepared] | None:
        """Return launches that repair products of matrices like B; None where there are none."""
        return None


class System(ABC):
    """One way to multiply. Subclasses are stateless; one instance is registered each.

    Attributes
    ----------
    name, summary : str
    devices, dtypes : tuple
        Where it runs and what it takes.
    deterministic : bool
        Whether the same product has the same bits each time.
    architectures : str
        GPUs, in words for the capability table.
    ordered : bool
        Whether it visits rows in the plan's order.
    exact_on : tuple of str
        Device types whose exact system it is: its runners are :class:`ExactRunner`.
    rounds_to_tf32 : bool
        Whether it takes float32 only where torch allows TF32.
    follows_tf32 : bool
        Whether it rounds float32 to TF32 where torch allows it, and else does not.
    casts_to_exact : bool
        Whether autocast's products in types that it does not take are the exact system's; else
        such a product keeps the plan's type.
    counts_pairs : bool
        Whether :meth:`predict` needs exact counts of distinct (window, column) pairs. They cost a
        sort of all entries, which is skipped where no candidate needs it.
    kernels : tuple of str
        Device kernels of ours that its products launch: what checkers watch.
    ablations : tuple of str
        Parts off, by name, that a benchmark may ask for.
    contract_ablations : tuple of str or None
        What the contract suites and checkers run it as: parts that small matrices would not lead
        it to are asked for by name.
    varying : tuple of str
        Ablations of a deterministic system whose products' bits vary.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    devices: ClassVar[tuple[str, ...]]
    dtypes: ClassVar[tuple[torch.dtype, ...]]
    deterministic: ClassVar[bool]
    architectures: ClassVar[str] = "any"
    ordered: ClassVar[bool] = False
    exact_on: ClassVar[tuple[str, ...]] = ()
    rounds_to_tf32: ClassVar[bool] = False
    follows_tf32: ClassVar[bool] = False
    casts_to_exact: ClassVar[bool] = False
    counts_pairs: ClassVar[bool] = False
    kernels: ClassVar[tuple[str, ...]] = ()
    ablations: ClassVar[tuple[str, ...]] = ()
    contract_ablations: ClassVar[tuple[str | None, ...]] = (None,)
    varying: ClassVar[tuple[str, ...]] = ()

    def repeats(self, ablation: str | None) -> bool:
        """Whether the same product has the same bits each time with this ablation."""
        return self.deterministic and ablation not in self.varying

    def reasons(self, request: Request) -> list[str]:
        """Return every reason why this system cannot serve the request; empty if it can."""
        found = []
        if request.device.type not in self.devices:
            found.append(f"runs on {' or '.join(self.devices)}, A is on {request.device.type}")
        if request.dtype not in self.dtypes:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
            found.append(f"takes {names}, not {str(request.dtype).removeprefix('torch.')}")
        if request.deterministic and not self.repeats(request.ablation):
            found.append("is not bit-reproducible, and determinism was asked for")
        return [*found, *self.further_reasons(request)]

    def further_reasons(self, request: Request) -> list[str]:
        """Return reasons beyond device, dtype and determinism."""
        return []

    @abstractmethod
    def predict(self, request: Request) -> float:
        """Return the seconds that one product is expected to take on ``request.machine``."""

    @abstractmethod
    def build(self, request: Request) -> BuiltSystem:
        """Do all the work that does not depend on B."""

    @abstractmethod
    def make_runner(self, meta: Mapping[str, Any]) -> Runner:
        """Return the runner for a recipe of this system."""

    def built(
        self,
        request: Request,
        tensors: Mapping[str, Tensor],
        choices: Mapping[str, str],
        seconds: Mapping[str, float],
        **meta: Any,
    ) -> BuiltSystem:
        """Return the result of :meth:`build`; ``meta`` is what the runner needs to know."""
        named = dict(tensors)
        if request.ablation is not None:
            choices = {**choices, "ablation": request.ablation}
        recipe = make_recipe(self.name, request.csr, named, **meta)
        return BuiltSystem(self.name, named, recipe, choices, seconds)


def make_recipe(name: str, csr: CSR, tensors: Iterable[str], **meta: Any) -> str:
    """Return the recipe text: sizes of A, names of the tensors, and what the runner needs."""
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

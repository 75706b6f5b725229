"""A matrix as one system multiplies it: in one direction, one type, planned for one width.

A variant holds what its products read: the build, the runner, A's values in its type and packed,
the bound product. It knows no plan. The family (``family.py``) makes variants and is the only
writer of their values. Values are written in place: CUDA graphs and bound products have their
addresses.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparsetile.core.streams import record_stream
from sparsetile.engines.request import BuiltSystem, Request, tensor_bytes
from sparsetile.engines.runner import ExactRunner
from sparsetile.intake import CSR
from sparsetile.jit.loader import current_stream_handle
from sparsetile.launch.bound import BoundExtremum, BoundLinear
from sparsetile.launch.interface import Bound, Tensors
from sparsetile.plan.traced.flat import Direction, flatten, without_exact
from sparsetile.reorder import Permutation
from sparsetile.systems import runner
from sparsetile.systems.registry import exact_part, exact_system

__all__ = ["Later", "Variant"]

# Streams that the allocator already knows of.
_NOTED = 64


class Later:
    """That all systems are to be compared, or a schedule built, once a plan has computed some more
    products.

    The variants of one width share it, so that all of them know if it is off.
    """

    __slots__ = ("left", "products", "reorders", "schedules")

    def __init__(self, products: int, reorders: bool, schedules: bool = False) -> None:
        self.products = self.left = products  # in all, and still to come
        self.reorders = reorders  # whether a row order may be chosen, too
        self.schedules = schedules  # whether nothing is compared: a schedule is built


class Variant:
    """One built system and the values that its products read."""

    def __init__(
        self, csr: CSR, n: int, dtype: torch.dtype, built: BuiltSystem, permutation: Permutation, *,
        deterministic: bool, report: Mapping[str, Any], transposed: bool = False,
        direction: Direction | None = None,
    ) -> None:  # fmt: skip
        self._begin(csr, n, dtype, permutation, deterministic, report, transposed)
        self.built, self.system = built, built.system
        self.runner = runner(built.recipe)
        self.direction = direction or self._with_exact()
        # What torch's operators take: of products, and with the transpose once gradients need it.
        self.flat = flatten(self.direction, None, None, None)
        self.packed: Tensors | None = None  # what the runner made of the values, if it packs
        self.bound_linear: BoundLinear | None = None
        self.take(*self.prepare(None if csr.values is None else csr.values.detach()))

    def _begin(
        self, csr: CSR, n: int, dtype: torch.dtype, permutation: Permutation, deterministic: bool,
        report: Mapping[str, Any], transposed: bool,
    ) -> None:  # fmt: skip
        """Set what does not depend on a system."""
        self.csr = csr.with_values(None)  # of A, or of its transpose
        self.shape, self.device, self.nnz = csr.shape, csr.device, csr.nnz
        self.n, self.dtype, self.transposed = n, dtype, transposed
        self.permutation, self.deterministic = permutation, deterministic
        self.report = dict(report)
        self.both: tuple[list[Tensor], str] | None = None
        self.row_scale: Tensor | None = None  # 1 / entries of each row, for gradients of means
        self.values: Tensor | None = None  # one per entry, in ``dtype``; None for a pattern
        # The product with the least host time, if the runner has one.
        self.bound: Bound | None = None
        self._extremum: BoundExtremum | None = None
        self._has_entries = True  # what maxima read; not for inference
        self.weighted = False
        self.later: Later | None = None  # None if its system is settled
        self._streams: set[tuple[int, ...]] = set()

    def schedule(self) -> None:
        """Build what products from arrays do without (plan/direct.py)."""

    def _with_exact(self) -> Direction:
        """Add the exact system's build, which serves max, min and the values' gradient."""
        exact = exact_system(self.device.type)
        if exact.name == self.system:
            return Direction(self.csr.indptr, self.built, self.built)
        found = exact_part(self.built)
        if found is None:
            request = Request(self.csr, self.n, self.dtype, self.permutation, self.deterministic)
            found = exact.build(request)
        return Direction(self.csr.indptr, self.built, found)

    # -- values ---------------------------------------------------------------------------------

    def prepare(self, values: Tensor | None) -> tuple[Tensor | None, Tensors | None]:
        """Return values, one per entry, as :meth:`take` wants them: all that needs memory is done
        here, and nothing has changed if there was none."""
        if values is not None:
            values = values.to(self.dtype).resolve_neg()
        packs = self.runner.needs_packed_values
        packed = self.runner.pack(self.built.tensors, values, self.dtype) if packs else None
        return values, packed

    def take(self, values: Tensor | None, packed: Tensors | None) -> None:
        """Take over what :meth:`prepare` returned, in place if there are values already."""
        binds = self.values is None or values is None
        if self.values is not None and values is not None:
            self.values.copy_(values)
        else:
            self.values = values
        if packed is None or self.packed is None or not _same_shapes(self.packed, packed):
            self.packed = packed
        else:
            for name, tensor in packed.items():
                self.packed[name].copy_(tensor)
        self.weighted = self.values is not None
        self._streams = set()
        if binds:
            self.bound = self.runner.bind(self.built.tensors, self.values, self.packed)
            self.bound_linear = self.runner.bind_linear(self.built.tensors, self.packed)
            self._extremum = None

    def extremum(self, B: Tensor, reduce: str, winners: bool) -> tuple[Tensor, Tensor] | None:
        """Return the max or min of a matrix's products, bound; None if operators have to."""
        bound = self._extremum
        if bound is None:
            exact = self.direction.exact
            found = runner(exact.recipe)
            readable = self.values is None or self.values.is_contiguous()
            if readable and self._has_entries and isinstance(found, ExactRunner):
                bound = self._extremum = found.bind_extremum(exact.tensors, self.values)
        return None if bound is None else bound(B, reduce, winners)

    def for_inference(self) -> Variant:
        """Return a variant that holds what products of sums and means read, and nothing else.

        This one is not to be used any more.
        """
        made = Variant.__new__(Variant)
        made.__dict__.update(self.__dict__)
        dropped = self.runner.pack_only if self.packed is not None else ()
        built = _without(self.built, dropped) if dropped else self.built
        made.built, made.runner = built, runner(built.recipe)
        if self.packed is not None and not made.runner.reads_values:
            made.values = None
        made.bound = made.runner.bind(built.tensors, made.values, made.packed)
        made.bound_linear = made.runner.bind_linear(built.tensors, made.packed)
        none = self.csr.indptr.new_empty(0, dtype=torch.int32)
        made.csr = CSR(self.csr.indptr, none, None, self.shape)
        made._extremum, made._has_entries = None, False
        made.direction = Direction(self.csr.indptr, built, built)
        made.flat, made.both = without_exact(self.csr.indptr, built), None
        return made

    # -- memory ---------------------------------------------------------------------------------

    def note_stream(self, order: Tensor | None = None) -> None:
        """Before a product through torch's operators: keep the tensors' memory from other work
        until the current stream has read it. Bound products do this themselves.

        ``order`` is that of the transpose's entries, if the product reads it.
        """
        if self.device.type != "cuda" or torch.compiler.is_compiling():
            return
        # What is built is never replaced: counts tell what is there.
        note = (
            current_stream_handle(self.device.index), self.both is None, self.row_scale is None,
            order is None, self.csr.has_duplicates_kept,
        )  # fmt: skip
        if note not in self._streams:
            if len(self._streams) >= _NOTED:
                self._streams.clear()
            record_stream([*self.read_tensors(), order], self.device)
            self._streams.add(note)

    def read_tensors(self) -> list[Tensor | None]:
        """What products of any kind read, as far as it is built."""
        tensors, _ = self.both or self.flat
        packed = () if self.packed is None else self.packed.values()
        return [*tensors, self.values, *packed, *self.csr.order_tensors(), self.row_scale]

    def exact_tensors(self) -> Tensors:
        """The exact system's build."""
        return self.direction.exact.tensors

    @property
    def format_bytes(self) -> int:
        """Bytes of the build."""
        return self.built.bytes

    @property
    def choices(self) -> Mapping[str, str]:
        """The build's choices in words."""
        return self.built.choices

    def parts(self) -> dict[str, Tensors]:
        """What products read, by part."""
        return {
            "format": self.built.tensors,
            "packed values": self.packed or {},
            "values": {} if self.values is None else {"values": self.values},
        }


def _same_shapes(old: Tensors, new: Tensors) -> bool:
    return all(old[name].shape == tensor.shape for name, tensor in new.items())


def _without(built: BuiltSystem, names: tuple[str, ...]) -> BuiltSystem:
    """The same build without some of its tensors."""
    tensors = {name: tensor for name, tensor in built.tensors.items() if name not in names}
    name, _, body = built.recipe.partition(":")
    meta = json.loads(body) | {"tensors": list(tensors)}
    recipe = f"{name}:{json.dumps(meta, sort_keys=True)}"
    assert tensor_bytes(tensors.values()) <= built.bytes
    return replace(built, tensors=tensors, recipe=recipe)

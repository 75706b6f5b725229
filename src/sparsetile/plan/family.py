"""All variants of one matrix: its transpose, other types and widths, and the values they share.

A family is the only cache of its variants and the only writer of their values. Two plans, of A and
of its transpose, are the two directions of one family. One lock guards building. What is built is
safe on any stream: building ends with a wait of the host (``core.streams``) and is refused while a
CUDA graph is captured; what is built is kept and never replaced, until the family moves.

A matrix whose pattern is symmetric, as an undirected graph's, shares tiles and schedules with its
transpose. If its values are symmetric too, gradients multiply by the matrix itself.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from sparsetile.core.errors import value_error
from sparsetile.core.settings import entry_limit
from sparsetile.core.streams import capturing, refuse_capture, settle
from sparsetile.engines.request import BuiltSystem, Request
from sparsetile.intake import CSR
from sparsetile.intake.csr import FP8
from sparsetile.launch.interface import Tensors
from sparsetile.plan.build import build_compared, build_variant
from sparsetile.plan.modes import outside_modes
from sparsetile.plan.traced.flat import Direction, flatten
from sparsetile.plan.traced.gradients import row_scale
from sparsetile.plan.variant import Variant
from sparsetile.reorder import Permutation, order_of_transpose
from sparsetile.reorder.permutation import positions
from sparsetile.systems import SYSTEMS, candidates
from sparsetile.systems.registry import exact_system, unsupported

__all__ = [
    "FIRST_WIDTH", "MAX_WIDTHS", "Family", "Flat", "Widths", "canonical", "expects_many",
    "follow_on", "many_products",
]  # fmt: skip

# The width that is planned for before any is known.
FIRST_WIDTH = 128
# Widths kept beside the first: as many layers of a network differ in width.
MAX_WIDTHS = 8
# What autocast casts.
_CAST_TYPES = (torch.float32, torch.float16, torch.bfloat16)
_BEFORE_CAPTURE = "Compute a gradient, or read plan.T, once before the capture"

Follow: TypeAlias = Callable[[], Tensor | None]
Flat: TypeAlias = tuple[list[Tensor], str]
_Key: TypeAlias = tuple[bool, torch.dtype, int]
_Prepared: TypeAlias = tuple[Variant, Tensor | None, Tensors | None]


@dataclass(frozen=True)
class Widths:
    """How a plan that was made without ``n`` plans for the widths that it meets."""

    system: str
    tune: str
    expected_runs: int | None = None


def canonical(values: Tensor, csr: CSR) -> Tensor:
    """Return the caller's values in the order of the pattern's entries, on the pattern's device."""
    return csr.canonical_values(values.to(csr.device))


def _picked(values: Tensor, order: Tensor) -> Tensor:
    """Return values in another order, on the order's device."""
    return values.to(order.device)[order]


_expected = threading.local()


@contextlib.contextmanager
def many_products() -> Iterator[None]:
    """Expect many products of the plans that this thread uses inside: those that would compare all
    systems later do so now, before a CUDA graph fixes what is planned."""
    before = expects_many()
    _expected.many = True
    try:
        yield
    finally:
        _expected.many = before


def expects_many() -> bool:
    """Whether this thread is inside :func:`many_products`."""
    return getattr(_expected, "many", False)


class Family:
    """One matrix and everything that was built of it."""

    complete = True  # whether A's entries are there, of which all can be built

    def __init__(
        self, forward: Variant, column_order: Tensor | None = None, widths: Widths | None = None
    ) -> None:
        self.lock = threading.RLock()
        self.column_order = column_order  # the row of B that belongs at each position
        self.widths = widths  # None if one width serves all products
        self.follow: Follow | None = None  # of trained values: read in every product, not copied
        self.version = 0  # of the values: a gradient must meet those that its product had
        self._set(forward)
        settle(forward.device)

    def _set(self, forward: Variant) -> None:
        self.forward = forward  # A in the type and for the width that were planned
        self.order: Tensor | None = None  # the entry of A that is each entry of the transpose
        self._variants: dict[_Key, Variant] = {_key(forward): forward}
        self._recent: OrderedDict[int, None] = OrderedDict()  # widths beside the first
        self._captured: list[Variant] = []  # CUDA graphs read their memory at every replay
        self._as_planned = True  # values are those of the matrix that was planned
        self.symmetric = False  # A is known to equal its transpose
        self.symmetric_captured = False  # a CUDA graph takes that for granted

    @property
    def shape(self) -> tuple[int, int]:
        return self.forward.shape

    # -- variants -------------------------------------------------------------------------------

    def main(self, transposed: bool) -> Variant:
        """Return the variant of a direction in the type and for the width that were planned."""
        return self._get(True, self.forward.dtype, self.forward.n) if transposed else self.forward

    def known(self, transposed: bool, dtype: torch.dtype, n: int) -> Variant | None:
        """Return a variant if it is built."""
        return self._variants.get((transposed, dtype, n))

    def variants(self) -> list[Variant]:
        """Every variant that holds A's values."""
        with self.lock:
            kept = list(self._variants.values())
            return [*kept, *(each for each in self._captured if each not in kept)]

    def _get(self, transposed: bool, dtype: torch.dtype, n: int) -> Variant:
        found = self._variants.get((transposed, dtype, n))
        return self._build(transposed, dtype, n) if found is None else found

    @outside_modes
    def _build(self, transposed: bool, dtype: torch.dtype, n: int) -> Variant:
        key = (transposed, dtype, n)
        with self.lock:
            found = self._variants.get(key)
            if found is None:
                what, remedy = ("plan.T", _BEFORE_CAPTURE) if transposed else ("run", _WARM)
                refuse_capture(what, self.forward.device, remedy)
                if dtype is not self.forward.dtype:
                    found = self._cast(self._get(transposed, self.forward.dtype, n), dtype)
                elif transposed:
                    found = self._transpose(self._get(False, dtype, n))
                else:
                    found = self._planned_for(n)
                settle(found.device)
                if found.later is None:
                    first = self.known(False, self.forward.dtype, n)
                    found.later = None if first is None else first.later
                self._variants[key] = found
            return found

    def counted(self, variant: Variant) -> Variant:
        """Count a product of a variant whose system is not settled, and return the variant to use:
        another one if comparing all systems has become worth its time.

        What a CUDA graph reads at every replay stays as it is.
        """
        later = variant.later
        if torch.compiler.is_compiling() or later is None:
            return variant
        if capturing(variant.device):
            self.settled(variant)
            return variant
        later.left -= 1
        if later.left > 0 and not expects_many():
            return variant
        if later.schedules:
            self._schedule(variant)
            return variant
        self._compare(variant.n)
        return self._get(variant.transposed, variant.dtype, variant.n)

    def settled(self, variant: Variant) -> None:
        """Keep the systems of a width as they are from now on."""
        with self.lock:
            later = variant.later
            for each in self._variants.values():
                if each.later is later:
                    each.later = None

    @outside_modes
    def compared(self) -> bool:
        """Compare all systems now: who compiles expects many products, as that takes longer."""
        if not capturing(self.forward.device):
            for n in {n for _, _, n in self._variants}:
                self._compare(n)
            for each in self.variants():
                each.schedule()  # a tracer could not build it
        return True

    # What torch.compiler.assume_constant_result does, without the 1.5 s import of torch._dynamo.
    compared._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _schedule(self, variant: Variant) -> None:
        """Build the schedule of a width whose products are computed from A's arrays."""
        with self.lock:
            mine = [each for each in self.variants() if each.later is variant.later]
            self.settled(variant)
            with contextlib.suppress(torch.OutOfMemoryError):  # what there is works on
                for each in mine:
                    each.schedule()

    def _compare(self, n: int) -> None:
        """Compare all systems for a width, and use the best one from now on."""
        with self.lock:
            old = self._variants.get((False, self.forward.dtype, n))
            later = None if old is None else old.later
            if old is None or later is None or later.schedules:  # another thread did, or none is to
                return
            self.settled(old)  # whatever happens now: it is not tried again
            try:
                made = build_compared(old, later)
            except torch.OutOfMemoryError:
                return  # what there is works on
            settle(made.device)
            old.report = made.report
            if made.system == old.system and made.permutation is old.permutation:
                return
            # The variants made of the old one follow; those that autograd keeps live on there.
            kept = {key: each for key, each in self._variants.items() if key[2] != old.n}
            self._variants = kept | {_key(made): made}
            if old is self.forward:
                self.forward = made

    def prepare(self, transposed: bool, dtype: torch.dtype, n: int, gradients: bool) -> bool:
        """Build what a tracer is about to read: it takes what it has read to be constant, and
        cannot trace what builds."""
        variant = self._get(transposed, dtype, n)
        if gradients:
            self.differentiable(variant)
        return True

    # What torch.compiler.assume_constant_result does, without the 1.5 s import of torch._dynamo.
    prepare._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def opposite(self, variant: Variant) -> Variant:
        """Return the same of the other direction."""
        return self._get(not variant.transposed, variant.dtype, variant.n)

    # -- widths ---------------------------------------------------------------------------------

    def for_width(self, variant: Variant, B: object) -> Variant:
        """Return the variant for products of B's width; ``variant`` if none can be made now."""
        if self.widths is None or torch.compiler.is_dynamo_compiling():
            return variant
        if not isinstance(B, Tensor) or B.dim() < 2:
            return variant
        n = B.shape[-1]
        if type(n) is not int or n == variant.n or n == 0:
            return variant
        with self.lock:
            under_capture = capturing(variant.device)
            found = self.known(variant.transposed, variant.dtype, n)
            if found is None:
                if under_capture:  # a graph cannot hold the work of planning
                    return variant
                found = self._get(variant.transposed, variant.dtype, n)
            elif under_capture and found not in self._captured:
                self._captured.append(found)
            self._recent[n] = None
            self._recent.move_to_end(n)
            while len(self._recent) > MAX_WIDTHS:
                old, _ = self._recent.popitem(last=False)
                self._variants = {
                    key: each for key, each in self._variants.items() if key[2] != old
                }
            return found

    def _planned_for(self, n: int) -> Variant:
        first, widths = self.forward, self.widths
        request = Request(
            first.csr.with_values(first.values), n, first.dtype, first.permutation,
            first.deterministic,
        )  # fmt: skip
        assert widths is not None
        return build_variant(
            "run", request, widths.system, tune=widths.tune, runs=widths.expected_runs
        )

    # -- the transpose --------------------------------------------------------------------------

    def entry_order(self) -> Tensor:
        """Return the entry of A that is each entry of the transpose, built once."""
        if self.order is None:
            with self.lock:
                if self.order is None:
                    made = _narrow(self.forward.csr.transpose_order())
                    settle(made.device)
                    self.order = made
        return self.order

    def _transpose(self, forward: Variant) -> Variant:
        started = time.perf_counter()
        csr = forward.csr
        flipped = csr.transposed(self.entry_order())
        direction, rejected = None, dict[str, list[str]]()
        if (
            csr.shape[0] == csr.shape[1]
            and torch.equal(flipped.indptr, csr.indptr)
            and torch.equal(flipped.indices, csr.indices)
        ):
            # The same pattern has the same tiles and schedules.
            flipped = CSR(csr.indptr, csr.indices, None, csr.shape)
            built, permutation = forward.built, forward.permutation
            direction = forward.direction
        else:
            built, permutation, rejected = _built_transpose(forward, flipped)
        values = None if forward.values is None else forward.values[self.entry_order()]
        return Variant(
            flipped.with_values(values), forward.n, forward.dtype, built, permutation,
            deterministic=forward.deterministic, transposed=True, direction=direction,
            report={
                "seconds": {"build": time.perf_counter() - started},
                "build": dict(built.seconds),
                "rejected": rejected,
            },
        )  # fmt: skip

    def for_gradients(self, variant: Variant) -> Variant:
        """Return the variant that gradients multiply by: the opposite one or, if A is its own
        transpose, the variant itself, until A's values change."""
        if not self.symmetric:
            found = self._variants.get((not variant.transposed, variant.dtype, variant.n))
            return self._first_gradient(variant) if found is None else found
        if not self.symmetric_captured:
            self.symmetric_captured = capturing(variant.device)
        return variant

    @outside_modes
    def _first_gradient(self, variant: Variant) -> Variant:
        with self.lock:
            alone = not any(transposed for transposed, _, _ in self._variants)
            if alone and self._as_planned:
                refuse_capture("run", variant.device, _BEFORE_CAPTURE)
                self.symmetric = self._is_symmetric()
            return variant if self.symmetric else self.opposite(variant)

    def _is_symmetric(self) -> bool:
        """Whether A equals its transpose. The order of entries is kept if it does not."""
        csr = self.forward.csr
        if csr.shape[0] != csr.shape[1]:
            return False
        if not torch.equal(csr.column_lengths(), csr.row_lengths()):
            return False  # directed graphs end here, before anything is sorted
        order = _narrow(csr.transpose_order())
        if _equals_transpose(csr, self.forward.values, order):
            return True
        settle(order.device)
        self.order = order
        return False

    @outside_modes
    def differentiable(self, variant: Variant) -> Flat:
        """Return the flat form with the transpose, built once."""
        if variant.both is None:
            refuse_capture("run", variant.device, "Compute a gradient once before the capture")
            with self.lock:
                if variant.both is None:
                    other = self.opposite(variant)
                    order = self.entry_order().long()
                    # Of so many entries it is made when it is read (``flat.entry_order``): 8 bytes
                    # for each, which gradients of the first order never read.
                    inverse = order[:0] if order.numel() >= entry_limit() else positions(order)
                    if variant.transposed:
                        order, inverse = inverse, order
                    made = flatten(variant.direction, other.direction, order, inverse)
                    settle(variant.device)
                    variant.both = made
        assert variant.both is not None
        return variant.both

    @outside_modes
    def row_scale(self, variant: Variant) -> Tensor:
        """Return 1 / entries of each row; kept, except of a CUDA graph, whose memory is filled by
        replays alone."""
        if variant.row_scale is not None:
            return variant.row_scale
        with self.lock, torch.no_grad():
            if variant.row_scale is None:
                made = row_scale(variant.csr.indptr, variant.dtype)
                if capturing(variant.device):
                    return made
                settle(variant.device)
                variant.row_scale = made
        return variant.row_scale

    # -- autocast -------------------------------------------------------------------------------

    def for_type(self, variant: Variant, dtype: torch.dtype) -> Variant | None:
        """Return the variant that multiplies operands of this type; under autocast that is one in
        autocast's type. None if the operand is of a wrong type."""
        place = variant.device.type
        if not torch.is_autocast_enabled(place) or dtype not in _CAST_TYPES:
            return variant if dtype is variant.dtype else None
        lower = torch.get_autocast_dtype(place)
        if variant.dtype is lower or variant.dtype is FP8:
            return variant if variant.dtype is lower else None
        return self.in_type(variant, lower)

    def in_type(self, variant: Variant, dtype: torch.dtype) -> Variant:
        """Return the variant in autocast's type; itself if its system cannot follow.

        A system that does not take the type keeps the plan's, or has the exact system, whose build
        is there, multiply (``System.casts_to_exact``).
        """
        found = self._variants.get((variant.transposed, dtype, variant.n))
        if found is not None:
            return found
        system = SYSTEMS[variant.system]
        if dtype not in system.dtypes:
            exact = exact_system(variant.device.type)
            if not system.casts_to_exact or dtype not in exact.dtypes:
                return variant
        if not self.complete and variant.runner.needs_packed_values:
            raise value_error(
                "run", "B", f"{variant.dtype} with a plan of keep='inference'", dtype,
                "Plan in that type, or with keep='all'",
            )  # fmt: skip
        if torch.compiler.is_compiling():
            self.prepare(variant.transposed, dtype, variant.n, False)
        return self._get(variant.transposed, dtype, variant.n)

    def _cast(self, variant: Variant, dtype: torch.dtype) -> Variant:
        """The same in another type: it shares everything but the values."""
        built, direction = variant.built, variant.direction
        if dtype not in SYSTEMS[variant.system].dtypes:
            built = direction.exact
            direction = Direction(variant.csr.indptr, built, built)
        return Variant(
            variant.csr.with_values(variant.values), variant.n, dtype, built, variant.permutation,
            deterministic=variant.deterministic, report=variant.report,
            transposed=variant.transposed, direction=direction,
        )  # fmt: skip

    # -- values ---------------------------------------------------------------------------------

    def values_now(self, variant: Variant) -> Tensor | None:
        """Return the values that a product would read."""
        return variant.values if self.follow is None else self.followed(variant)

    def followed(self, variant: Variant) -> Tensor | None:
        """Return values that are trained, in the order of the variant's entries."""
        assert self.follow is not None
        values = self.follow()
        if values is None or not variant.transposed:
            return values
        order = self.entry_order()
        variant.note_stream(order)
        return values[order]

    @outside_modes
    def take(self, values: Tensor, transposed: bool = False) -> None:
        """Copy or, if they are trained, follow the caller's values of a direction."""
        if transposed:
            back = positions(self.entry_order())
            follow: Follow = functools.partial(_picked, values, back)
        else:
            follow = functools.partial(canonical, values, self.forward.csr)
        with torch.no_grad():
            made = follow()
            assert made is not None
            copied = made.detach().resolve_neg().to(self.forward.dtype)
        self.forward.note_stream(self.order)
        own = copied.data_ptr() == values.data_ptr() or copied.is_inference()
        if self.forward.values is None and own:
            copied = copied.clone()  # the plan must not change when the caller's tensor does
        symmetric = self._still_symmetric(copied)
        prepared = self._prepare(copied)
        self.follow = follow if values.requires_grad else None
        self._accept(prepared)
        self._as_planned = False
        self.symmetric = self.symmetric and symmetric

    def set_values(self, values: Tensor | None) -> None:
        """Take over values, one per entry, and what is made of them."""
        self._accept(self._prepare(values))

    def _still_symmetric(self, values: Tensor) -> bool:
        """Whether A still equals its transpose; looked at only if a captured graph needs it."""
        if not self.symmetric_captured:
            return False
        csr = self.forward.csr
        if _equals_transpose(csr, values, csr.transpose_order()):
            return True
        raise value_error(
            "update_values", "values", "symmetric, as those that a CUDA graph was captured with",
            "values that are not",
            "Read plan.T before the capture: gradients then use their own matrix",
        )  # fmt: skip

    def _prepare(self, values: Tensor | None) -> list[_Prepared]:
        """Make what all variants hold of values, one per entry of A.

        Memory may run out here; all of them still have the values from before then.
        """
        turned, found = None, []
        for variant in self.variants():
            if values is not None and variant.transposed and turned is None:
                turned = values[self.entry_order()]
            found.append((variant, *variant.prepare(turned if variant.transposed else values)))
        return found

    def _accept(self, prepared: list[_Prepared]) -> None:
        self.version += 1
        for variant, values, packed in prepared:
            variant.take(values, packed)

    # -- placement ------------------------------------------------------------------------------

    @outside_modes
    def move(self, device: torch.device, dtype: torch.dtype) -> None:
        """Bring the matrix to another device or type. The row order is kept; between the CPU and a
        GPU, and to another type, tiles and schedule are built again."""
        first = self.forward
        if (first.device, first.dtype) == (device, dtype):
            return
        with self.lock:
            turned = any(transposed for transposed, _, _ in self._variants)
            csr = first.csr.with_values(_on(first.values, device)).to(device)
            order = Permutation(first.permutation.name, _on(first.permutation.perm, device))
            request = Request(csr, first.n, dtype, order, first.deterministic)
            same_kind = first.device.type == device.type and first.dtype is dtype
            if same_kind and not SYSTEMS[first.system].reasons(request):
                old = first.built
                tensors = {name: tensor.to(device) for name, tensor in old.tensors.items()}
                made = Variant(
                    csr, first.n, dtype, BuiltSystem(old.system, tensors, old.recipe, old.choices),
                    order, deterministic=first.deterministic, report=first.report,
                )  # fmt: skip
            else:
                made = build_variant("to", request, first.system)
            self.column_order = _on(self.column_order, device)
            self.follow = follow_on(self.follow, device)
            self.version += 1
            self._set(made)
            if turned:
                self.main(transposed=True)
            settle(device)


_WARM = "Call it once before the capture"


def _key(variant: Variant) -> _Key:
    return variant.transposed, variant.dtype, variant.n


def _narrow(order: Tensor) -> Tensor:
    """Numbers of entries in 32 bits if that is enough: a family keeps them."""
    return order.to(torch.int32) if order.numel() < 2**31 else order


def _equals_transpose(csr: CSR, values: Tensor | None, order: Tensor) -> bool:
    """Whether A equals its transpose; ``order`` is that of :meth:`CSR.transpose_order`."""
    same = torch.equal(csr.transposed(order).indices, csr.indices)
    return same and (values is None or torch.equal(values[order], values))


def _built_transpose(
    variant: Variant, flipped: CSR
) -> tuple[BuiltSystem, Permutation, dict[str, list[str]]]:
    """Build the transpose with the variant's system if that takes it, else with the exact one."""
    request = Request(
        flipped, variant.n, variant.dtype, Permutation("identity", None), variant.deterministic
    )
    able, rejected = candidates(request, variant.system, exact_system(variant.device.type).name)
    if not able:
        raise unsupported("plan.T", rejected, f"the transpose of {variant.shape}")
    name = able[0]
    if SYSTEMS[name].ordered:
        order = order_of_transpose(variant.permutation, variant.csr, flipped)
        request = replace(request, permutation=order)
    return SYSTEMS[name].build(request), request.permutation, rejected


def _on(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device)


def follow_on(follow: Follow | None, device: torch.device) -> Follow | None:
    """The same trained values, brought to the new device; they themselves stay where they are."""
    if not isinstance(follow, functools.partial):
        return follow

    def there(argument: Any) -> Any:
        if isinstance(argument, CSR):
            return argument.to(device)
        fixed = isinstance(argument, Tensor) and not argument.requires_grad
        return argument.to(device) if fixed else argument

    return functools.partial(follow.func, *(there(each) for each in follow.args))

"""ComplexPlan: a plan of complex numbers, which is one of real numbers with a second set of values.

The family is that of the real parts, of twice as many columns. The imaginary parts have the same
pattern, and are read in the order of its entries; ``complex_products`` says how both are combined.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from sparsetile.core.device import machine
from sparsetile.core.errors import type_error, value_error
from sparsetile.intake.csr import COMPLEX, CSR, VALUE_DTYPES
from sparsetile.plan.arrays import is_array
from sparsetile.plan.complex_products import (
    as_columns,
    as_complex,
    complex_of,
    complex_product,
    parts_of,
    times_i,
)
from sparsetile.plan.eager import general_product, gradient_of_operand
from sparsetile.plan.family import Family, follow_on
from sparsetile.plan.modes import outside_modes, transforming
from sparsetile.plan.operands import check_values, wrong_type
from sparsetile.plan.plan import Plan
from sparsetile.plan.saved import copied, reduced, restored
from sparsetile.plan.traced.transforms import refuse_in_transform
from sparsetile.reorder.permutation import positions
from sparsetile.tune import floor_seconds

__all__ = ["ComplexPlan"]

_Follow = Callable[[], Tensor | None]


def _refuse(function: str, what: str, remedy: str) -> NoReturn:
    raise value_error(function, what, "real with this call", "complex numbers", remedy)


def _ordered(values: Tensor, order: CSR | Tensor, conjugated: bool) -> Tensor:
    """Return the caller's values in the order of A's entries: of A, or of a transpose of it."""
    if isinstance(order, CSR):
        made = order.canonical_values(values.to(order.device))
    else:
        made = values.to(order.device)[order]
    return made.conj() if conjugated else made


class _ComplexFamily(Family):
    """A family of real parts, with the imaginary ones in the order of A's entries."""

    imaginary: Tensor | None = None  # None: A is real
    turned: Tensor | None = None  # the same in the order of the transpose's entries
    trained: _Follow | None = None  # complex values, read in every product

    @outside_modes
    def take_complex(self, values: Tensor, trained: _Follow | None) -> None:
        """Copy or, if they are trained, follow values in the order of A's entries."""
        made = values.detach().to(complex_of(self.forward.dtype))
        real, imaginary = parts_of(made)
        self.set_values(real)
        self._as_planned = self.symmetric = False
        if self.imaginary is None:
            self.imaginary = imaginary
        else:  # captured graphs read it
            self.imaginary.copy_(imaginary)
        if self.turned is not None:
            self.turned.copy_(imaginary[self.entry_order()])
        self.trained = trained

    @outside_modes
    def imaginary_of(self, transposed: bool) -> Tensor | None:
        """Return the imaginary parts in the order of a direction's entries."""
        if self.imaginary is None or not transposed:
            return self.imaginary
        if self.turned is None:
            self.turned = self.imaginary[self.entry_order()]
        return self.turned

    @outside_modes
    def move(self, device: torch.device, dtype: torch.dtype) -> None:
        super().move(device, dtype)
        if self.imaginary is not None:
            self.imaginary = self.imaginary.to(device, dtype)
        self.turned = None
        self.trained = follow_on(self.trained, device)


class ComplexPlan(Plan):
    """What :func:`sparsetile.plan` returns of a complex A, or for ``dtype=torch.complex64``."""

    _family: _ComplexFamily
    _conjugated = False

    @classmethod
    @outside_modes
    def of(cls, real: Plan, imaginary: Tensor | None, trained: _Follow | None) -> ComplexPlan:
        """Take over a plan of the real parts, with the imaginary ones in the same order."""
        old = real._family
        family = _ComplexFamily(old.forward, old.column_order, old.widths)
        family.imaginary, family.trained = imaginary, trained
        return cls(family)

    # -- what was planned -----------------------------------------------------------------------

    @property
    def n(self) -> int:
        return self._family.forward.n // 2

    @property
    def dtype(self) -> torch.dtype:
        kind = complex_of(self._family.forward.dtype)
        assert kind is not None
        return kind

    @property
    def values(self) -> Tensor | None:
        family, real = self._family, self._variant.values
        if family.trained is not None:
            return self._trained()
        imaginary = family.imaginary_of(self._transposed)
        if real is None or imaginary is None:
            return None if real is None else real.to(self.dtype)
        return torch.complex(real, -imaginary if self._conjugated else imaginary)

    @property
    def info(self) -> dict[str, Any]:
        found = dict(super().info)
        two = self._family.imaginary is not None
        text = f"{'two products' if two else 'one product'} of {2 * self.n} columns of real numbers"
        choices = {"complex": text, **found["choices"]}
        return found | {"n": self.n, "dtype": str(self.dtype)[6:], "choices": choices}

    def floor(self) -> tuple[float, str]:
        variant = self._variant
        found = floor_seconds(
            variant.csr.with_values(variant.values), self.n, self.dtype, machine(self.device),
            variant.permutation.perm,
        )  # fmt: skip
        return found.seconds, found.term

    # -- values ---------------------------------------------------------------------------------

    def _trained(self) -> Tensor:
        """Trained values in the order of this direction's entries."""
        family = self._family
        assert family.trained is not None
        values = family.trained()
        assert values is not None
        values = values.to(self.dtype)
        values = values[family.entry_order()] if self._transposed else values
        return values.conj() if self._conjugated else values

    def update_values(self, values: Tensor) -> Plan:
        family = self._family
        csr = self._variant.csr
        check_values("update_values", csr, self.dtype, values, (*VALUE_DTYPES, *COMPLEX))
        if transforming():
            raise refuse_in_transform("update_values", "values", "Pass values= to run instead")
        order = positions(family.entry_order()) if self._transposed else csr
        follow = functools.partial(_ordered, values, order, self._conjugated)
        with torch.no_grad():
            family.take_complex(follow(), follow if values.requires_grad else None)
        return self

    # -- products -------------------------------------------------------------------------------

    def run(self, B: Tensor, out: Tensor | None = None, **options: Any) -> Tensor:
        if not isinstance(B, Tensor) or B.dim() == 1 or is_array(B):
            return super().run(B, out, **options)  # calls this again with a matrix
        return self._product(B, out, **options)

    def _product(
        self, B: Tensor, out: Tensor | None, *, alpha: float = 1.0, beta: float = 0.0,
        reduce: str = "sum", values: Tensor | None = None, bias: Tensor | None = None,
        relu: bool = False, out_dtype: torch.dtype | None = None,
    ) -> Tensor:  # fmt: skip
        family = self._family
        csr = self._variant.csr
        if values is not None:
            check_values("run", csr, self.dtype, values, (*VALUE_DTYPES, *COMPLEX))
            values = csr.canonical_values(values.to(self.dtype))
        elif family.trained is not None:
            values = self._trained()
        given: tuple[Tensor | None, ...] = (None, family.imaginary_of(self._transposed))
        sign = -1.0 if self._conjugated and values is None else 1.0
        if values is not None:
            given = parts_of(values)

        def part_of(
            columns: Tensor, to: Tensor | None, scale: float, share: float, part: int,
            added: Tensor | None,
        ) -> Tensor:  # fmt: skip
            chosen = given[part]
            if chosen is None:
                return Plan.run(
                    self, columns, to, alpha=scale, beta=share, reduce=reduce, bias=added
                )
            variant = family.main(True) if self._transposed else family.forward
            if family.widths is not None:
                variant = family.for_width(variant, columns)
            return general_product(
                family, variant, columns, to, scale * (sign if part else 1.0), share, reduce,
                chosen, added,
            )  # fmt: skip

        return complex_product(
            self, part_of, given[1] is not None, B, out, alpha, beta, reduce,
            values is not None and values.requires_grad, bias, relu, out_dtype,
        )  # fmt: skip

    def gradient(
        self, grad: Tensor, *, values: Tensor | None = None, reduce: str = "sum"
    ) -> Tensor:
        if values is not None or self._family.trained is not None:
            _refuse("gradient", "values", "Let autograd find the gradient")
        if grad.dtype is not self.dtype:
            raise wrong_type(self.dtype, grad, "gradient", "grad")
        family, variant = self._family, self._variant
        found = super().gradient(as_columns(grad), reduce=reduce)
        imaginary = family.imaginary_of(self._transposed)
        if imaginary is not None:
            mean = reduce == "mean"
            turned = gradient_of_operand(family, variant, times_i(grad), imaginary, mean)
            found = torch.add(found, turned, alpha=1 if self._conjugated else -1)
        return as_complex(found, grad.shape[-1])

    def linear(
        self, X: Tensor, *, bias: Tensor | None = None, relu: bool = False, alpha: float = 1.0,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:  # fmt: skip
        _refuse("linear", "plan", "Write plan.run(X.mT).mT")

    # -- transposes -----------------------------------------------------------------------------

    def _turned(self) -> Plan:
        found = super()._turned()
        assert isinstance(found, ComplexPlan)
        found._conjugated = self._conjugated
        return found

    @property
    def H(self) -> Plan:
        if "_adjoint" not in self.__dict__:
            self._family.main(not self._transposed)
            made = type(self)(self._family, not self._transposed)
            made._conjugated = not self._conjugated
            self.__dict__["_adjoint"] = made  # no submodule: it follows by itself
        found: Plan = self.__dict__["_adjoint"]
        return found

    # -- devices and copies ---------------------------------------------------------------------

    def _place(self, device: torch.device, dtype: torch.dtype | None) -> None:
        if dtype is not None and dtype not in COMPLEX:
            raise type_error(
                "to", "dtype", "torch.complex64 or torch.complex128", dtype,
                "Plan the real parts of A for real products",
            )  # fmt: skip
        kind = COMPLEX[self.dtype if dtype is None else dtype]
        self._family.move(device, kind)

    def save(self, path: str | os.PathLike[str]) -> None:
        _refuse("save", "plan", "Save the matrix, and plan it again")

    def __reduce__(self) -> tuple[Any, ...]:
        family = self._family
        if family.trained is not None:
            raise _follower("pickle")
        header, tensors, _ = reduced(family, self._variant)
        imaginary = family.imaginary_of(self._transposed)
        return _restored_complex, (header, tensors, imaginary, self._conjugated)

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        family = self._family
        if self._transposed and family.trained is not None:
            raise _follower("deepcopy")
        real = Plan(copied(family, self._variant, memo))
        imaginary = family.imaginary_of(self._transposed)
        trained = copy.deepcopy(family.trained, memo)
        made = ComplexPlan.of(real, None if imaginary is None else imaginary.clone(), trained)
        made._conjugated = self._conjugated
        return made


def _follower(function: str) -> TypeError:
    return type_error(
        function, "plan", "one that holds its own values", "one that follows trained values",
        "Give plan.update_values a detached copy",
    )  # fmt: skip


def _restored_complex(
    header: str, tensors: dict[str, Tensor | None], imaginary: Tensor | None, conjugated: bool
) -> Plan:
    made = ComplexPlan.of(Plan(restored(header, tensors)), imaginary, None)
    made._conjugated = conjugated
    return made


torch.serialization.add_safe_globals([_restored_complex])

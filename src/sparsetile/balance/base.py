"""What every schedule is: one signature, its validation, and the registry of policies.

A new policy is one file in this package with one class. Subclasses of ``Schedule`` register
themselves by their ``name``; ``balance/__init__.py`` imports every module.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import fields, replace
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor

from sparsetile.core.errors import describe, value_error
from sparsetile.formats.base import Variants
from sparsetile.formats.units import Units

__all__ = ["SCHEDULES", "Schedule", "not_consecutive"]

SCHEDULES: dict[str, type[Schedule]] = {}


def not_consecutive(units: Units) -> str | None:
    """Return why a policy that joins neighbouring units cannot take these; None where it can."""
    return "units must follow each other in one list" if units.offsets is None else None


class Schedule(ABC):
    """Items of work that cover every unit once; subclasses are frozen dataclasses of tensors.

    Attributes
    ----------
    name : str
        Key in ``SCHEDULES``. A class without one of its own is not registered.
    variants : mapping
        Sets of options of :meth:`make` by name: what the contract suite runs the policy with.
    arrays : tuple of str
        Tensors that the kernels read, in :meth:`tensors`.
    dtype : torch.dtype
        Type of all of them.
    fields : int
        Numbers of an item.
    items : Tensor [items, fields]
        What each policy says.
    """

    name: ClassVar[str]
    variants: ClassVar[Variants] = {"default": {}}
    arrays: ClassVar[tuple[str, ...]] = ("items",)
    dtype: ClassVar[torch.dtype] = torch.int32
    fields: ClassVar[int] = 4

    items: Tensor

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in vars(cls):
            return
        if cls.name in SCHEDULES:
            raise value_error(
                "Schedule", "name", "new", repr(cls.name), f"{SCHEDULES[cls.name].__name__} has it"
            )
        SCHEDULES[cls.name] = cls

    @classmethod
    @abstractmethod
    def make(cls, units: Units, *args: Any, **options: Any) -> Self:
        """List the items of ``units``.

        Parameters
        ----------
        units : Units
            What to schedule, in the order in which it should be visited.
        **options
            The policy's own, by keyword.
        """

    @classmethod
    def reason(cls, units: Units) -> str | None:
        """Return why this policy cannot schedule ``units``; None where it can."""
        return None

    @classmethod
    def _require(cls, units: Units) -> None:
        reason = cls.reason(units)
        if reason is not None:
            argument, _, expected = reason.partition(" must ")
            raise ValueError(
                f"{cls.__name__}.make: {argument} must {expected}. Use another schedule."
            )

    @property
    def item_count(self) -> int:
        return self.items.shape[0]

    def to(self, device: torch.device) -> Self:
        """Return the same schedule with its tensors on a device."""
        found = {field.name: getattr(self, field.name) for field in fields(cast(Any, self))}
        # From the host without a wait for what the device still does: the copy is made from
        # pageable memory, which is read before the call returns.
        moved = {
            name: value.to(device, non_blocking=device.type == "cuda")
            for name, value in found.items()
            if isinstance(value, Tensor)
        }
        return cast(Self, replace(cast(Any, self), **moved))

    def tensors(self) -> dict[str, Tensor]:
        """Return every array that the kernels read, by name."""
        return {name: getattr(self, name) for name in self.arrays}

    @abstractmethod
    def pieces(self) -> Tensor:
        """Return the parts of units that the items hold, in the order of the items.

        Returns
        -------
        Tensor of int64 [pieces, 4]
            Whether the unit is a bundle (0 or 1), its label, and begin and end in its list. An
            item that holds several units has a piece for each.
        """

    def slots(self) -> Tensor:
        """Return where each piece's partial sum goes, int64 [pieces]; -1 for a whole unit."""
        return torch.full((self.pieces().shape[0],), -1, device=self.items.device)

    def joined(self, sums: Tensor) -> Tensor:
        """Return the sum of each piece's unit, [pieces], from the ``sums`` [pieces] of the pieces.

        Partial sums of cut units are added as the arrays tell the device to.
        """
        return sums

    def validate(self, units: Units) -> None:
        """Raise where this is not a schedule of ``units``.

        Raises
        ------
        ValueError
            Names the fault: an array of another type; an entry in no item, or in two; partial sums
            that are not added up.
        """
        for name, array in self.tensors().items():
            if array.dtype is not self.dtype or not array.is_contiguous():
                layout = "" if array.is_contiguous() else ", not contiguous"
                raise self._fault(name, f"contiguous {self.dtype}", f"{array.dtype}{layout}")
        if self.items.shape[1:] != (self.fields,):
            shape = tuple(self.items.shape)
            raise self._fault("items", f"[items, {self.fields}]", f"shape {shape}")
        self._check_items(units)
        self._check_cover(units)

    def _fault(self, argument: str, expected: str, actual: object) -> ValueError:
        remedy = "Make the schedule again from these units"
        function = f"{type(self).__name__}.validate"
        return ValueError(describe(function, argument, expected, actual, remedy))

    def _check_items(self, units: Units) -> None:
        """Raise where items are not what the policy says; pieces are read from them next."""
        return

    def _check_joins(self, unit_of_slot: Tensor) -> None:
        """Raise where partial sums of cut units are not added up.

        Parameters
        ----------
        unit_of_slot : Tensor of int64 [slots of pieces]
            Place in the units, ascending in each unit's entries.
        """
        if unit_of_slot.numel():
            raise self._fault("items", "whole units: nothing adds up pieces", "pieces")

    def _check_cover(self, units: Units) -> None:
        """Raise where some entry of some unit is in no item or in two."""
        pieces = self.pieces()
        unit = self._unit_of_piece(pieces, units)
        begin, end = pieces[:, 2], pieces[:, 3]
        by_begin = torch.argsort(begin, stable=True)
        order = by_begin[torch.argsort(unit[by_begin], stable=True)]
        unit, begin, end = unit[order], begin[order], end[order]
        count = torch.bincount(unit, minlength=units.count)
        self._refuse(count == 0, units, "in an item", "in none")
        # Where each piece must begin: where its unit does, or where the piece before it ends.
        is_first = torch.ones_like(unit, dtype=torch.bool)
        torch.ne(unit[1:], unit[:-1], out=is_first[1:])
        before = torch.cat([end[:1], end[:-1]])
        expected = torch.where(is_first, units.begin[unit], before)
        is_last = torch.ones_like(is_first)
        is_last[:-1] = is_first[1:]
        unit_end = (units.begin + units.length)[unit]
        missed = (begin > expected) | (is_last & (end < unit_end))
        twice = (begin < expected) & ~is_first
        outside = (is_first & (begin < expected)) | (end > unit_end)
        # A piece without entries is right only as the one piece of a unit without entries.
        empty = (end < begin) | ((end == begin) & (count[unit] > 1))
        for wrong, text in (
            (outside, "a piece outside its list"),
            (twice, "entries in two items"),
            (missed, "entries in no item"),
            (empty, "a piece without entries"),
        ):
            self._refuse(_any_of(wrong, unit, units.count), units, "covered once", text)
        self._check_slots(self.slots()[order], unit, count, units)

    def _unit_of_piece(self, pieces: Tensor, units: Units) -> Tensor:
        """Place of each piece's unit in ``units``."""
        span = 1 + max(_top(pieces[:, 1]), _top(units.label), 0)
        keys, at = torch.sort(units.bundled.to(torch.int64) * span + units.label)
        wanted = pieces[:, 0] * span + pieces[:, 1]
        found = torch.searchsorted(keys, wanted)
        known = found < keys.numel()
        found = torch.where(known, found, 0)
        if keys.numel():
            known &= keys[found] == wanted
        if not bool(known.all()):
            bundled, label = pieces[~known][0, :2].tolist()
            raise self._fault("items", "of these units", f"{_called(bundled)} {label}")
        return at[found] if keys.numel() else found

    def _check_slots(self, slots: Tensor, unit: Tensor, count: Tensor, units: Units) -> None:
        cut = count[unit] > 1
        self._refuse(
            _any_of(~cut & (slots != -1), unit, units.count), units, "without a slot", "one"
        )
        self._refuse(
            _any_of(cut & (slots < 0), unit, units.count), units, "in pieces with slots", "a -1"
        )
        mine, owner = slots[cut], unit[cut]
        # Slots of a unit follow each other in the order of its entries, and none is left.
        if not torch.equal(mine.sort().values, torch.arange(mine.numel(), device=mine.device)):
            raise self._fault("slots", f"0 to {mine.numel() - 1}, each once", "others")
        apart = (owner[1:] == owner[:-1]) & (mine[1:] != mine[:-1] + 1)
        self._refuse(
            _any_of(apart, owner[1:], units.count), units, "in slots side by side", "slots apart"
        )
        unit_of_slot = torch.empty_like(owner)
        unit_of_slot[mine] = owner
        self._check_joins(unit_of_slot)

    def _refuse(self, wrong: Tensor, units: Units, expected: str, actual: str) -> None:
        """Raise naming the first unit that is ``wrong`` [units]."""
        if bool(wrong.any()):
            at = int(torch.nonzero(wrong)[0])
            unit = f"{_called(bool(units.bundled[at]))} {int(units.label[at])}"
            raise self._fault(unit, expected, actual)


def _called(bundled: float) -> str:
    return "bundle" if bundled else "unit"


def _top(numbers: Tensor) -> int:
    return int(numbers.max()) if numbers.numel() else -1


def _any_of(wrong: Tensor, unit: Tensor, count: int) -> Tensor:
    """Whether each unit has a piece that is wrong."""
    found = torch.zeros(count, dtype=torch.bool, device=unit.device)
    found[unit[wrong]] = True
    return found

"""What every schedule must be: each entry in exactly one item, cut sums added up.

The suite runs on every policy of ``tests/balance/decoding.py`` with every one of its options, on
the units of every format.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil

import numpy as np
import pytest
import torch
from torch import Tensor

from sparsetile import CSR, balance
from sparsetile.balance import Schedule
from sparsetile.formats import Units, row_units
from tests.balance.cover import check_cover
from tests.balance.decoding import SCHEDULES, VARIANTS, joined, pieces_of, slots_of
from tests.case_names import case_of
from tests.contracts.cases import MATRICES, csr_of, derived
from tests.formats.decoding import VARIANTS as FORMATS
from tests.formats.decoding import packed

Case = tuple[str, str]
# Formats whose units are scheduled, and rows of A as they are.
FORMS = ("rows", *FORMATS)


def cases() -> list[Case]:
    """(schedule, variant) of everything registered."""
    return [(name, variant) for name in SCHEDULES for variant in VARIANTS[name]]


@functools.cache
def matrix(name: str) -> tuple[CSR, Tensor]:
    csr = csr_of(MATRICES[name]())
    generator = torch.Generator().manual_seed(5)
    return csr, torch.randperm(csr.shape[0], generator=generator)


@functools.cache
def units_of(form: str, name: str) -> list[Units]:
    """Units of the first two variants of a format: in the given order, and in another."""
    csr, order = matrix(name)
    if form == "rows":
        return [row_units(csr), row_units(csr, order)]
    first, *more = list(FORMATS[form])[:2]
    last = more[0] if more else first
    return [packed(form, first, csr).units(), packed(form, last, csr, order).units()]


def made(case: Case, units: Units) -> Schedule:
    return SCHEDULES[case[0]].make(units, **VARIANTS[case[0]][case[1]])


made_once = functools.cache(made)  # units are the same objects in every test


every_schedule = pytest.mark.parametrize("case", cases(), ids=" ".join)
every_matrix = pytest.mark.parametrize("name", MATRICES)


def taken(case: Case, name: str) -> list[Units]:
    """Units of every format that the policy can schedule."""
    found = [units for form in FORMS for units in units_of(form, name)]
    return [units for units in found if SCHEDULES[case[0]].reason(units) is None]


def keys_of(kind: np.ndarray, label: np.ndarray) -> list[tuple[int, int]]:
    return list(zip(kind.tolist(), label.tolist(), strict=True))


@every_schedule
def test_every_entry_of_every_unit_is_in_exactly_one_item(case):
    for name in MATRICES:
        for units in taken(case, name):
            with case_of(name):
                check_cover(units, pieces_of(made_once(case, units)))


@every_schedule
def test_sums_of_cut_units_are_the_direct_sums(case):
    for name in MATRICES:
        for units in taken(case, name):
            with case_of(name):
                check_sums(units, made_once(case, units))


def check_sums(units: Units, schedule: Schedule) -> None:
    top = int((units.begin + units.length).max()) if units.count else 0
    entries = np.random.default_rng(0).integers(-1000, 1000, (2, top))  # bundles' lists apart
    running = np.pad(np.cumsum(entries, 1), ((0, 0), (1, 0)))
    kind, label, begin, end = pieces_of(schedule).numpy().T
    sums = torch.from_numpy(running[kind, end] - running[kind, begin])
    kinds = units.bundled.long().numpy()
    first, last = units.begin.numpy(), (units.begin + units.length).numpy()
    totals = (running[kinds, last] - running[kinds, first]).tolist()
    direct = dict(zip(keys_of(kinds, units.label.numpy()), totals, strict=True))
    wanted = [direct[unit] for unit in keys_of(kind, label)]
    assert joined(schedule, sums).tolist() == wanted


@every_schedule
def test_pieces_of_cut_units_have_a_slot_each_and_whole_units_none(case):
    for units in (units for name in MATRICES for units in taken(case, name)):
        schedule = made_once(case, units)
        pieces = pieces_of(schedule)
        mine: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for (kind, label, begin, _), slot in zip(
            pieces.tolist(), slots_of(schedule).tolist(), strict=True
        ):
            mine.setdefault((kind, label), []).append((begin, slot))
        used = []
        for held in mine.values():
            slots = [slot for _, slot in sorted(held)]
            if len(slots) == 1:
                assert slots == [-1]
            else:
                assert slots == list(range(slots[0], slots[0] + len(slots)))
                used += slots
        assert sorted(used) == list(range(len(used)))


@every_schedule
def test_is_made_of_contiguous_arrays_of_one_type(case):
    (units, *_) = taken(case, "one dense row")
    schedule = made(case, units)
    arrays = schedule.tensors()
    assert arrays and schedule.item_count == schedule.items.shape[0]
    for name, array in arrays.items():
        assert array is getattr(schedule, name)
        assert array.dtype is schedule.dtype and array.is_contiguous()


@every_schedule
def test_units_that_it_cannot_take_are_refused_with_the_reason(case):
    schedule = SCHEDULES[case[0]]
    found = [units for form in FORMS for units in units_of(form, "odd sizes")]
    refused = [(units, reason) for units in found if (reason := schedule.reason(units))]
    assert len(refused) < len(found), "each policy takes the units of some format"
    for units, reason in refused:
        with pytest.raises(ValueError) as caught:
            made(case, units)
        text = f"{schedule.__name__}.make: {reason}. Use another schedule."
        assert str(caught.value) == text


def test_units_of_every_format_are_taken_by_some_schedule():
    for form in FORMS:
        for units in units_of(form, "odd sizes"):
            assert any(schedule.reason(units) is None for schedule in SCHEDULES.values())


def test_every_schedule_of_the_package_is_read_back_here():
    for module in pkgutil.iter_modules(balance.__path__):
        importlib.import_module(f"{balance.__name__}.{module.name}")
    ours = {each for each in derived(Schedule) if each.__module__.startswith(balance.__name__)}
    assert {each for each in ours if not inspect.isabstract(each)} == {*SCHEDULES.values()}

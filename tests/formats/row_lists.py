"""Matrices by their rows' lengths, and what schedules of them are made with: shared by tests of
kernels that list rows, on the host and on a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from sparsetile.balance import SegmentSchedule
from sparsetile.formats.units import Tally
from sparsetile.intake.csr import CSR

__all__ = ["LIMITS", "LISTS", "assert_same_schedule", "assert_same_tally", "lengths_of", "matrix"]

# Lengths over which rows are cut, have a warp, and have a thread block.
LIMITS: tuple[dict[str, Any], ...] = (
    {"max_length": 512},
    {"max_length": 512, "wide_length": 16, "shared_length": 32},
    {"max_length": 64},
    {"max_length": 64, "wide_length": 96},
    {"max_length": 64, "wide_length": 16, "shared_length": 24},
    {"max_length": 40, "wide_length": 9, "shared_length": 30},
    {"max_length": 256, "wide_length": 24, "shared_length": 16},
    {"max_length": 7, "wide_length": 3},
)
LISTS = (
    "no row", "one row", "one empty row", "one hub", "all empty", "short", "around a window",
    "some wide", "all wide", "hubs", "shared columns",
)  # fmt: skip


def lengths_of(name: str) -> Tensor:
    """Lengths of the rows of a matrix."""
    draw = torch.Generator().manual_seed(len(name))
    if name == "no row":
        return torch.zeros(0, dtype=torch.int64)
    if name == "one row":
        return torch.tensor([17])
    if name == "one empty row":
        return torch.tensor([0])
    if name == "one hub":
        return torch.tensor([3000])
    if name == "all empty":
        return torch.zeros(300, dtype=torch.int64)
    if name == "around a window":
        return torch.randint(0, 5, (257,), generator=draw)
    if name == "all wide":
        return torch.randint(97, 200, (41,), generator=draw)
    length = torch.randint(0, 12, (1030,), generator=draw)
    if name in ("some wide", "hubs"):
        length[torch.randint(0, 1030, (90,), generator=draw)] = torch.randint(
            13, 130, (90,), generator=draw
        )
    if name == "hubs":
        length[torch.randint(0, 1030, (25,), generator=draw)] = torch.randint(
            200, 1500, (25,), generator=draw
        )
    return length


def matrix(name: str, cols: int = 4096) -> CSR:
    """Rows of those lengths; columns at random, or nearly the same in four rows."""
    length = lengths_of(name)
    indptr = torch.nn.functional.pad(torch.cumsum(length, 0), (1, 0))
    columns = [torch.empty(0, dtype=torch.int64)]
    for row, count in enumerate(length.tolist()):
        draw = torch.Generator().manual_seed(row // 4 if name == "shared columns" else row)
        columns.append(torch.randperm(cols, generator=draw)[:count].sort().values)
    return CSR(indptr, torch.cat(columns).to(torch.int32), None, (length.numel(), cols))


def assert_same_tally(wanted: Tally, found: Tally) -> None:
    for field in dataclasses.fields(wanted):
        assert getattr(wanted, field.name) == getattr(found, field.name), field.name


def assert_same_schedule(wanted: SegmentSchedule, found: SegmentSchedule) -> None:
    """The same items bit by bit, in the same sections, and the same tree."""
    assert wanted.sections == found.sections
    for name, tensor in wanted.tensors().items():
        made = getattr(found, name)
        assert made.dtype is tensor.dtype and made.shape == tensor.shape, name
        assert made.is_contiguous() and torch.equal(made.to(tensor.device), tensor), name
    assert wanted.longest_item() == found.longest_item()

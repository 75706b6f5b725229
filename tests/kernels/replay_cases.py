"""Matrices as the systems build them, ready to be launched on a machine of ``replay.py``."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import Tensor

from sparsetile import CSR
from sparsetile.formats import pack_bittcf
from sparsetile.reorder import Permutation
from sparsetile.systems import Request
from sparsetile.systems.acc import system as acc
from sparsetile.systems.acc.system import AccSystem
from sparsetile.systems.base import Epilogue, System
from sparsetile.systems.bcsr.system import BCSRSystem
from sparsetile.systems.csr.system import CSRSystem
from sparsetile.systems.wcsr.system import WCSRSystem
from tests.contracts.cases import csr_of
from tests.kernels.replay import Machine

__all__ = [
    "BlockCase",
    "FiniteWindowCase",
    "RowCase",
    "TileCase",
    "WindowCase",
    "stack_windows",
    "strided",
    "with_tiles",
]


class Case:
    """A matrix as ``system`` builds it, ready to be launched on a machine."""

    system: System

    def __init__(
        self,
        machine: Machine,
        csr: CSR,
        n: int,
        dtype: torch.dtype,
        order: Tensor | None = None,
        ablation: str | None = None,
    ) -> None:
        request = Request(csr, n, dtype, Permutation("given", order), ablation=ablation)
        self.machine, self.csr = machine, csr
        self.stage = self.system.build(request)
        self.meta = json.loads(self.stage.recipe.partition(":")[2])
        # Not the registry's runner, which would remember another machine's kernels.
        self.runner = self.system.make_runner(self.meta)
        self.packed = self.pack(csr.values, dtype)
        machine.hold(*self.stage.parts, csr.values)

    def pack(self, values: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        if not self.runner.packs:
            return None
        packed = self.runner.pack(self.stage.parts, values, dtype)
        self.machine.hold(packed)
        return packed

    def spmm(self, B: Tensor, out: Tensor | None = None, **epilogue: Any) -> Tensor:
        if out is None:
            out = torch.full(
                (*B.shape[:-2], self.csr.shape[0], B.shape[-1]), float("nan"), dtype=B.dtype
            )
        self.machine.hold(B, out)
        self.runner.spmm(
            self.stage.parts, self.csr.values, self.packed, B, out, Epilogue(**epilogue)
        )
        self.check_writes(out)
        return out

    def check_writes(self, out: Tensor) -> None:
        """Each element of C was written exactly once, nothing beside C, counters are back at 0."""
        if out.numel():
            written = self.machine.written[out.data_ptr()].writes
            strides = [stride * written.itemsize for stride in out.stride()]
            mine = np.lib.stride_tricks.as_strided(written, out.shape, strides)
            assert (mine == 1).all()
            assert int(written.sum()) == out.numel()
        assert not any(bool(counters.any()) for counters in self.machine.arrivals)


class RowCase(Case):
    system = CSRSystem()


class TileCase(Case):
    system = AccSystem()


class BlockCase(Case):
    system = BCSRSystem(CSRSystem())

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.spoilt = self.runner._spoilt(self.stage.parts)
        self.machine.hold(self.spoilt)

    def check_writes(self, out: Tensor) -> None:
        """The replay of each launch has done that: C may be a copy, and be repaired after it."""


class WindowCase(Case):
    system = WCSRSystem(AccSystem())

    def spmm(self, B: Tensor, out: Tensor | None = None, **epilogue: Any) -> Tensor:
        self.machine.recomputed, self.machine.to_join = 0, None
        return super().spmm(B, out, **epilogue)

    def check_writes(self, out: Tensor) -> None:
        """The replay of each launch has done that for what it wrote: C may be a copy."""
        assert self.machine.to_join is None, "windows in pieces were never added up"
        assert not any(bool(counters.any()) for counters in self.machine.arrivals)


class FiniteWindowCase(WindowCase):
    """Nothing may be computed again: what is NaN by mistake would be mended."""

    def spmm(self, B: Tensor, out: Tensor | None = None, **epilogue: Any) -> Tensor:
        found = super().spmm(B, out, **epilogue)
        assert self.machine.recomputed == 0, "sums were not finite"
        return found


def stack_windows(monkeypatch: pytest.MonkeyPatch, stack: int) -> None:
    """Let the acc system cut windows of ``stack`` times eight rows, whatever it would choose."""
    monkeypatch.setattr(
        acc, "_pack", lambda request, *_: pack_bittcf(request.csr, request.permutation.perm, stack)
    )


def with_tiles(
    tiles: list[int], dtype: torch.dtype, pattern: bool = False, *, stack: int = 1, last: int = 5
) -> CSR:
    """A matrix whose windows of ``stack`` times eight rows have these tiles.

    They have no columns in common; the last window has ``last`` rows, so that those of a stack's
    later tiles may lie past the end.
    """
    random = np.random.default_rng(5)
    rows, columns = [], []
    for window, count in enumerate(tiles):
        height = last if window == len(tiles) - 1 else 8 * stack
        first = 8 * sum(tiles[:window])
        dense = random.random((height, 8 * count)) < 0.3
        dense[random.integers(0, height, 8 * count), np.arange(8 * count)] = True
        row, column = np.nonzero(dense)
        rows.append(row + 8 * stack * window)
        columns.append(column + first)
    row, column = np.concatenate(rows), np.concatenate(columns)
    values = random.choice([-2.0, -1.0, 1.0, 3.0], row.size)
    shape = (8 * stack * (len(tiles) - 1) + last, 8 * sum(tiles) + 2)
    return csr_of(sp.csr_array((values, (row, column)), shape=shape), pattern=pattern, dtype=dtype)


def strided(B: Tensor, how: str) -> Tensor:
    """B as part of wider rows, one element off, or one of a batch for all: NaN lies around it."""
    *lead, rows, cols = B.shape
    if how == "row stride":
        wide = torch.full((*lead, rows, cols + 5), float("nan"), dtype=B.dtype)
        wide[..., :cols] = B
        return wide[..., :cols]
    if how == "misaligned":
        flat = torch.full((B.numel() + 1,), float("nan"), dtype=B.dtype)
        flat[1:] = B.flatten()
        return flat[1:].view(B.shape)
    assert how == "same batch again", how
    return B[:1].expand(B.shape) if lead else B

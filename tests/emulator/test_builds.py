"""Builds take few operations: each costs a GPU's host microseconds, whatever the matrix.

Tensor operations are counted on the host, with tiles packed by the kernel there as on a GPU. What a
schedule does on the host with few windows counts as well.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sparsetile.core.device import H200
from sparsetile.engines.request import Request
from sparsetile.formats import units
from sparsetile.intake.csr import CSR
from sparsetile.launch import staged
from sparsetile.reorder import Permutation
from sparsetile.systems import SYSTEMS
from sparsetile.systems.brp import windows
from tests.emulator.build import HostKernel, host_compiler
from tests.host import answer_on_host, built_by_kernels

pytestmark = pytest.mark.skipif(host_compiler() is None, reason="no g++ here")

# Operations that launch nothing.
VIEWS = {
    "view", "reshape", "slice", "select", "unsqueeze", "squeeze", "expand", "unbind", "split",
    "split_with_sizes", "as_strided", "transpose", "t", "detach", "alias", "empty",
    "lift_fresh",
}  # fmt: skip
# Operations of a build, its choices included: about a tenth over what they are now.
MOST = {
    ("csr", None): 11,
    ("acc", None): 21,
    ("wcsr", "tall"): 35,
    ("brp", None): 45,
    ("brp", "mixed"): 63,
    ("brp", "1x4"): 46,
    ("brp", "2x2"): 34,
    ("brp", "atomic"): 43,
    ("rsh", None): 78,
    ("voltrix", None): 50,
}

# The same of rows in bundles.
WITH_BUNDLES = 24

# The same where lists of windows and rows are too long for the host, and sorts of those lists.
MANY_WINDOWS, SCHEDULE_SORTS = 105, 2


class Counted(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in VIEWS:
            self.names[name] += 1
        return func(*args, **(kwargs or {}))


def a_graph(rows: int, entries: int) -> CSR:
    """Rows of all lengths, a few of them long."""
    draw = torch.Generator().manual_seed(1)
    row = (rows * torch.rand(entries, generator=draw) ** 3).long()
    row = torch.randperm(rows, generator=draw)[row]
    keys = torch.unique(row * rows + torch.randint(0, rows, (entries,), generator=draw))
    indptr = torch.zeros(rows + 1, dtype=torch.int64)
    torch.cumsum(torch.bincount(keys // rows, minlength=rows), 0, out=indptr[1:])
    values = torch.ones(keys.numel())
    return CSR(indptr, (keys % rows).to(torch.int32), values, (rows, rows))


def operations(
    system: str,
    ablation: str | None,
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    csr: CSR | None = None,
) -> tuple[Counter[str], int]:
    """Tensor operations of a build by name, and launches of kernels."""
    launches = 0

    class Launched(HostKernel):
        def launch(self, *args: Any, **options: Any) -> None:
            nonlocal launches
            launches += 1
            super().launch(*args, **options)

    answer_on_host(
        monkeypatch, staged, load=lambda spec, config, *_: Launched(spec, config, folder)
    )
    request = Request(
        a_graph(3000, 20_000) if csr is None else csr, 128, torch.float32,
        Permutation("given", None), ablation=ablation, ceilings=H200,
    )  # fmt: skip
    with built_by_kernels("cpu"), Counted() as counted:
        SYSTEMS[system].build(request)
    return counted.names, launches


@pytest.mark.parametrize(("system", "ablation"), MOST, ids=str)
def test_a_build_takes_few_operations(system, ablation, monkeypatch, folder: Path):
    names, launches = operations(system, ablation, monkeypatch, folder)
    total = names.total() + launches
    assert total <= MOST[system, ablation], f"{total}: {names.most_common(12)}"
    assert launches > 0


def test_a_build_of_many_windows_takes_more_but_does_not_sort(monkeypatch, folder: Path, constants):
    constants(units, HOST_UNITS=-1)  # lists stay where A is
    constants(windows, HOST_UNITS=-1)
    names, launches = operations("brp", "1x4", monkeypatch, folder)
    total = names.total() + launches
    assert total <= MANY_WINDOWS, f"{total}: {names.most_common(12)}"
    assert launches == 4  # counts, rows, groups, entries outside
    assert names["sort"] <= SCHEDULE_SORTS


def test_a_build_with_bundles_takes_few_operations_and_does_not_sort(monkeypatch, folder: Path):
    rows, length = 1000, 60
    columns = (torch.arange(rows) // 4 * 4).unsqueeze(1) + torch.arange(length)
    csr = CSR(
        torch.arange(rows + 1) * length, columns.reshape(-1).int(), None, (rows, rows + length)
    )
    names, launches = operations("csr", None, monkeypatch, folder, csr)
    total = names.total() + launches
    assert total <= WITH_BUNDLES, f"{total}: {names.most_common(12)}"
    assert launches == 13 and names["sort"] == 0

"""Records of the tools say which code they are of: its digests are taken once for all tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from sparsetile.systems.cpu.runner import CPURunner
from tests.today import digests_of_today, gpu_tests_of_today
from tests.tools.sanitizer import FACTS
from tools import checkers, fuzz_pool, mutate, parts, prove, record, verify


@pytest.fixture(autouse=True)
def digests(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the next readings of the code find, where a test says so; else it is today's.

    tests/check has the tests of digests; reading the whole package takes longer than these.
    """
    next_ones: list[Any] = []
    for module in (parts, checkers, fuzz_pool, mutate, record):
        monkeypatch.setattr(
            module, "part_digests", lambda: next_ones.pop(0) if next_ones else digests_of_today()
        )
    monkeypatch.setattr(record, "GpuTests", lambda root: gpu_tests_of_today())
    return next_ones


@pytest.fixture
def damaged(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Call it with what then happens to the output of each product of a runner, ``cpu``'s."""

    def damage(harm: Callable[[Tensor], object], runner: Any = CPURunner) -> None:
        spmm = runner.spmm

        def harmed(self: Any, tensors: Any, values: Any, packed: Any, B: Any, out: Any, *rest: Any):
            spmm(self, tensors, values, packed, B, out, *rest)
            harm(out)

        monkeypatch.setattr(runner, "spmm", harmed)
        monkeypatch.setattr(runner, "bind", lambda *_: None)  # all products come here

    return damage


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str, Callable[..., Any]], None]:
    """Plant a fault: ``wrong`` runs in place of an owner's function, and gets it first."""

    def plant(owner: Any, name: str, wrong: Callable[..., Any]) -> None:
        right = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given, **more: wrong(right, *given, **more))

    return plant


@pytest.fixture
def facts(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A machine with a GPU, which a test may change."""
    found = dict(FACTS)
    for module in (checkers, mutate, prove, verify):
        monkeypatch.setattr(module, "machine_facts", lambda: dict(found))
    return found


@pytest.fixture
def checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder that proofs take for the checkout."""
    for module in (mutate, prove, verify):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    return tmp_path

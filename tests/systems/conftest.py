"""GPUs that tests of systems pretend to have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparsetile.core import device as facts
from sparsetile.kernels import KernelSpec
from tests.emulator.conftest import folder

__all__ = ["folder", "gpu_facts"]


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """A Hopper GPU, until another compute capability is appended."""
    found = [(9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found[-1])
    return found


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch, fresh_runners: None) -> list[tuple[Any, ...]]:
    """Kernels that runners load: name, configuration and further arguments. None is compiled."""
    found: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        KernelSpec, "load", lambda spec, config, *rest: found.append((spec.name, config, *rest))
    )
    return found


@pytest.fixture
def gpu_facts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Call it with ``processors`` and ``l2_bytes``: what plans and runners then find everywhere."""

    def pretend(processors: int = 132, l2_bytes: int = 60 * 2**20) -> None:
        found = SimpleNamespace(
            name="a test's GPU",
            multi_processor_count=processors,
            L2_cache_size=l2_bytes,
            major=9,
            minor=0,
        )
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
        changed = replace(facts.H200, processors=processors, l2_bytes=l2_bytes)
        monkeypatch.setattr(facts, "H200", changed)
        facts.machine.cache_clear()

    yield pretend
    facts.machine.cache_clear()

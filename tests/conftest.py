"""Fixtures shared by all tests: the devices there are, and a kernel cache of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sparsetile.plan import operators as ops
from sparsetile.systems import registry
from sparsetile.systems.wcsr import system as wcsr

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here"),
        ],
    ),
]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device type; the GPU case carries the marker ``gpu``."""
    return torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(20240611)


@pytest.fixture(autouse=True)
def _tall_windows() -> Iterator[None]:
    """Let ``wcsr`` take windows of 64 rows everywhere: small matrices would never lead it there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wcsr, "A_TALL_TILE", 0.0)
        patch.setattr(wcsr, "A_TALL_WINDOW", 0.0)
        yield


def _forget_runners() -> None:
    registry._runners.clear()
    ops._bundle.cache_clear()


@pytest.fixture
def fresh_runners() -> Iterator[None]:
    """Runners remember what they chose and loaded: none of before is met, none is left behind."""
    _forget_runners()
    yield
    _forget_runners()

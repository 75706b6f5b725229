"""Fixtures shared by all tests: the devices there are, and a folder for kept timings."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sparsetile.plan.flat import parsed
from sparsetile.systems import registry

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
    # Where there is no GPU, torch.manual_seed keeps a printed stack for each call to repeat later.
    seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
    seed(20240611)


@pytest.fixture(scope="session")
def _timings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Names of folders, each new. None is made: what keeps timings makes its own, and few do."""
    folder = tmp_path_factory.mktemp("tuned")
    return (folder / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def _own_timings(_timings: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Timings of one test are not kept for another, nor for the user."""
    monkeypatch.setenv("SPARSETILE_TUNE_DIR", str(next(_timings)))


def _forget_runners() -> None:
    registry._runners.clear()
    parsed.cache_clear()


@pytest.fixture
def fresh_runners() -> Iterator[None]:
    """Runners remember what they chose and loaded: none of before is met, none is left behind."""
    _forget_runners()
    yield
    _forget_runners()

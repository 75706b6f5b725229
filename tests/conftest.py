"""Fixtures shared by all tests: the devices there are, and a folder for kept timings."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sparsetile.plan.traced.flat import parsed
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

# Ids of every test that needs a GPU, those too that a machine without one leaves out.
GPU_TESTS = pytest.StashKey[list[str]]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a GPU, skip one GPU test a file in place of thousands of cases."""
    needing = [item for item in items if item.get_closest_marker("gpu")]
    config.stash[GPU_TESTS] = [item.nodeid for item in needing]
    if torch.cuda.is_available():
        return
    first = {item.path: item for item in reversed(needing)}
    left = {item for item in needing if item is not first[item.path]}
    config.hook.pytest_deselected(items=[item for item in items if item in left])
    items[:] = [item for item in items if item not in left]


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over modules and test cases, which stay: tests call it often,
    and walking through millions of objects takes it half a second."""
    gc.collect()
    gc.freeze()


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

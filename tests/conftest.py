"""Fixtures shared by all tests: the devices there are, and a folder for kept timings."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsetile.core import streams
from sparsetile.plan.traced.flat import parsed
from sparsetile.systems import registry
from tests.interpreter import Interpreter

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
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Interpreter]:
    """Runs programs in processes of their own, which find torch imported."""
    made = Interpreter(tmp_path_factory.mktemp("interpreter"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def _timings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Names of folders, each new. None is made: what keeps timings makes its own, and few do."""
    folder = tmp_path_factory.mktemp("tuned")
    return (folder / str(number) for number in itertools.count())


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Call it with variables of the environment and their values; None unsets a variable."""

    def change(**variables: object) -> None:
        for name, value in variables.items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, str(value))

    return change


@pytest.fixture
def constants(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Call it with a module and other values of its constants, such as the sizes at which it goes
    another way: large cases are then tested by small ones."""

    def change(module: Any, **values: Any) -> None:
        for name, value in values.items():
            assert name.isupper(), f"{name} is no constant"
            monkeypatch.setattr(module, name, value)

    return change


@dataclass
class Call:
    """A call of a function: its arguments, and what it returned."""

    given: tuple[Any, ...]
    options: dict[str, Any]
    result: Any = None


@pytest.fixture
def calls_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str], list[Call]]:
    """Call it with an owner and a function's name: lists the calls from now on."""

    def watch(owner: Any, name: str) -> list[Call]:
        function, calls = getattr(owner, name), list[Call]()

        def noted(*given: Any, **options: Any) -> Any:
            calls.append(call := Call(given, options))
            call.result = function(*given, **options)
            return call.result

        monkeypatch.setattr(owner, name, noted)
        return calls

    return watch


@pytest.fixture
def torch_cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Call it with what functions of torch.cuda return from now on, whatever they are asked."""

    def pretend(**answers: Any) -> None:
        for question, answer in answers.items():
            monkeypatch.setattr(torch.cuda, question, lambda *_, answer=answer: answer)

    return pretend


@pytest.fixture
def no_gpu(torch_cuda: Callable[..., None]) -> None:
    """A machine without a GPU, whatever this one has."""
    torch_cuda(is_available=False)


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Say whether the current stream captures a graph."""

    def say(captures: bool) -> None:
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures)
        monkeypatch.setattr(streams, "capturing", lambda device: captures)

    return say


@pytest.fixture(autouse=True)
def _own_timings(_timings: Iterator[Path], environment: Callable[..., None]) -> None:
    """Timings of one test are not kept for another, nor for the user."""
    environment(SPARSETILE_TUNE_DIR=next(_timings))


def _forget_runners() -> None:
    registry._runners.clear()
    parsed.cache_clear()


@pytest.fixture
def fresh_runners() -> Iterator[None]:
    """Runners remember what they chose and loaded: none of before is met, none is left behind."""
    _forget_runners()
    yield
    _forget_runners()

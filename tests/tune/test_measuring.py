"""What timing a choice may cost, and which of its answers outlive the process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sparsetile.engines.request import Request
from sparsetile.jit.compiler import _may_compile
from sparsetile.reorder import Permutation
from sparsetile.tune import choose, choose_system, kept_timings
from tests.contracts.cases import csr_of, random_matrix
from tests.tune.paced import PacedSystem, registered

NAMES = ["fits", "large"]
PREDICTED = 1.0e-3
# Products of a millisecond whose choice saves as much as compiling another system's kernels takes.
ENOUGH = round(choose.COMPILE_SECONDS / (choose.CLOSE_SAVES * PREDICTED))


def request() -> Request:
    csr = csr_of(random_matrix(30, 20, 0.05))
    return Request(csr, 16, torch.float32, Permutation("identity", None))


@pytest.fixture
def asked(tmp_path, environment) -> Iterator[list[bool]]:
    """Whether kernels might be compiled, for each time that the second system was built: in vain,
    for want of memory."""
    found: list[bool] = []

    def full() -> None:
        found.append(_may_compile.get())
        raise torch.OutOfMemoryError("out of memory")

    environment(SPARSETILE_TUNE_DIR=tmp_path)
    kept_timings().clear()
    fits = PacedSystem("fits", PREDICTED, pace=3 * PREDICTED)
    with registered(fits, PacedSystem("large", 1.1 * PREDICTED, before=full)):
        yield found


@pytest.mark.parametrize(
    "tune, runs, compiles",
    [("measure", 1, True), ("model", ENOUGH - 1, False), ("model", ENOUGH + 1, True)],
)
def test_kernels_are_compiled_if_timing_is_asked_for_or_pays(asked, tune, runs, compiles):
    choose_system(request(), NAMES, tune, expected_runs=runs)
    assert asked == [compiles]


@pytest.mark.parametrize("tune, files", [("measure", 1), ("model", 0)])
def test_an_answer_without_a_system_that_did_not_fit_is_kept_if_it_was_asked_for(
    asked, tmp_path, tune, files
):
    def choose_again() -> choose.Choice:
        return choose_system(request(), NAMES, tune, expected_runs=ENOUGH)

    choose_again()
    found = list(tmp_path.iterdir())
    assert len(found) == files
    held = [path.read_bytes() for path in found]
    kept_timings().clear()
    for path, content in zip(found, held, strict=True):  # as in another process: files are there
        path.write_bytes(content)
    again = choose_again()
    assert len(asked) == 2 - files and again.measured == {"fits"}
    assert again.by == ("kept" if files else "model")

"""What timing a choice may cost, and which of its answers outlive the process."""

from __future__ import annotations

import pytest
import torch

from sparsetile.reorder import Permutation
from sparsetile.systems import Request
from sparsetile.tune import choose, choose_system, kept
from tests.contracts.cases import csr_of, random_matrix

PREDICTED = {"cpu": 1.0e-3, "dense": 1.1e-3}
# Products of a millisecond whose choice saves as much as compiling another system's kernels takes.
ENOUGH = round(choose.COMPILE_SECONDS / (choose.CLOSE_SAVES * PREDICTED["cpu"]))


def request() -> Request:
    csr = csr_of(random_matrix(30, 20, 0.05))
    return Request(csr, 16, torch.float32, Permutation("identity", None))


@pytest.fixture
def asked(monkeypatch, tmp_path) -> list[bool]:
    """Whether kernels might be compiled, for each time that ``cpu`` alone was timed."""
    found: list[bool] = []

    def times(wanted, names, predicted, budget, *, compiles):
        assert list(names) == ["cpu", "dense"]
        found.append(compiles)
        return {"cpu": 2.0e-3}, {}  # no memory for the other

    monkeypatch.setenv("SPARSETILE_TUNE_DIR", str(tmp_path))
    monkeypatch.setattr(kept, "_in_process", {})
    monkeypatch.setattr(choose, "close_calls", lambda *given: ["cpu", "dense"])
    monkeypatch.setattr(choose, "predict_systems", lambda wanted, able: dict(PREDICTED))
    monkeypatch.setattr(choose, "measure_systems", times)
    return found


@pytest.mark.parametrize(
    "tune, runs, compiles",
    [("measure", 1, True), ("model", ENOUGH - 1, False), ("model", ENOUGH + 1, True)],
)
def test_kernels_are_compiled_where_timing_is_asked_for_or_pays(asked, tune, runs, compiles):
    choose_system(request(), list(PREDICTED), tune, expected_runs=runs)
    assert asked == [compiles]


@pytest.mark.parametrize("tune, files", [("measure", 1), ("model", 0)])
def test_an_answer_without_a_system_that_did_not_fit_is_kept_where_it_was_asked_for(
    asked, tmp_path, tune, files
):
    choose_system(request(), list(PREDICTED), tune)
    assert len(list(tmp_path.iterdir())) == files
    kept._in_process.clear()  # as in another process
    again = choose_system(request(), list(PREDICTED), tune)
    assert len(asked) == 2 - files and again.measured == {"cpu"}
    assert again.by == ("kept" if files else "model")

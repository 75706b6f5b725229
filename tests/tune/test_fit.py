"""Equation 1 fitted on the machine at hand, kept, and asked for by ``voltrix``'s schedule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsetile.balance.cost_model import CostModel, Reading
from sparsetile.core.device import H200
from sparsetile.core.fitted import (
    clear_fitted,
    fitted_folder,
    keep_fitted,
    kept_fits,
    read_fitted,
)
from sparsetile.jit.source import device_tree_digest
from sparsetile.systems.voltrix.cost import ESTIMATE, SCHEDULE_COSTS, schedule_costs
from sparsetile.tune import fit

MODEL = CostModel(tile=4e-12, window=12e-12, fixed=9e-6)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, environment) -> None:
    environment(SPARSETILE_TUNE_DIR=tmp_path / "tuned")


def readings() -> list[Reading]:
    return fit.readings_of(lambda csr, name, n: MODEL.seconds(csr.nnz / 8, csr.shape[0] / 16, n))


def test_a_fit_finds_the_coefficients_that_made_the_times(constants):
    constants(fit, WINDOWS=(3, 7, 12))
    found = fit.fit_readings(readings())
    assert found.model.tile == pytest.approx(MODEL.tile)
    assert found.model.window == pytest.approx(MODEL.window)
    assert found.model.fixed == pytest.approx(MODEL.fixed)
    assert found.r2_fitted == pytest.approx(1.0) and found.r2_others == pytest.approx(1.0)
    assert len(found.readings) == 3 * len(fit.TILES) * len(fit.WIDTHS)


def test_without_a_gpu_there_is_one_error():
    with pytest.raises(
        ValueError, match="tune: --fit must be run on a machine with a GPU, got none"
    ):
        fit.fit_schedule(torch.device("cpu"))


def test_what_was_fitted_is_kept_by_gpu_and_asked_for(monkeypatch: pytest.MonkeyPatch, constants):
    constants(fit, WINDOWS=(3, 7, 12))
    asked: list[list[str]] = []

    def measure(request: Any, names: list[str], predicted: Any, budget: float) -> Any:
        asked.append(names)
        csr = request.csr
        return {"voltrix": MODEL.seconds(csr.nnz / 8, csr.shape[0] / 16, request.n)}, {}

    class Device:
        type = "cuda"

    monkeypatch.setattr(fit, "measure_systems", measure)
    monkeypatch.setattr(fit, "machine", lambda device: H200)
    monkeypatch.setattr(fit, "able_systems", lambda device: ["csr", "voltrix"])
    monkeypatch.setattr(fit, "Request", lambda csr, n, *rest: _Request(csr, n))
    monkeypatch.setattr(fit.CSR, "to", lambda self, device: self)
    assert schedule_costs(H200.name) == SCHEDULE_COSTS[H200.name]
    fit.fit_schedule(Device())  # type: ignore[arg-type]
    assert asked and all(names == ["voltrix"] for names in asked)
    found = schedule_costs(H200.name)
    assert found.window / found.tile == pytest.approx(3.0)
    assert [kept.gpu for kept in kept_fits()] == [H200.name]
    assert clear_fitted() == 1 and schedule_costs(H200.name) == SCHEDULE_COSTS[H200.name]


class _Request:
    def __init__(self, csr: Any, n: int) -> None:
        self.csr, self.n = csr, n


def test_of_other_kernels_gpus_or_forms_nothing_is_taken():
    shipped, digest = SCHEDULE_COSTS[H200.name], device_tree_digest()
    assert schedule_costs("another GPU") == ESTIMATE
    path = keep_fitted(H200.name, "older kernels", {"tile": 1.0, "window": 9.0}, 1.0, 1.0)
    assert schedule_costs(H200.name) == shipped
    keep_fitted(H200.name, digest, {"tile": 0.0, "window": 9.0}, 1.0, 1.0)
    assert schedule_costs(H200.name) == shipped
    keep_fitted(H200.name, digest, {"tile": 1.0, "window": 9.0}, 1.0, 1.0)
    assert schedule_costs(H200.name).window == 9.0
    good = json.loads(path.read_text())
    bad = [
        "{", "[]", "null", {**good, "schema": 9}, {**good, "coefficients": {"tile": -1.0}},
        {**good, "coefficients": 3}, {**good, "gpu": "another"}, {**good, "r2_others": "x"},
    ]  # fmt: skip
    for each in bad:
        path.write_text(each if isinstance(each, str) else json.dumps(each))
        assert read_fitted(H200.name) is None and schedule_costs(H200.name) == shipped
    assert fitted_folder().is_dir()


def test_shipped_coefficients_are_those_of_the_record():
    path = Path(__file__).parents[2] / "results" / "h200" / "voltrix_study.json"
    model = json.loads(path.read_text())["experiments"]["fit"]["model"]
    shipped = SCHEDULE_COSTS[H200.name]
    for name in ("tile", "window", "fixed"):
        assert getattr(shipped, name) == pytest.approx(model[name], rel=1e-3)

"""Cost models of a GPU that nobody measured: scaled constants, a fit of its own, what plans say."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import sparsetile as st
from sparsetile.core.device import H200, HOST, scaled_machine
from sparsetile.core.fitted import SystemModel, keep_fitted, read_fitted
from sparsetile.data.generators import from_spec
from sparsetile.engines.request import Request
from sparsetile.jit.source import device_tree_digest
from sparsetile.plan import planner
from sparsetile.plan.build import notes_on
from sparsetile.reorder import Permutation
from sparsetile.tune import Choice, fit_systems, predict_systems, source_of
from sparsetile.tune.fit_systems import MATRICES, SystemReading, fit_model
from tests.contracts.cases import csr_of, random_matrix

# What an A100's driver reports.
A100 = SimpleNamespace(
    name="NVIDIA A100-SXM4-40GB", multi_processor_count=108, clock_rate=1_410_000,
    memory_clock_rate=1_215_000, memory_bus_width=5120, L2_cache_size=40 * 2**20,
)  # fmt: skip
UNKNOWN = scaled_machine(A100, (8, 0))


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, environment) -> None:
    environment(SPARSETILE_TUNE_DIR=tmp_path / "tuned")


def request_on(ceilings: Any) -> Request:
    csr = csr_of(random_matrix(300, 200, 0.05))
    return Request(csr, 16, torch.float32, Permutation("identity", None), ceilings=ceilings)


def test_constants_are_scaled_by_what_the_driver_says():
    """An A100's copies reach 1.4 TB/s and its Tensor Cores 312 TFLOP/s in 16 bits, 156 in TF32."""
    assert UNKNOWN.scaled and not H200.scaled
    assert UNKNOWN.dram == pytest.approx(1.36e12, rel=0.01)
    assert UNKNOWN.l2_gather == pytest.approx(9.1e12 * 108 / 132 * 1.41 / 1.98)
    # The H200 reaches 79 % of its 989 / 2.
    assert UNKNOWN.dense_flops == pytest.approx(0.79 * 156e12, rel=0.1)
    assert UNKNOWN.tensor_flops_16 / UNKNOWN.dense_flops > H200.tensor_flops_16 / H200.dense_flops
    assert (UNKNOWN.shared_block, UNKNOWN.l2_bytes) == (163 * 1024, 40 * 2**20)


@pytest.mark.parametrize("name, share", [("NVIDIA L40S", 1.0), ("NVIDIA GeForce RTX 4090", 0.5)])
def test_a_geforce_gpu_has_half_of_the_tensor_cores_rate(name, share):
    facts = SimpleNamespace(name=name, multi_processor_count=142, clock_rate=2_520_000)
    found = scaled_machine(facts, (8, 9))
    whole = H200.dense_flops * 142 / 132 * 2.52 / 1.98 / 4
    assert found.dense_flops == pytest.approx(share * whole)


def test_where_constants_come_from():
    found = [source_of(each) for each in (H200, UNKNOWN, HOST)]
    assert found == ["shipped", "scaled", "shipped"]
    model = {"csr/4": SystemModel(2.0, 1e-6, 9, 0.9, 1.3)}
    keep_fitted(UNKNOWN.name, "other kernels", {}, 0.0, 0.0, model)
    assert source_of(UNKNOWN) == "scaled", "it was fitted to other kernels"
    keep_fitted(UNKNOWN.name, device_tree_digest(), {"tile": 1.0}, 0.0, 0.0)
    assert source_of(UNKNOWN) == "scaled", "only the schedule of voltrix was fitted"
    keep_fitted(UNKNOWN.name, device_tree_digest(), {}, 0.0, 0.0, model)
    assert (source_of(H200), source_of(UNKNOWN)) == ("shipped", "measured")


def test_predictions_follow_a_fit_of_the_gpu_and_of_no_other():
    before = predict_systems(request_on(UNKNOWN), ["csr", "dense"])
    model = {"csr/4": SystemModel(2.0, 1e-3, 9, 0.9, 1.3), "dense/2": SystemModel(9.0, 0, 9, 1, 1)}
    keep_fitted(UNKNOWN.name, device_tree_digest(), {}, 0.0, 0.0, model)
    after = predict_systems(request_on(UNKNOWN), ["csr", "dense"])
    assert after["csr"] == pytest.approx(1e-3 + 2 * before["csr"])
    assert after["dense"] == before["dense"], "fitted for elements of two bytes only"
    assert read_fitted(UNKNOWN.name).systems == model
    other = dataclasses.replace(UNKNOWN, name="another")
    assert predict_systems(request_on(other), ["csr"])["csr"] == before["csr"]


@pytest.mark.parametrize(
    "bad", [{"scale": -1.0}, {"scale": 0.0}, {"fixed": -1e-9}, {"worst": float("inf")}]
)
def test_a_model_that_cannot_be_is_no_model(bad):
    sound = SystemModel(2.0, 1e-6, 9, 0.9, 1.3)
    models = {"csr/4": dataclasses.replace(sound, **bad)}
    keep_fitted(UNKNOWN.name, device_tree_digest(), {}, 0.0, 0.0, models)
    assert read_fitted(UNKNOWN.name) is None and source_of(UNKNOWN) == "scaled"


def readings_of(model: Callable[[float], float], name: str = "csr/4") -> list[SystemReading]:
    predictions = [3e-6, 1e-5, 4e-5, 2e-4]
    return [SystemReading(name, each, model(each)) for each in predictions]


def test_a_fit_finds_start_and_scale():
    found = fit_model(readings_of(lambda p: 4e-6 + 1.7 * p))
    assert found.scale == pytest.approx(1.7) and found.fixed == pytest.approx(4e-6)
    assert found.r2 == pytest.approx(1.0) and found.worst == pytest.approx(1.0)
    assert found.products == 4


def test_a_fit_never_predicts_less_than_nothing():
    found = fit_model(readings_of(lambda p: 1.5 * p - 2e-6))
    assert found.fixed == 0.0 and found.scale > 0 and found.worst > 1.1


def test_a_system_that_was_hardly_timed_gets_the_typical_scale():
    readings = readings_of(lambda p: 2.0 * p) + readings_of(lambda p: 8.0 * p, "acc/4")
    readings += readings_of(lambda p: 100.0 * p, "rsh/2")[: fit_systems.FEWEST - 1]
    found = fit_systems.fit_systems(readings)
    assert found["csr/4"].scale == pytest.approx(2.0)
    assert found["rsh/2"].scale == pytest.approx(4.0) and found["rsh/2"].products == 0
    assert {name.partition("/")[0] for name in found} >= {"csr", "acc", "voltrix", "dense"}
    assert "cpu/4" not in found and fit_systems.fit_systems([]) == {}


def test_products_are_timed_until_the_time_is_up(monkeypatch):
    """Of systems that may be among the fastest, in both types and with TF32 allowed."""
    asked: list[tuple[int, torch.dtype, list[str]]] = []
    before = torch.backends.cuda.matmul.allow_tf32

    def measure(request: Any, names: list[str], predicted: Any, budget: float) -> Any:
        assert torch.backends.cuda.matmul.allow_tf32
        asked.append((request.n, request.dtype, names))
        return {names[0]: 2 * predicted[names[0]]}, {}

    monkeypatch.setattr(fit_systems, "measure_systems", measure)
    monkeypatch.setattr(fit_systems, "WORTH_TIMING", 1.0)
    ticks = itertools.count()
    matrices = [csr_of(random_matrix(60, 40, 0.2))] * 3
    found = fit_systems.model_readings(torch.device("cpu"), matrices, 7.5, lambda: next(ticks))
    assert len(found) == len(asked) == 8
    assert {n for n, _, _ in asked} == {32, 128, 512} and all(len(a[2]) == 1 for a in asked)
    assert {each.model.partition("/")[2] for each in found} == {"2", "4"}
    assert all(each.seconds == 2 * each.predicted for each in found)
    assert torch.backends.cuda.matmul.allow_tf32 == before


def test_the_generated_matrices_are_fixed():
    assert len(set(MATRICES)) == len(MATRICES) and all("seed=" in each for each in MATRICES)
    small = from_spec(MATRICES[2])
    assert torch.equal(small.indices, from_spec(MATRICES[2]).indices)


def test_a_plan_says_that_its_constants_were_scaled(monkeypatch):
    model, measured = Choice("csr", "model", {"csr": 1e-5}), Choice("csr", "measure")
    (note,) = notes_on(request_on(UNKNOWN), model)
    assert note == (
        "predicted with constants of another GPU, scaled to NVIDIA A100-SXM4-40GB: "
        "`sparsetile tune --fit` measures them"
    )
    assert notes_on(request_on(UNKNOWN), measured) == notes_on(request_on(H200), model) == []
    plan = st.plan(csr_of(random_matrix(30, 20, 0.2)), 4, expected_runs=10)
    assert plan.info["notes"] == []
    monkeypatch.setattr(planner, "notes_on", lambda *_: [note])
    plan = st.plan(csr_of(random_matrix(30, 20, 0.2)), 4, expected_runs=10)
    assert f"  note      {note}" in plan.explain()

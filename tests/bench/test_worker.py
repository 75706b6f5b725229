"""One worker, in process: operations, reductions, what it cannot do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparsetile.bench.worker import Worker
from sparsetile.data.registry import generate
from sparsetile.intake import write_npz


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("matrix") / "g.npz"
    write_npz(file, generate("random", rows=60, cols=90, nnz=700, seed=5))
    return str(file)


def _entry(path: str, **changes: Any) -> dict[str, Any]:
    return {
        "path": path, "system": "cpu", "kind": "system", "config": {}, "op": "spmm",
        "reduce": "sum", "weights": "asis", "dtype": "float32", "n": 5, "tf32": False, **changes,
    }  # fmt: skip


@pytest.mark.parametrize("weights", ["asis", "pattern", "random"])
@pytest.mark.parametrize(
    ("op", "shape"), [("spmm", (60, 90)), ("transpose", (90, 60)), ("sddmm", (60, 90))]
)
def test_every_operation_is_right(path: str, weights: str, op: str, shape: tuple[int, int]) -> None:
    found = Worker("cpu").measure(_entry(path, op=op, weights=weights))
    assert found["status"] == "ok", found
    assert (found["rows"], found["cols"]) == shape
    assert found["weighted"] == (weights == "random")
    assert found["floor_seconds"] is None and found["flops"] == 2 * 700 * 5


@pytest.mark.parametrize("reduce", ["mean", "max", "min"])
def test_every_reduction_is_right(path: str, reduce: str) -> None:
    assert Worker("cpu").measure(_entry(path, reduce=reduce))["status"] == "ok"


@pytest.mark.parametrize("system", ["auto", "dense"])
def test_other_systems_run_too(path: str, system: str) -> None:
    found = Worker("cpu").measure(_entry(path, system=system))
    assert found["status"] == "ok" and found["chosen"] in ("cpu", "dense")


def test_a_configuration_that_plan_does_not_know_is_skipped(path: str) -> None:
    found = Worker("cpu").measure(_entry(path, config={"ablation": "tma"}))
    assert found["status"] == "skipped"
    assert found["reason"] == "plan() does not take ablation yet"


def test_a_known_configuration_is_passed_on(path: str) -> None:
    found = Worker("cpu").measure(_entry(path, config={"reorder": "identity"}))
    assert found["status"] == "ok" and found["reorder"] == "identity"


def test_a_system_of_another_device_is_skipped_with_its_reason(path: str) -> None:
    found = Worker("cpu").measure(_entry(path, system="csr"))
    assert found["status"] == "skipped" and "runs on cuda" in found["reason"]


def test_a_baseline_that_lacks_the_type_is_skipped(path: str) -> None:
    found = Worker("cpu").measure(
        _entry(path, system="scipy", kind="baseline", dtype="float16")
    )  # fmt: skip
    assert found["reason"] == "knows float32 and float64 only"


def test_a_wrong_result_is_not_timed(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from sparsetile.bench import baselines

    def broken(self: Any, operands: Any) -> Any:
        return baselines.Prepared(lambda: torch.zeros(60, 5))

    monkeypatch.setattr(baselines.TorchCsr, "prepare", broken)
    found = Worker("cpu").measure(_entry(path, system="torch-csr", kind="baseline"))
    assert found["status"] == "wrong" and "samples" not in found
    assert "times the bound" in found["reason"]


def test_more_samples_need_a_measured_entry(path: str) -> None:
    worker = Worker("cpu")
    with pytest.raises(RuntimeError, match="again: an entry must be measured first"):
        worker.again()
    worker.measure(_entry(path, rounds=2))
    assert worker.again()["samples"]["method"] == "clock"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
@pytest.mark.parametrize("op", ["spmm", "transpose", "sddmm"])
@pytest.mark.parametrize("system", ["csr", "auto"])
def test_on_a_gpu_products_are_right_timed_by_graph_and_know_their_floor(
    path: str, op: str, system: str
) -> None:
    found = Worker("cuda").measure(_entry(path, system=system, op=op, cold=True))
    assert found["status"] == "ok", found
    assert found["samples"]["method"] == "graph" and found["cold"]["p50"] > 0
    if op != "sddmm":
        assert found["floor_seconds"] > 0 and found["explain"]

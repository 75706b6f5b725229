"""One worker, in process: operations, reductions, what it cannot do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparsetile.bench.worker import Worker
from sparsetile.core.device import capability
from sparsetile.data.generators import generate
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
    found = Worker("cpu").measure(_entry(path, config={"colour": "red"}))
    assert found["status"] == "skipped"
    assert found["reason"] == "plan() does not take colour yet"


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


def test_a_row_order_is_found_once_and_shared_with_its_time(path: str, tmp_path: Any) -> None:
    first, second = Worker("cpu"), Worker("cpu")
    entry = _entry(path, system="cpu", config={"reorder": "rcm"}, scratch=str(tmp_path))
    found = first.measure(entry)
    assert found["status"] == "ok" and found["reorder"] == "rcm"
    (file,) = tmp_path.iterdir()
    assert file.name.endswith("-rcm.pt")
    saved = torch.load(file, weights_only=True)
    assert sorted(saved["perm"].tolist()) == list(range(60))
    torch.save({**saved, "seconds": 123.0}, file)  # as if it had taken long
    again = second.measure(entry)
    assert again["status"] == "ok" and again["reorder"] == "rcm"
    assert again["planning"]["reorder"] == 123.0 and again["planning"]["total"] > 123.0
    assert "found_before" not in again["planning"]
    split = found["planning"]
    assert 0 < split["format"] + split["schedule"] <= split["build"] < split["total"]
    other = first.measure({**entry, "n": 9})
    assert other["planning"]["reorder"] == found["planning"]["reorder"]


def test_loading_reads_the_matrix_that_is_measured_next(path: str, calls_of) -> None:
    from sparsetile.bench import products

    worker = Worker("cpu")
    assert worker.load(path, "asis") == {"status": "ok"}
    read = calls_of(products, "read_matrix")
    assert worker.measure(_entry(path))["status"] == "ok" and not read


def test_a_floor_that_is_known_is_not_found_again(path: str, calls_of) -> None:
    worker = Worker("cpu")
    floors = calls_of(worker.bench, "floor")
    found = worker.measure(_entry(path, floor=[1e-5, "launch"]))
    assert (found["floor_seconds"], found["floor_term"]) == (1e-5, "launch") and not floors


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
@pytest.mark.parametrize("op", ["spmm", "transpose", "sddmm"])
@pytest.mark.parametrize("system", ["csr", "auto"])
def test_on_a_gpu_products_are_right_timed_by_graph_and_know_their_floor(
    path: str, op: str, system: str
) -> None:
    found = Worker("cuda").measure(_entry(path, system=system, op=op))
    assert found["status"] == "ok", found
    assert found["samples"]["method"] == "graph"
    if op != "sddmm":
        assert found["floor_seconds"] > 0


@pytest.mark.parametrize(("system", "kind"), [("cpu", "system"), ("torch-dense", "baseline")])
def test_the_layout_of_a_linear_layer_is_right_and_writes_into_rows_of_y(
    path: str, system: str, kind: str
) -> None:
    worker, linear = Worker("cpu"), {"layout": "linear"}
    entry = _entry(path, system=system, kind=kind, config=linear, weights="random", rounds=2)
    found = worker.measure(entry)
    assert found["status"] == "ok", found
    assert worker._last is not None
    operands, ready, _ = worker._last
    assert operands.B.T.is_contiguous() and operands.B.shape == (90, 5)
    assert ready.run().T.is_contiguous()


def test_a_layout_of_another_reduction_is_skipped_with_its_reason(path: str) -> None:
    found = Worker("cpu").measure(_entry(path, config={"layout": "linear"}, reduce="max"))
    assert found["status"] == "skipped"
    assert found["reason"] == "layout linear is for sums of the plain product"


@pytest.mark.parametrize("layout", ["rows", "linear"])
def test_the_dense_product_in_fp8_is_right_and_leaves_in_bfloat16(
    tmp_path: Any, layout: str
) -> None:
    file = tmp_path / "w.npz"
    write_npz(file, generate("random", rows=64, cols=96, nnz=700, seed=5))
    found = Worker("cpu").measure(
        _entry(
            str(file), system="torch-dense", kind="baseline", dtype="float8_e4m3fn", n=16,
            weights="random", config={"layout": layout},
        )
    )  # fmt: skip
    assert found["status"] == "ok", found
    assert found["traffic_bytes"] == 4 * 65 + 5 * 700 + 16 * (2 * 64 + 96)


def test_systems_and_baselines_that_do_not_take_fp8_say_so(path: str) -> None:
    fp8 = {"dtype": "float8_e4m3fn", "weights": "random"}
    found = Worker("cpu").measure(_entry(path, **fp8))
    assert found["status"] == "skipped" and "not float8_e4m3fn" in found["reason"]
    found = Worker("cpu").measure(_entry(path, system="torch-csr", kind="baseline", **fp8))
    assert found["reason"] == "does not take float8_e4m3fn"


def test_a_baseline_that_takes_too_long_once_is_not_timed(path: str) -> None:
    entry = _entry(path, system="torch-csr", kind="baseline", slowest=1e-9)
    found = Worker("cpu").measure(entry)
    assert found["status"] == "skipped" and "samples" not in found
    assert found["reason"].startswith("one product takes ")
    assert found["reason"].endswith(" s, over 1e-09 s") and found["error"]["worst"] <= 1
    assert Worker("cpu").measure({**entry, "slowest": 60.0})["status"] == "ok"


def test_a_step_that_the_system_does_not_have_is_skipped(path: str) -> None:
    found = Worker("cpu").measure(_entry(path, config={"ablation": "warp9"}))
    assert (found["status"], found["reason"]) == ("skipped", "cpu has no warp9 yet")


def test_a_baseline_that_is_not_implemented_for_a_product_is_skipped(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparsetile.bench import baselines

    def refuse() -> None:
        raise NotImplementedError("not implemented for 'BFloat16'")

    monkeypatch.setattr(
        baselines.TorchCsr, "prepare", lambda self, operands: baselines.Prepared(refuse)
    )
    found = Worker("cpu").measure(_entry(path, system="torch-csr", kind="baseline"))
    assert (found["status"], found["reason"]) == ("skipped", "not implemented for 'BFloat16'")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
@pytest.mark.parametrize("layout", ["rows", "linear"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("n", [128, 4096])
def test_on_a_gpu_pruned_weights_are_right_in_both_types_and_layouts(
    tmp_path: Any, n: int, dtype: str, layout: str
) -> None:
    if capability(0) != (9, 0):
        pytest.skip("bcsr needs a Hopper GPU")
    file = tmp_path / "w.npz"
    weights = {"out_features": 1024, "in_features": 512, "sparsity": 0.8, "block": 64}
    write_npz(file, generate("pruned_weights", **weights))
    entry = _entry(
        str(file), system="bcsr", dtype=dtype, n=n, weights="random", config={"layout": layout}
    )
    worker = Worker("cuda")
    for system, kind in (("bcsr", "system"), ("torch-dense", "baseline")):
        found = worker.measure({**entry, "system": system, "kind": kind})
        assert found["status"] == "ok", found
        assert found["samples"]["method"] == "graph" and found["error"]["worst"] <= 1

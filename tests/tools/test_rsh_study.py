"""The study of RSH-SpMM: what is counted is right, what is asked for is checked, what is written.

Kernels do not run here: products of ``cpu`` stand in for those of the GPU's systems, so that every
experiment is run to its end.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tools.rsh_study import EXPERIMENTS, TAUS, gcn_adjacency, main
from tools.study import WRONG, Case

from sparsetile.data.generators import power_law, random
from sparsetile.formats import BitTCF
from sparsetile.intake import CSR, write_npz
from sparsetile.plan.plan import Plan
from sparsetile.plan.planner import build_plan
from sparsetile.plan.variant import Variant
from sparsetile.reorder import REORDERERS
from tools import rsh_study as module
from tools import study


@pytest.fixture(scope="module")
def graph() -> CSR:
    return power_law(rows=300, nnz=2400, seed=3)


@pytest.fixture
def folder(tmp_path: Path, graph: CSR) -> Path:
    write_npz(tmp_path / "DD.npz", graph)
    write_npz(tmp_path / "mine.npz", random(rows=40, cols=60, density=0.1, seed=1))
    return tmp_path


@pytest.fixture
def host_as_gpu(monkeypatch: pytest.MonkeyPatch, torch_cuda) -> None:
    """Let products of ``cpu`` stand in for the GPU's."""

    def planned(A: CSR, n: int, **options: Any) -> Plan:
        options.pop("ablation", None)
        return build_plan(A, n, **{**options, "system": "cpu"})

    def of_built(csr: CSR, n: int, dtype: torch.dtype, *_: Any, **__: Any) -> Variant:
        return build_plan(csr, n, dtype=dtype, system="cpu")._variant

    monkeypatch.setattr(module, "build_plan", planned)
    monkeypatch.setattr(study, "build_plan", planned)
    monkeypatch.setattr(study, "Variant", of_built)
    monkeypatch.setattr(Case, "has_gpu", True)
    torch_cuda(synchronize=None)


def run(folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Run the study; its exit code and its record."""
    out = folder / "record.json"
    code = main(["--data", str(folder), "--out", str(out), "--commit", "abc", *arguments])
    return code, json.loads(out.read_text()) if out.exists() else {}


def dense_of(csr: CSR) -> torch.Tensor:
    values = torch.ones(csr.nnz) if csr.values is None else csr.values
    return torch.zeros(csr.shape).index_put((csr.row_ids(), csr.indices.long()), values)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "speed"], "rsh_study: --only must be one of ['thresholds', "),
        (["--order", "spiral"], "rsh_study: --order must be one of ['identity', "),
        (["--time-limit", "0"], "rsh_study: --time-limit must be seconds above 0, got 0.0"),
        (["--matrices", "absent"], "load: matrix must be a file, a gen: spec, a stand-in or a"),
        (["--matrices", ","], "rsh_study: --matrices must be at least one matrix of the data"),
    ],
)
def test_bad_usage_is_refused_with_the_reason(folder, capsys, arguments, message):
    code, record = run(folder, *arguments)
    assert code == 2 and not record
    assert message in capsys.readouterr().err


def test_a_folder_is_no_record(folder, capsys):
    assert main(["--data", str(folder), "--out", str(folder)]) == 2
    assert "rsh_study: --out must be a file, got the folder" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_without_a_gpu_the_record_holds_what_can_be_counted(folder):
    code, record = run(folder)
    assert code == 0
    assert record["commit"] == "abc" and record["gpu"] is None
    assert list(record["matrices"]) == ["DD"]  # of the defaults, the one that the folder has
    assert list(record["experiments"]) == [name for name in EXPERIMENTS if name != "core"]
    assert record["not_run"] == [["DD", "planning", "no GPU"], ["DD", "gcn", "no GPU"]]
    sweep = record["experiments"]["thresholds"]["DD"]
    assert [step["tau_nnz"] for step in sweep["steps"]] == list(TAUS)
    assert all(step["time"] is None for step in sweep["steps"])
    assert sweep["mixed"]["split"] is None


def test_only_what_is_asked_for_runs_and_rectangles_too(folder):
    code, record = run(folder, "--only", "bytes,orders", "--matrices", "mine")
    assert code == 0
    assert list(record["experiments"]) == ["bytes", "orders"]
    assert record["matrices"]["mine"]["columns"] == 60


def test_at_the_time_limit_the_rest_is_named(folder):
    _, record = run(folder, "--time-limit", "1e-9", "--only", "bytes")
    assert record["not_run"] == [["DD", "bytes", "time limit"]]
    assert record["experiments"] == {"bytes": {}}


def test_a_failed_experiment_is_recorded_and_the_others_run(folder, monkeypatch):
    def failing(case: Case) -> dict[str, Any]:
        raise RuntimeError("out of\nmemory")

    monkeypatch.setitem(EXPERIMENTS, "orders", failing)
    code, record = run(folder, "--only", "orders,bytes")
    assert code == 1
    assert record["failed"] == [["DD", "orders", "RuntimeError: out of memory"]]
    assert record["experiments"]["bytes"]["DD"]


def test_a_higher_threshold_leaves_fewer_entries_in_windows(graph):
    found = module.thresholds(Case("graph", graph, torch.device("cpu")))
    steps = found["steps"]
    assert steps[0]["entry_share"] == 1.0
    assert steps[-1]["entry_share"] < steps[0]["entry_share"]
    assert steps[-1]["row_share"] < 1.0


@pytest.mark.parametrize("order", ["identity", "locality"])
def test_orders_count_the_tiles_of_all_rows(graph, order):
    found = module.orders(Case("graph", graph, torch.device("cpu")))[order]
    perm = REORDERERS[order](graph).perm
    assert int(graph.row_lengths().min()) > 0  # so that windows follow each other
    tiles = BitTCF.pack(graph, perm, stack=2)
    assert found["16_rows"]["tiles"] == tiles.tile_count
    assert found["16_rows"]["nonzeros_per_tile"] == tiles.mean_tile_entries
    assert (found["seconds"] > 0) == (order != "identity")


def test_bytes_are_those_of_the_arrays(graph):
    found = module.index_bytes(Case("graph", graph, torch.device("cpu")))
    assert found["BitTCF"] == BitTCF.pack(graph).bytes < found["BitTCF and schedule"]
    assert found["CSR"] == 4 * (graph.shape[0] + 1 + graph.nnz)
    case = Case("graph", graph, torch.device("cpu"))
    built = module.RSHSystem().build(case.request(ablation="mixed"))
    assert found["fragments"] == built.tensors["tile_columns"].numel() // 8 * 16 * 8 * 2
    assert found["RS-Tile, 8 rows, thresholds"] > 0 and found["RS-Tile, 16 rows, cost"] > 0


def test_parts_share_all_rows_and_entries(graph):
    found = module.parts(Case("graph", graph, torch.device("cpu"), "rcm"))
    for share in ("row_share", "entry_share"):
        assert found["windows"][share] + found["residual"][share] == pytest.approx(1.0)


def test_a_part_alone_has_no_items_of_the_other(graph):
    case = Case("graph", graph, torch.device("cpu"))
    built = module.RSHSystem().build(case.request(ablation="mixed"))
    whole = module.RSHSystem().make_runner(_meta(built))
    rows = module.RSHSystem().make_runner(_meta(module._with(built, module._NO_WINDOWS)))
    windows = module.RSHSystem().make_runner(_meta(module._with(built, module._NO_ROWS)))
    assert (rows._items, rows._rest) == (0, whole._rest)
    assert (windows._items, windows._rest.items) == (whole._items, 0)


def _meta(built: Any) -> dict[str, Any]:
    return json.loads(built.recipe.partition(":")[2])


def test_the_adjacency_of_a_gcn_is_normalised_with_self_loops(graph):
    P = (dense_of(graph) != 0).double()
    P.fill_diagonal_(1.0)
    scale = P.sum(1).rsqrt()
    found = gcn_adjacency(graph)
    torch.testing.assert_close(
        dense_of(found).double(), scale[:, None] * P * scale, rtol=1e-6, atol=0
    )


@pytest.mark.usefixtures("host_as_gpu")
def test_products_are_timed_checked_and_compared(graph):
    case = Case("graph", graph, torch.device("cpu"))
    swept = module.thresholds(case)
    assert all(step["time"]["p50"] > 0 for step in swept["steps"])
    assert all(step["error"] < WRONG for step in swept["steps"])
    assert module.orders(case)["locality-mst"]["default"]["error"] < WRONG
    assert module.parts(case)["whole"]["time"]["p50"] > 0
    planned = module.planning(case)
    assert {"csr", "rsh", "rsh mixed", "rsh, locality"} <= set(planned)
    assert {"intake", "reorder", "build"} <= set(planned["rsh"]["stages"])
    assert planned["rsh, locality"]["stages"]["reorder"] > 0 and "break_even" in planned["rsh"]
    assert not case.wrong


@pytest.mark.usefixtures("host_as_gpu")
def test_a_wrong_product_is_named(graph):
    case = Case("graph", graph, torch.device("cpu"))
    B, expected = case.operands(module.N, module.DTYPE)
    case._operands[module.N, module.DTYPE] = B, expected + 9
    case.product("rsh", ablation="tiles")
    assert len(case.wrong) == 1
    assert case.wrong[0].startswith("graph: rsh tiles, identity, N=128, float16: 0.")


@pytest.mark.usefixtures("host_as_gpu")
def test_a_gcn_runs_with_each_system(graph, monkeypatch):
    monkeypatch.setattr(module, "HIDDEN", (8, 16))
    monkeypatch.setattr(module, "FEATURES", 24)
    found = module.gcn(Case("graph", graph, torch.device("cpu")))
    for hidden in module.HIDDEN:
        for system in module.GCN_SYSTEMS:
            one = found[f"{hidden} float32 {system}"]
            assert one["graph"]["p50"] > 0 and one["error"] < 1e-4


@pytest.mark.usefixtures("host_as_gpu")
def test_a_rectangle_has_no_gcn():
    case = Case("mine", random(rows=4, cols=6, density=0.5, seed=1), torch.device("cpu"))
    assert module.gcn(case) == {"skipped": "not square"}

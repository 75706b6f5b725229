"""The study of BRP-SpMM: what is counted is right, and what is written.

Kernels do not run here: products of ``cpu`` stand in for those of the GPU's systems.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tools.brp_study import BUILDS, EXPERIMENTS, WIDTHS, main

from sparsetile.core.device import H200
from sparsetile.data.generators import power_law
from sparsetile.engines.request import Request
from sparsetile.formats.brp import sort_windows
from sparsetile.formats.brp_windows import BRPWindows
from sparsetile.intake import CSR, write_npz
from sparsetile.plan.plan import Plan
from sparsetile.plan.planner import build_plan
from sparsetile.systems.base import System
from sparsetile.systems.brp.cost import CHOICES
from tools import brp_study, study


@pytest.fixture(scope="module")
def graph() -> CSR:
    return power_law(rows=300, nnz=4800, seed=3)


def all_windows(graph: CSR, fixed: int, group: int) -> BRPWindows:
    kept = torch.ones(-(-graph.shape[0] // 16), dtype=torch.bool)
    return BRPWindows.pack(graph, None, sort_windows(graph), fixed, group, kept)


@pytest.fixture
def folder(tmp_path: Path, graph: CSR) -> Path:
    write_npz(tmp_path / "DD.npz", graph)
    return tmp_path


@pytest.fixture
def host_as_gpu(monkeypatch: pytest.MonkeyPatch, constants, torch_cuda) -> None:
    """Let products of ``cpu`` stand in for the GPU's, and build as for an H200."""

    def planned(A: CSR, n: int, **options: Any) -> Plan:
        options.pop("ablation", None)
        return build_plan(A, n, **{**options, "system": "cpu"})

    def request(case: study.Case, n: int, dtype: torch.dtype, ablation: str | None) -> Request:
        permutation = study.Permutation(case.order, case.perm(case.order))
        return Request(case.csr, n, dtype, permutation, ablation=ablation, ceilings=H200)

    monkeypatch.setattr(study, "build_plan", planned)
    monkeypatch.setattr(study.Case, "has_gpu", True)
    monkeypatch.setattr(study.Case, "request", request)
    torch_cuda(synchronize=None)
    monkeypatch.setattr(System, "reasons", lambda *_: [])
    times = {"one": {"p50": 4.0}, "two": {"p50": 2.0}}
    monkeypatch.setattr(brp_study, "cusparse_times", lambda *_: times)
    constants(brp_study, NEED_GPU=())


def run(folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Run the study; its exit code and its record."""
    out = folder / "record.json"
    code = main(["--data", str(folder), "--out", str(out), "--commit", "abc", *arguments])
    return code, json.loads(out.read_text()) if out.exists() else {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "speed"], "brp_study: --only must be one of ['products', "),
        (["--order", "spiral"], "brp_study: --order must be one of ['identity', "),
        (["--time-limit", "0"], "brp_study: --time-limit must be seconds above 0, got 0.0"),
        (["--matrices", ","], "brp_study: --matrices must be at least one matrix of the data"),
    ],
)
def test_bad_usage_is_refused_with_the_reason(folder, capsys, arguments, message):
    code, record = run(folder, *arguments)
    assert code == 2 and not record
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_without_a_gpu_the_record_holds_what_can_be_counted(folder, graph):
    code, record = run(folder, "--only", "products,shares,bytes,builds")
    assert code == 0 and record["commit"] == "abc"
    assert record["not_run"] == [["DD", "products", "no GPU"], ["DD", "builds", "no GPU"]]
    shares = record["experiments"]["shares"]["DD"]
    assert list(shares) == [f"{f}x{g}" for f, g in CHOICES]
    for f, g in ((1, 4), (2, 2)):
        packed = all_windows(graph, f, g)
        assert shares[f"{f}x{g}"] == pytest.approx(packed.slot_entries.numel() / graph.nnz)
    found = record["experiments"]["bytes"]["DD"]
    assert list(found) == ["1x4", "2x4", "4x4", "8x4"]
    packed = all_windows(graph, 2, 4)
    groups, slots = packed.tile_count // 4, packed.slot_ids.numel()
    rest = graph.row_ids()[packed.rest_entries.long()]
    lists = 2 * rest.unique().numel() + 1 + rest.numel()
    assert 4 * groups + slots + 4 * (32 * groups + lists) == pytest.approx(4 * 5101 * found["2x4"])


@pytest.mark.usefixtures("host_as_gpu")
def test_products_and_builds_are_timed(folder):
    code, record = run(folder, "--only", "products,builds")
    assert code == 0 and not record["failed"]
    found = record["experiments"]["products"]["DD"]
    assert list(found) == [str(n) for n in WIDTHS]
    assert {f"brp {f}x{g}" for f, g in CHOICES} < set(found["32"])
    labels = {"csr", "rsh", "brp", "brp 1x4", "brp direct", "brp atomic"}
    assert set(found["64"]) == {"cusparse", *labels}
    assert all(found["64"][label]["error"] < 0.01 for label in labels)
    builds = record["experiments"]["builds"]["DD"]
    assert set(builds) == set(BUILDS)
    for stages in builds.values():
        parts = sum(seconds for stage, seconds in stages.items() if stage != "total")
        assert parts == pytest.approx(stages["total"], rel=0.5)


def test_every_experiment_has_a_line_in_the_tool_s_text():
    text = brp_study.__doc__ or ""
    assert all(f"\n    {name} " in text for name in EXPERIMENTS)

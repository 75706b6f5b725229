"""tools.gnn_layers: the order of its measurements, and a record that a second run completes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools import gnn_layers

pytest.importorskip("torch_geometric")
GRAPH = "gen:power_law?rows=40&nnz=200&seed=1"


@pytest.fixture
def quick(constants) -> None:
    constants(gnn_layers, SECONDS=0.0, WARM=1)


def run(out: Path, *more: str) -> tuple[int, list[dict[str, Any]]]:
    words = ["--data", str(out), "--out", str(out / "made"), "--graphs", GRAPH, "--device", "cpu"]
    code = gnn_layers.main([*words, "--hidden", "16", "--dtype", "float32", *more])
    lines = (out / "made" / "gnn_layers.jsonl").read_text().splitlines()
    return code, [json.loads(line) for line in lines]


def test_all_paths_of_a_cell_are_measured_and_their_losses_agree(quick, tmp_path: Path) -> None:
    code, (first, cell) = run(tmp_path, "--layers", "gcn")
    assert code == 0 and first["schema"] == 1 and "device" in first["environment"]
    assert set(cell["paths"]) == {name for group in gnn_layers.PATHS for name in group}
    assert all(each["ms"] > 0 for each in cell["paths"].values())
    assert cell["apart"] <= gnn_layers.APART
    assert cell["ratios"]["ours"] == pytest.approx(
        min(cell["paths"][name]["ms"] for name in ("pyg", "pyg csr")) / cell["paths"]["ours"]["ms"],
        abs=1e-3,
    )


def test_a_second_run_measures_what_the_first_left_and_nothing_again(quick, tmp_path: Path) -> None:
    _, (_, before) = run(tmp_path, "--layers", "gcn", "--paths", "pyg,ours")
    assert set(before["paths"]) == {"pyg", "ours"}
    _, (_, after, other) = run(tmp_path, "--layers", "gcn,sage max", "--paths", "pyg,ours,patch")
    assert {name: after["paths"][name] for name in before["paths"]} == before["paths"]
    assert set(after["paths"]) == set(other["paths"]) == {"pyg", "ours", "patch"}
    assert "patch" in after["ratios"]


def test_nothing_begins_when_the_time_is_over(quick, tmp_path: Path, capsys) -> None:
    code, lines = run(tmp_path, "--time-limit", "0")
    assert code == 0 and len(lines) == 1
    assert "10 measurements not begun" in capsys.readouterr().err


def test_a_failure_of_ours_is_the_exit_code(quick, tmp_path: Path, monkeypatch, capsys) -> None:
    def fail(*rest: Any) -> None:
        raise TypeError("no")

    monkeypatch.setattr(gnn_layers, "_path", fail)
    code, _ = run(tmp_path, "--layers", "gcn", "--paths", "ours")
    assert code == 1
    assert "failed: ['TypeError: no']" in capsys.readouterr().err


def test_the_most_telling_measurements_come_first() -> None:
    words = {"graphs": "a,b", "layers": "gcn", "hidden": "64,256", "dtype": "float32,bfloat16"}
    every = ",".join(name for group in gnn_layers.PATHS for name in group)
    asked = gnn_layers.argparse.Namespace(**words, paths=every, new=False)
    order = [
        (name, width, dtype, group[-1]) for name, _, width, dtype, group in gnn_layers._order(asked)
    ]
    assert order[:4] == [
        ("a", 64, "float32", "ours"), ("b", 64, "float32", "ours"),
        ("a", 64, "float32", "pyg captured"), ("b", 64, "float32", "pyg captured"),
    ]  # fmt: skip
    assert len(order) == len(set(order)) == 2 * 2 * 2 * 2


def test_each_step_may_have_a_graph_of_its_own(quick, tmp_path: Path, monkeypatch) -> None:
    seen: list[int] = []
    forward = gnn_layers._Net.forward

    def noted(net: Any, x: Any, graph: Any) -> Any:
        seen.append(id(graph))
        kept.append(graph)
        return forward(net, x, graph)

    kept: list[Any] = []
    monkeypatch.setattr(gnn_layers._Net, "forward", noted)
    words = ["--data", str(tmp_path), "--out", str(tmp_path), "--graphs", GRAPH, "--device", "cpu"]
    code = gnn_layers.main(
        [*words, "--hidden", "16", "--dtype", "float32", "--layers", "gcn", "--new"]
    )
    _, line = (tmp_path / "gnn_fresh.jsonl").read_text().splitlines()
    cell = json.loads(line)
    assert code == 0 and set(cell["paths"]) == {"pyg", "pyg csr", "ours", "patch"}
    assert cell["apart"] <= gnn_layers.APART and len(seen) == len(set(seen)) > 8


def test_processes_that_compile_step_through_cells_and_record_nothing(
    quick, tmp_path: Path, monkeypatch
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(gnn_layers, "run_within", lambda given, *rest: commands.append(given))
    _, (_, cell) = run(tmp_path, "--layers", "gcn", "--paths", "ours", "--prepare", "9")
    assert set(cell["paths"]) == {"ours"} and len(commands) == 1
    words = commands[0][commands[0].index("tools.gnn_layers") + 1 :]
    words[words.index("--out") + 1] = str(tmp_path / "none")
    stepped: list[str] = []
    monkeypatch.setattr(
        gnn_layers, "_step_only", lambda step, device: stepped.append(f"{float(step()):.1f}") or {}
    )
    assert gnn_layers.main(words) == 0
    assert len(stepped) == 1 and not (tmp_path / "none").exists()

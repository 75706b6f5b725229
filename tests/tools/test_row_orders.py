"""tools.row_orders: orders of small matrices on the CPU, their record and their table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsetile.intake.files import write_npz
from sparsetile.reorder import REORDERERS, Permutation
from tests.contracts.cases import csr_of, random_matrix
from tools import row_orders

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def quick(constants) -> None:
    constants(row_orders, GENERATED=((500, 10),), REPEATS=1, PRODUCTS=((4, torch.float32),))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, rows in (("one", 90), ("two", 60)):
        write_npz(tmp_path / f"{name}.npz", csr_of(random_matrix(rows, 40, 0.2)))
    (tmp_path / "CORE.txt").write_text("two\none\n")
    return tmp_path


def run(folder: Path, *more: str) -> tuple[int, list[dict[str, Any]]]:
    code = row_orders.main(
        ["--data", str(folder), "--out", str(folder / "out"), "--device", "cpu", *more]
    )
    lines = (folder / "out" / "orders.jsonl").read_text().splitlines()
    return code, [json.loads(line) for line in lines]


def test_every_order_of_every_matrix_has_a_line(folder: Path, capsys):
    code, (about, *lines) = run(folder)
    assert code == 0 and "environment" in about and lines.pop() == {"not_run": []}
    chosen = [line for line in lines if line["order"] == "auto"]
    assert [line["matrix"] for line in chosen] == ["two", "one"]
    for line in chosen:
        (product,) = line["products"]
        assert product["order"] == "identity" and product["error"] == 0
        assert product["plan_seconds"] > 0 and product["seconds"] > 0
    lines = [line for line in lines if line["order"] != "auto"]
    assert [(line["matrix"], line["order"]) for line in lines] == [
        (matrix, order)
        for matrix in ("mixed_band-500x10", "two", "one")
        for order in row_orders.ORDERS
    ]
    for line in lines:
        assert set(line["entries_per_pair"]) == {"16", "64"} and line["predict_seconds"] > 0
        assert (line["seconds"] > 0) == (line["order"] != "identity")
        assert len(line["products"]) == (0 if line["matrix"].startswith("mixed") else 1)
        for product in line["products"]:
            assert product["seconds"] > 0 and product["error"] < row_orders.WRONG
    assert "mixed_band-500x10" in capsys.readouterr().out


def test_named_matrices_alone_are_measured(folder: Path):
    assert {line.get("matrix") for line in run(folder, "--matrices", "one")[1][1:-1]} == {
        "one", "mixed_band-500x10",
    }  # fmt: skip


def test_what_does_not_fit_the_time_is_named(folder: Path, capsys):
    code, lines = run(folder, "--time-limit", "0")
    assert code == 0 and lines[1:] == [{"not_run": ["mixed_band-500x10", "two", "one"]}]
    assert "no time for mixed_band-500x10, two, one" in capsys.readouterr().err


def test_a_wrong_product_is_a_failure(folder: Path, monkeypatch: pytest.MonkeyPatch):
    build = row_orders.build_plan

    def other(csr: Any, *given: Any, reorder: Any = "identity", **options: Any) -> Any:
        plan = build(csr, *given, reorder=reorder, **options)
        if reorder != "identity":
            monkeypatch.setattr(type(plan), "run", lambda self, B: B.new_zeros(csr.shape[0], 4))
        return plan

    monkeypatch.setattr(row_orders, "build_plan", other)
    assert run(folder, "--matrices", "one")[0] == 1


def test_an_order_pays_after_what_it_cost_over_what_it_saves(monkeypatch: pytest.MonkeyPatch):
    seconds = iter([1e-3, 4e-4, 2e-3])
    monkeypatch.setattr(
        row_orders, "time_product", lambda *_, **__: type("S", (), {"median": next(seconds)})
    )
    monkeypatch.setitem(REORDERERS, "lsh", lambda csr: Permutation("lsh", torch.arange(90)))
    case = row_orders.Measured("one", csr_of(random_matrix(90, 40, 0.2)))
    given, faster, slower = (case.line(order, True) for order in ("identity", "lsh", "merging"))
    assert given["products"][0]["break_even"] is None
    assert slower["products"][0]["break_even"] is None
    assert faster["products"][0]["break_even"] == -(-faster["seconds"] // 6e-4)


def test_rows_of_the_generated_matrix_resemble_others_far_away():
    csr = row_orders.mixed_band(4000, 20, CPU)
    assert csr.indices.view(4000, 20).diff(dim=1).gt(0).all()
    assert csr.nnz == 80_000 and int(csr.indices.max()) < csr.shape[1]
    given, merged = (
        csr.nnz / row_orders.distinct_pairs(csr, 16, perm)
        for perm in (None, REORDERERS["merging"](csr).perm)
    )
    assert merged > 2 * given


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_is_asked_for_by_default(folder: Path, capsys):
    with pytest.raises(SystemExit):
        row_orders.main(["--data", str(folder), "--out", str(folder)])
    assert "--device cuda needs a GPU" in capsys.readouterr().err


def test_a_folder_without_the_suite_needs_names(tmp_path: Path, capsys):
    with pytest.raises(SystemExit):
        row_orders.main(["--data", str(tmp_path), "--out", str(tmp_path), "--device", "cpu"])
    assert "--data must be a folder with CORE.txt" in capsys.readouterr().err

"""``sparsetile inspect``: measures of a matrix, and its picture."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sparsetile.cli.profile import profile
from sparsetile.data.generators import random
from sparsetile.intake import as_csr
from sparsetile.reorder import REORDERERS
from tests.cli.conftest import Cli, assert_refused

PNG = b"\x89PNG\r\n\x1a\n"


def test_the_measures_of_a_band_are_known(cli: Cli):
    outcome = cli("inspect", "gen:banded?rows=64&bandwidth=2", "--json")
    found = outcome.json
    assert outcome.code == 0 and outcome.err == ""
    assert found["shape"] == [64, 64] and found["nnz"] == 64 * 5 - 6
    assert found["density"] == pytest.approx((64 * 5 - 6) / 64**2)
    assert found["values"] == "pattern" and found["empty_rows"] == found["empty_columns"] == 0
    assert found["row_lengths"]["min"] == 3 and found["row_lengths"]["max"] == 5
    assert found["symmetric_pattern"] is True
    assert found["bandwidth"] == {"lower": 2, "upper": 2}
    # A window of 64 rows holds all of it: each of 64 columns once.
    assert found["windows"][-1]["window"] == 64 and found["windows"][-1]["pairs"] == 64
    assert [item["window"] for item in found["windows"]] == [4, 8, 16, 64]
    assert found["histogram"] == [
        {"from": 2, "to": 3, "rows": 2},
        {"from": 4, "to": 7, "rows": 62},
    ]


def test_the_table_says_the_same_in_words(cli: Cli, folder: Path):
    outcome = cli("inspect", "weighted", "--data", folder)
    assert outcome.code == 0 and outcome.err == ""
    for text in ("60 x 50", "400", "float32", "symmetric pattern", "64 rows", "row length"):
        assert text in outcome.out


def test_empty_rows_and_columns_are_counted():
    csr = as_csr(torch.tensor([[0, 1, 0], [0, 0, 0], [0, 1, 1.0]]).to_sparse_csr())
    found = profile(csr)
    assert (found["empty_rows"], found["empty_columns"]) == (1, 1)
    assert found["symmetric_pattern"] is False
    assert found["bandwidth"] == {"lower": 1, "upper": 1}


def test_equal_row_and_column_counts_alone_do_not_make_a_pattern_symmetric():
    cycle = torch.zeros(3, 3)
    cycle[0, 1] = cycle[1, 2] = cycle[2, 0] = 1.0
    assert profile(as_csr(cycle.to_sparse_csr()))["symmetric_pattern"] is False


def test_a_wide_matrix_is_not_symmetric_and_an_empty_one_has_no_bins():
    assert profile(random(3, 9, nnz=5))["symmetric_pattern"] is False
    found = profile(random(0, 0, nnz=0))
    assert found["histogram"] == [] and found["density"] == 0.0


@pytest.mark.parametrize(
    "matrix", ["weighted", "gen:random?rows=0&cols=0&nnz=0", "gen:random?rows=3&cols=900&nnz=80"]
)
def test_the_picture_is_a_png_and_leaves_stdout_to_the_table(cli, folder, tmp_path, matrix):
    file = tmp_path / "picture.png"
    outcome = cli("inspect", matrix, "--data", folder, "--png", file, "--json")
    assert outcome.code == 0
    assert file.read_bytes().startswith(PNG) and file.stat().st_size > 10_000
    assert outcome.json["matrix"] == matrix
    assert outcome.err == f"sparsetile: drew {file}\n"


def test_a_picture_is_refused_before_any_work(cli: Cli, tmp_path: Path):
    assert_refused(
        cli("inspect", "nowhere", "--png", "picture.txt"),
        "inspect: --png must be a file named .png or .pdf or .svg, got 'picture.txt'.",
    )
    assert_refused(
        cli("inspect", "nowhere", "--png", tmp_path / "no" / "p.png"),
        "inspect: --png must be a file in a folder that exists",
    )


def test_the_figures_of_chosen_orders_are_printed_without_a_page(cli: Cli):
    found = cli("inspect", "gen:banded?rows=64&bandwidth=2", "--reorder", "rcm", "--json").json
    assert [item["order"] for item in found["orders"]] == ["identity", "rcm"]
    given = found["orders"][0]
    assert given["share"] == 1.0 and given["nnz_per_pair"]["64"] == pytest.approx(314 / 64)
    assert [item["window"] for item in found["windows"]] == list(map(int, given["nnz_per_pair"]))
    blocks = given["tiles"][-1]
    assert blocks["format"] == "BCSR 64×64" and blocks["tiles"] == 1
    assert blocks["nnz_per_tile"] == 314 and blocks["fill"] == pytest.approx(314 / 64**2)
    assert "orders" not in cli("inspect", "gen:banded?rows=64&bandwidth=2", "--json").json


@pytest.mark.parametrize(
    "spec", ["rows=0&cols=0&nnz=0", "rows=4&cols=9&nnz=0", "rows=1&cols=900&nnz=80"]
)
def test_orders_of_a_degenerate_matrix_are_printed_too(cli: Cli, spec: str):
    outcome = cli("inspect", f"gen:random?{spec}", "--reorder", ",".join(REORDERERS))
    assert outcome.code == 0
    for text in ("row order", "nonzeros per tile", "BCSR 64×64", *REORDERERS):
        assert text in outcome.out


def test_an_order_is_refused_before_any_work(cli: Cli):
    assert_refused(
        cli("inspect", "nowhere", "--reorder", "rcm,spiral"),
        f"inspect: --reorder must be one of {list(REORDERERS)}, got 'spiral'.",
    )


def test_an_unknown_matrix_is_one_line(cli: Cli):
    assert_refused(cli("inspect", "nowhere"), "got 'nowhere'")


def test_orders_compile_while_the_matrix_is_read_and_drawn(cli: Cli, tmp_path, monkeypatch):
    """The picture is there before an order is found, and the order's code before it is asked."""
    asked = []

    class Slow:
        def __init__(self, csr) -> None:
            asked.append((csr.shape, (tmp_path / "p.png").exists()))
            self.perm = torch.arange(csr.shape[0])

    monkeypatch.setitem(REORDERERS, "slow", Slow)
    matrix = "gen:banded?rows=40&bandwidth=2"
    outcome = cli("inspect", matrix, "--reorder", "slow", "--png", tmp_path / "p.png")
    assert outcome.code == 0 and "slow" in outcome.out
    assert asked == [((64, 64), False), ((40, 40), True)]

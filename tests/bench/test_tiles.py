"""Tiles and bytes by row order: counts against the packed format, records, the page."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from sparsetile.bench import read_records
from sparsetile.bench import tiles as tiles_module
from sparsetile.bench.report.tiles import render_tiles
from sparsetile.bench.tiles import (
    STORAGES,
    Counts,
    count_tiles,
    measure_tiles,
    saved_percent,
    tile_record,
    validate_tiles,
)
from sparsetile.core.errors import DataError
from sparsetile.data.generators import banded, random
from sparsetile.formats import BitTCF
from sparsetile.formats.pairs import distinct_pairs
from sparsetile.intake import write_npz
from sparsetile.reorder import REORDERERS
from tests.contracts.cases import MATRICES, csr_of, random_matrix

ORDERS = ("identity", "lsh")


def record_of(matrix: str = "some", order: str = "identity", **changes) -> dict:
    record = tile_record(matrix, "file", csr_of(random_matrix(60, 50, 0.1)), order)
    return {**record, **changes}


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("shuffled", [False, True])
def test_tiles_and_bytes_are_those_of_the_packed_format(name, shuffled):
    csr = csr_of(MATRICES[name]())
    order = torch.randperm(csr.shape[0]) if shuffled else None
    packed, counts = BitTCF.pack(csr, order), count_tiles(csr, order)
    assert counts.tiles[8] == packed.tile_count
    assert STORAGES["BitTCF"].size(counts) == packed.bytes
    if csr.nnz:
        assert counts.nnz_per_tile == pytest.approx(packed.mean_tile_entries)
    for window, pairs in counts.pairs.items():
        assert pairs == distinct_pairs(csr, window, order)


@settings(max_examples=60, deadline=None)
@given(
    rows=some.integers(0, 300),
    columns=some.integers(0, 30),
    density=some.floats(0, 0.6),
    most=some.integers(1, 500),
    seed=some.integers(0, 2**31 - 1),
)
def test_counting_piece_by_piece_changes_nothing(rows, columns, density, most, seed):
    csr = csr_of(random_matrix(rows, columns, density, seed=seed))
    order = torch.from_numpy(np.random.default_rng(seed).permutation(rows))
    assert count_tiles(csr, order, most=most) == count_tiles(csr, order)


def test_the_counts_of_a_full_matrix_are_known():
    counts = count_tiles(csr_of(sp.csr_array(np.ones((20, 20)))))
    assert counts == Counts(20, 400, {8: 60, 16: 40, 64: 20}, {8: 9, 16: 6, 64: 3})
    assert counts.nnz_per_tile == pytest.approx(400 / 9)


def test_the_bytes_of_every_format_are_those_of_its_arrays():
    """20 rows are 3 windows of 8 and 2 of 16; indices of 4 bytes."""
    counts = Counts(20, 400, {8: 60, 16: 40, 64: 20}, {8: 9, 16: 6, 64: 3})
    tiled = {"window offsets": 4 * 4, "tile offsets": 10 * 4, "columns": 9 * 8 * 4}
    wide = {"window offsets": 3 * 4, "tile offsets": 7 * 4, "columns": 6 * 8 * 4}
    expected = {
        "BitTCF": sum(tiled.values()) + 9 * 8,
        "CSR": 21 * 4 + 400 * 4,
        "COO": 400 * 4 * 2,
        "ME-TCF": sum(wide.values()) + 400,
        "ME-TCF 8x8": sum(tiled.values()) + 400,
        "TCF": 21 * 4 + 2 * 4 + 3 * 400 * 4,
    }
    assert {name: storage.size(counts) for name, storage in STORAGES.items()} == expected


def test_what_bittcf_saves_is_in_percent_of_the_other_and_negative_where_it_is_larger():
    record = {"bytes": {"BitTCF": 75, "CSR": 100, "COO": 60, "TCF": 0}}
    assert saved_percent(record, "CSR") == pytest.approx(25)
    assert saved_percent(record, "COO") == pytest.approx(-25)
    assert saved_percent(record, "TCF") == 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    data = tmp_path / "data"
    data.mkdir()
    write_npz(data / "weighted.npz", random(60, 50, nnz=400, weighted=True, seed=1))
    write_npz(data / "band.npz", banded(40, 2))
    return data


def test_there_is_one_record_a_matrix_and_order_in_the_order_asked_for(folder, tmp_path):
    out = tmp_path / "tiles.jsonl"
    records = measure_tiles(["band", "weighted"], ["rcm", "identity"], data=folder, out=out)
    assert [record["key"] for record in records] == [
        "band|rcm", "band|identity", "weighted|rcm", "weighted|identity",
    ]  # fmt: skip
    assert [json.loads(line) for line in out.read_text().splitlines()] == records
    assert all(validate_tiles(record) is record for record in records)
    assert records[0]["source"] == "file" and records[0]["environment"]["commit"]
    assert records[1]["seconds"] == 0 < records[0]["seconds"]


def test_what_the_file_holds_is_not_measured_again_and_matrices_not_needed_are_not_read(
    folder, tmp_path, monkeypatch
):
    out = tmp_path / "tiles.jsonl"
    first = measure_tiles(["band"], ORDERS, data=folder, out=out)
    size = out.stat().st_size
    monkeypatch.setattr(tiles_module, "load", None)
    assert measure_tiles(["band"], ORDERS, data=folder, out=out) == first
    assert out.stat().st_size == size
    monkeypatch.undo()
    said: list[str] = []
    measure_tiles(["band"], [*ORDERS, "rcm"], data=folder, out=out, say=said.append)
    assert said == ["reading band", "band: rcm"]


def test_what_the_file_holds_is_measured_again_when_asked_and_the_later_record_counts(
    folder, tmp_path, monkeypatch
):
    out = tmp_path / "tiles.jsonl"
    first = measure_tiles(["band"], ["rcm"], data=folder, out=out)
    monkeypatch.setitem(REORDERERS, "rcm", REORDERERS["lsh"])
    later = measure_tiles(["band"], ["rcm"], data=folder, out=out, again=True)
    assert later[0]["pairs"] != first[0]["pairs"]
    assert len(out.read_text().splitlines()) == 2
    assert measure_tiles(["band"], ["rcm"], data=folder, out=out) == later


def test_no_order_at_all_is_refused(folder):
    with pytest.raises(ValueError) as caught:
        measure_tiles(["band"], [], data=folder)
    assert str(caught.value) == (
        f"tiles: --orders must be at least one row order, got none. Name some of {[*REORDERERS]}."
    )


def test_files_stand_ins_and_specs_are_told_apart(folder):
    names = [str(folder / "band.npz"), "ddi-like?scale=0.01", "gen:banded?rows=9&bandwidth=1"]
    records = measure_tiles(names, ["identity"])
    assert [record["source"] for record in records] == ["file", "stand-in", "generated"]
    assert [record["matrix"] for record in records] == ["band", *names[1:]]


def test_an_unknown_matrix_or_order_is_refused_before_any_work(folder, tmp_path):
    out = tmp_path / "tiles.jsonl"
    with pytest.raises(ValueError, match=r"^load: matrix must be .*got 'bond'\. Did you mean band"):
        measure_tiles(["band", "bond"], ORDERS, data=folder, out=out)
    with pytest.raises(ValueError) as caught:
        measure_tiles(["band"], ["rcm", "spiral"], data=folder, out=out)
    assert str(caught.value) == (
        f"tiles: --orders must be one of {list(REORDERERS)}, got 'spiral'. "
        "Choose a name from that list."
    )
    assert not out.exists()


def test_two_files_of_one_name_are_refused(folder, tmp_path):
    other = tmp_path / "band.npz"
    write_npz(other, banded(9, 1))
    with pytest.raises(ValueError) as caught:
        measure_tiles(["band", str(other)], ["identity"], data=folder)
    assert str(caught.value) == (
        "tiles: MATRIX must be files of different names, got 'band' twice. "
        "Give one of them at a time, each with its own --out."
    )


def test_records_of_another_matrix_of_the_same_name_are_refused(folder, tmp_path):
    out = tmp_path / "tiles.jsonl"
    measure_tiles(["band"], ["identity"], data=folder, out=out)
    write_npz(folder / "band.npz", banded(50, 2))
    with pytest.raises(DataError) as caught:
        measure_tiles(["band"], ["lsh"], data=folder, out=out)
    assert str(caught.value) == (
        "tiles: --out must be a file of records of this band, got records of another matrix of "
        f"that name in {str(out)!r}. Give another file."
    )


@pytest.mark.parametrize("line", ["{not json", '{"schema": 7}', "3"])
def test_a_damaged_line_is_one_error_that_names_it(folder, tmp_path, line):
    out = tmp_path / "tiles.jsonl"
    measure_tiles(["band"], ["identity"], data=folder, out=out)
    out.write_text(out.read_text() + line + "\n")
    with pytest.raises(DataError) as caught:
        measure_tiles(["band"], ["identity"], data=folder, out=out)
    assert str(caught.value).startswith(
        "tiles: --out must be a file of tile records, got the line tiles.jsonl:2: "
    )
    assert str(caught.value).endswith("Remove the line, or give another file.")


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"schema": 2}, "tiles: line must be a record of schema 1, got "),
        ({"source": 3}, "tiles: source must be text, got 3."),
        ({"nnz": -1}, "tiles: nnz must be a number of 0 or more, got -1."),
        ({"rows": True}, "tiles: rows must be a number of 0 or more, got True."),
        ({"seconds": float("nan")}, "tiles: seconds must be a number of 0 or more, got nan."),
        ({"tiles": {"8x8": 3}}, "tiles: tiles must be an object with ['16x8', '8x8'], got "),
        ({"pairs": {"8": 1, "16": 1, "64": "2"}}, "tiles: 64 must be a number of 0 or more, "),
        ({"status": "error"}, "tiles: reason must be text, got None."),
    ],
)
def test_a_record_that_is_none_says_what_is_wrong(changes, text):
    with pytest.raises(DataError) as caught:
        validate_tiles(record_of(**changes))
    assert str(caught.value).startswith(text)
    assert str(caught.value).endswith("Make the record again.")


def test_an_order_that_fails_is_recorded_with_its_reason_and_left_out_of_the_page(monkeypatch):
    def failing(csr):
        raise ValueError("rcm: A must be smaller, got this. Shrink it.")

    monkeypatch.setitem(REORDERERS, "rcm", failing)
    monkeypatch.setattr("sparsetile.bench.orders._warm", lambda name: None)
    failed = record_of(order="rcm")
    assert failed["status"] == "error" and failed["reason"].startswith("rcm: A must be smaller")
    assert validate_tiles(failed) is failed
    page = render_tiles([record_of(), failed], "sparsetile tiles some")
    assert "- some, rcm: left out. rcm: A must be smaller, got this. Shrink it." in page
    assert "| some | 60 | 300 |" in page


def lines_of(page: str, title: str) -> list[str]:
    """The lines between a title of the page and the next."""
    lines = page.splitlines()
    begin = lines.index(title)
    ends = [k for k in range(begin + 1, len(lines)) if lines[k].startswith("## ")]
    return lines[begin + 1 : ends[0] if ends else None]


def with_density(matrix: str, order: str, density: float, **more) -> dict:
    return record_of(matrix, order, nnz_per_tile=density, **more)


def test_the_page_marks_the_best_order_and_holds_affinity_against_the_published_gains():
    records = [
        with_density("one", "identity", 10.0),
        with_density("one", "lsh", 12.0),
        with_density("one", "affinity", 18.0),
        with_density("two-like", "identity", 10.0, source="stand-in"),
        with_density("two-like", "lsh", 30.0, source="stand-in"),
        with_density("two-like", "affinity", 15.0, source="stand-in"),
    ]
    page = render_tiles(records, "sparsetile tiles one two-like")
    assert page.splitlines()[2:6] == [
        "Generated by this command; do not edit.", "", "```", "sparsetile tiles one two-like",
    ]  # fmt: skip
    assert "Stand-ins, not the published graphs: two-like." in page
    table = lines_of(page, "## Mean nonzeros per tile, of 64")
    assert "| one | 60 | 300 | 10.00 | 12.00 | **18.00** |" in table
    assert "| two-like | 60 | 300 | 10.00 | **30.00** | 15.00 |" in table
    # sqrt(1.2 * 3) and sqrt(1.8 * 1.5); the mean of 18 / 12 and 15 / 30.
    assert "| over the given order, geometric mean |  |  | 1.00× | 1.90× | 1.64× |" in table
    assert "| DTC-LSH | 1.28× | 1.00× over `lsh`, 2 matrices |" in table
    assert "| Rabbit Order | 1.10× | not measured |" in table
    assert "| `identity` | – | 1.65×, 2 matrices |" in table


def test_the_page_shows_pairs_bytes_and_times():
    sizes = {"BitTCF": 60, "CSR": 80, "COO": 160, "ME-TCF": 50, "ME-TCF 8x8": 75, "TCF": 200}
    more = {"pairs": {"8": 150, "16": 100, "64": 75}, "bytes": sizes, "seconds": 6e-6}
    page = render_tiles([record_of("one", "affinity", **more)], "sparsetile tiles one")
    pairs = lines_of(page, "## Nonzeros per distinct (window, column) pair")
    assert "| one | 60 | 300 | 2.00 / 3.00 / 4.00 |" in pairs
    stored = lines_of(page, "## Bytes beside the values")
    for name, storage in STORAGES.items():
        assert f"| {name} | `{storage.formula}` | {storage.source} |" in stored
    assert "| one | affinity | 60 | 25.0 | 62.5 | -20.0 | 20.0 | 70.0 |" in stored
    assert "| CSR | 16.12 | 10.00 | 25.00 |" in stored
    assert "| ME-TCF | 4.21 | -5.00 | -20.00 |" in stored
    assert "| ME-TCF 8x8 | 4.21 | 7.50 | 20.00 |" in stored
    times = lines_of(page, "## Time to find the order, nanoseconds per nonzero")
    assert "| one | 60 | 300 | 20 |" in times


def test_an_order_that_a_matrix_lacks_is_a_dash():
    records = [record_of("one", "identity"), record_of("two", "lsh")]
    table = lines_of(render_tiles(records, "x"), "## Mean nonzeros per tile, of 64")
    assert any(line.startswith("| one |") and line.endswith("| – |") for line in table)


def test_a_page_of_nothing_is_refused():
    with pytest.raises(ValueError) as caught:
        render_tiles([], "sparsetile tiles")
    assert str(caught.value) == (
        "tiles: MATRIX must be at least one matrix, got none. Name a matrix."
    )


def test_empty_matrices_have_a_page_too():
    records = [
        tile_record(f"empty {rows}", "file", csr_of(sp.csr_array((rows, 5))), order)
        for rows in (0, 9)
        for order in ("identity", "affinity")
    ]
    assert all(record["nnz_per_tile"] == 0 for record in records)
    assert "| empty 9 | 9 | 0 |" in render_tiles(records, "x")


def test_the_page_of_the_documentation_is_what_the_committed_records_say():
    root = Path(__file__).resolve().parents[2]
    page = (root / "docs" / "explanation" / "notes" / "tiles.md").read_text(encoding="utf-8")
    command = page.splitlines()[5]
    words = shlex.split(command)
    matrices = words[words.index("tiles") + 1 : words.index("--orders")]
    orders = words[words.index("--orders") + 1].split(",")
    records, damaged = read_records(root / words[words.index("--out") + 1], validate_tiles)
    assert not damaged
    held = {record["key"]: record for record in records}
    asked = [held[f"{matrix}|{order}"] for matrix in matrices for order in orders]
    assert render_tiles(asked, command) == page

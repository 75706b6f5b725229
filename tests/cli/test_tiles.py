"""``sparsetile tiles``: tables, records, the page, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

from sparsetile.reorder import REORDERERS
from tests.cli.conftest import Cli, assert_refused


def test_the_tables_show_tiles_pairs_and_bytes_of_every_order(cli: Cli, folder: Path):
    outcome = cli("-q", "tiles", "band", "weighted", "--data", folder)
    assert outcome.code == 0 and outcome.err == ""
    for text in ("identity", "rcm", "louvain", "lsh", "affinity", "64-row pairs", "ME-TCF 8x8"):
        assert text in outcome.out
    lines = [line.split() for line in outcome.out.splitlines()]
    # 40 rows of a band of 5: 5 windows of 8 rows over 10, 12, 12, 12 and 10 columns.
    band = next(line for line in lines if line[:2] == ["band", "identity"])
    assert band[4:] == ["10", "19.40", "56", "48", "40"]
    held = next(line for line in lines if line[:3] == ["band", "identity", "468"])
    assert held[3:6] == ["940", "(+50.2", "%)"]


def test_what_is_done_is_said_on_stderr(cli: Cli, folder: Path):
    outcome = cli("tiles", "band", "--data", folder, "--orders", "lsh")
    assert outcome.err == "sparsetile: reading band\nsparsetile: band: lsh\n"


def test_records_are_kept_and_the_page_names_its_command(cli: Cli, folder: Path, tmp_path: Path):
    out, page = tmp_path / "tiles.jsonl", tmp_path / "tiles.md"
    words = ("tiles", "band", "--data", folder, "--orders", "identity,lsh", "--out", out)
    first = cli(*words, "--json")
    assert first.code == 0
    assert [json.loads(line) for line in out.read_text().splitlines()] == first.json
    again = cli(*words, "--markdown", page, "--json")
    assert again.json == first.json and again.err == f"sparsetile: wrote {page}\n"
    assert len(out.read_text().splitlines()) == 2
    assert cli("-q", *words, "--again").code == 0
    assert len(out.read_text().splitlines()) == 4
    command = (
        "sparsetile tiles band --orders identity,lsh --data DIR --out tiles.jsonl "
        "--markdown tiles.md"
    )
    text = page.read_text()
    assert command in text.splitlines() and str(tmp_path) not in text


def test_unknown_names_damaged_lines_and_missing_folders_are_one_line_each(
    cli: Cli, folder: Path, tmp_path: Path
):
    assert_refused(cli("tiles", "nowhere"), "got 'nowhere'")
    assert_refused(
        cli("tiles", "band", "--data", folder, "--orders", "identity,spiral"),
        f"tiles: --orders must be one of {list(REORDERERS)}",
        "got 'spiral'",
    )
    out = tmp_path / "tiles.jsonl"
    out.write_text("{half a line")
    assert_refused(
        cli("tiles", "band", "--data", folder, "--out", out),
        "tiles: --out must be a file of tile records, got the line tiles.jsonl:1: not JSON",
    )
    for option in ("--out", "--markdown"):
        assert_refused(
            cli("tiles", "band", "--data", folder, option, tmp_path / "no" / "file"),
            f"tiles: {option} must be a file in a folder that exists",
        )


def test_a_failed_order_is_said_and_the_rest_is_shown(cli: Cli, folder: Path, monkeypatch):
    from sparsetile.reorder import REORDERERS

    def failing(csr):
        raise ValueError("rcm: A must be smaller, got this. Shrink it.")

    monkeypatch.setitem(REORDERERS, "rcm", failing)
    monkeypatch.setattr("sparsetile.bench.orders._warm", lambda name: None)
    outcome = cli("-q", "tiles", "band", "--data", folder, "--orders", "identity,rcm")
    assert outcome.code == 0 and "identity" in outcome.out
    assert outcome.err == "sparsetile: band, rcm: rcm: A must be smaller, got this. Shrink it.\n"

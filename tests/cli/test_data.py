"""``sparsetile data``: list, fetch from a local mirror, generate."""

from __future__ import annotations

import dataclasses
import io
import tarfile
from pathlib import Path

import pytest
import torch

from sparsetile.bench.suites import load_suite
from sparsetile.cli import data as data_module
from sparsetile.data import download, suites
from sparsetile.data.generators import from_spec
from sparsetile.intake import read_matrix
from tests.cli.conftest import Cli, assert_refused

MARKET = "%%MatrixMarket matrix coordinate real general\n3 2 2\n1 1 1.5\n3 2 -2\n"


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    """A folder laid out like the SuiteSparse site, with the matrix HB/tiny."""
    root = tmp_path / "mirror"
    (root / "MM" / "HB").mkdir(parents=True)
    with tarfile.open(root / "MM" / "HB" / "tiny.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo("tiny/tiny.mtx")
        member.size = len(MARKET)
        archive.addfile(member, io.BytesIO(MARKET.encode()))
    return root


def test_list_shows_sizes_and_names_what_is_unreadable(cli: Cli, folder: Path):
    (folder / "torn.npz").write_bytes(b"PK\x03\x04 torn")
    outcome = cli("data", "list", "--data", folder)
    assert outcome.code == 0 and outcome.err == ""
    rows = {line.split()[0]: line for line in outcome.out.splitlines()[2:]}
    assert set(rows) == {"band", "broken", "torn", "weighted"}
    assert rows["weighted"].split()[1:4] == ["60", "50", "400"]
    assert "unreadable" in rows["torn"]


def test_list_as_json(cli: Cli, folder: Path):
    rows = {row["name"]: row for row in cli("data", "list", "--data", folder, "--json").json}
    assert rows["band"]["rows"] == 40 and rows["band"]["problem"] is None
    assert rows["weighted"]["path"] == str(folder / "weighted.npz")


def test_list_of_an_empty_folder_says_so_on_stderr(cli: Cli, tmp_path: Path):
    outcome = cli("data", "list")
    assert (outcome.code, outcome.out) == (0, "")
    assert outcome.err == f"sparsetile: no matrices in {tmp_path / 'downloads'}\n"
    assert cli("data", "list", "--json").json == []


def test_list_refuses_a_folder_that_is_not_there(cli: Cli):
    assert_refused(cli("data", "list", "--data", "no/such"), "must be a folder, got 'no/such'")


def test_fetch_prints_the_path_of_a_file_that_run_finds_by_name(cli: Cli, mirror, tmp_path):
    outcome = cli("data", "fetch", "HB/tiny", "--base-url", mirror)
    path = tmp_path / "downloads" / "HB" / "tiny.mtx"
    assert (outcome.code, outcome.out, outcome.err) == (0, f"{path}\n", "")
    assert read_matrix(path).shape == (3, 2)
    assert cli("run", "HB/tiny", "-n", 4, "--repeats", 1, "--device", "cpu").code == 0


def test_fetch_into_a_folder_of_choice(cli: Cli, mirror: Path, tmp_path: Path):
    outcome = cli("data", "fetch", "HB/tiny", "--base-url", mirror, "--data", tmp_path / "mine")
    assert outcome.out == f"{tmp_path / 'mine' / 'HB' / 'tiny.mtx'}\n"


def test_fetch_refuses_bad_names_and_reports_what_is_not_there(cli: Cli, mirror: Path):
    assert_refused(cli("data", "fetch", "tiny"), "fetch: name must be a SuiteSparse name")
    assert_refused(cli("data", "fetch", "HB/none", "--base-url", mirror), "no such file")


@pytest.mark.parametrize("spec", ["gen:banded?rows=30&bandwidth=2", "ddi-like?scale=0.01"])
def test_generate_writes_the_matrix_that_the_spec_names(cli: Cli, tmp_path: Path, spec: str):
    file = tmp_path / "made.npz"
    outcome = cli("data", "generate", spec, "--out", file)
    assert (outcome.code, outcome.out) == (0, f"{file}\n")
    made, meant = read_matrix(file), from_spec(spec)
    assert made.shape == meant.shape and torch.equal(made.indices, meant.indices)
    assert f"{meant.nnz} entries" in outcome.err


def test_generate_refuses_bad_usage(cli: Cli, tmp_path: Path):
    spec = "gen:banded?rows=30&bandwidth=2"
    assert_refused(cli("data", "generate", spec), "Missing option '--out'")
    assert_refused(
        cli("data", "generate", spec, "--out", "m.mtx"),
        "generate: --out must be a file named .npz, got 'm.mtx'.",
    )
    assert_refused(
        cli("data", "generate", spec, "--out", tmp_path / "no" / "m.npz"),
        "generate: --out must be a file in a folder that exists",
    )
    assert_refused(
        cli("data", "generate", "gen:magic", "--out", tmp_path / "m.npz"), "must be one of"
    )


def test_a_suite_is_fetched_checked_and_found_by_name(cli: Cli, mirror, tmp_path, monkeypatch):
    tiny = read_matrix(download.fetch("HB/tiny", base_url=str(mirror), directory=tmp_path / "own"))
    known = suites.Member("tiny", "HB/tiny", 3, 2, 2, suites.pattern_digest(tiny), "SuiteSparse")
    other = dataclasses.replace(known, name="other", collection="-", source="https://a.example")
    monkeypatch.setattr(data_module, "members", lambda suite: [known, other])
    folder = tmp_path / "suite"
    outcome = cli("data", "fetch", "--suite", "core", "--data", folder, "--base-url", mirror)
    first, second = (line.split() for line in outcome.out.splitlines()[2:])
    assert outcome.code == 1 and "fetching HB/tiny, 2 entries" in outcome.err
    assert first[:2] == ["tiny", "2"] and known.pattern[:12] in first and "fetched" in first
    assert second[0] == "other" and "https://a.example" in second and "get" in second
    assert cli("run", "tiny", "-n", "2", "--data", folder).code == 0
    (folder / "other.mtx").write_text(MARKET.replace("3 2 -2", "2 2 -2"))
    (mirror / "MM" / "HB" / "tiny.tar.gz").unlink()  # nothing is fetched again
    outcome = cli("data", "fetch", "--suite", "core", "--data", folder, "--base-url", mirror)
    assert outcome.code == 1 and "another pattern than the measured one" in outcome.out
    (folder / "other.mtx").write_text(MARKET)
    outcome = cli("data", "fetch", "--suite", "core", "--data", folder, "--base-url", mirror)
    assert outcome.code == 0 and outcome.out.count("there already") == 2


def test_the_core_suite_s_list_is_that_of_the_benchmarks():
    listed = suites.members("core")
    assert tuple(each.name for each in listed) == load_suite("core").parts[0].matrices
    assert sum(each.collection != "-" for each in listed) == 19
    assert all(len(each.pattern) == 64 and each.source for each in listed)


@pytest.mark.parametrize("words", [(), ("HB/tiny", "--suite", "core")])
def test_fetch_takes_a_name_or_a_suite(cli: Cli, words):
    assert_refused(cli("data", "fetch", *words), "fetch: NAME or --suite must be one of both, got")

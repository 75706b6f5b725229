"""Folders of matrices and the loader that takes paths, specs and names."""

from __future__ import annotations

import gzip
import zipfile

import numpy as np
import pytest
import scipy.sparse as sp

from sparsetile.data.catalog import Entry, catalog, find, load
from sparsetile.data.generators import banded, from_spec, random, stand_in
from sparsetile.intake.files import write_npz
from tests.data.matrix_checks import same

MARKET = b"%%MatrixMarket matrix coordinate pattern general\n% x\n\n5 6 2\n1 1\n5 6\n"


@pytest.fixture
def folder(tmp_path):
    data = tmp_path / "data"
    (data / "HB").mkdir(parents=True)
    write_npz(data / "Zebra.npz", banded(50, 2))
    write_npz(data / "alpha.npz", random(7, 9, nnz=11, weighted=True), compress=True)
    (data / "HB" / "tiny.mtx").write_bytes(MARKET)
    (data / "packed.mtx.gz").write_bytes(gzip.compress(MARKET))
    (data / "notes.txt").write_text("not a matrix")
    return data


def test_the_catalog_lists_sizes(folder):
    assert catalog(folder) == [
        Entry("alpha", folder / "alpha.npz", 7, 9, 11),
        Entry("HB/tiny", folder / "HB" / "tiny.mtx", 5, 6, 2),
        Entry("packed", folder / "packed.mtx.gz", 5, 6, 2),
        Entry("Zebra", folder / "Zebra.npz", 50, 50, 244),
    ]


def test_listing_does_not_read_the_arrays(folder, calls_of):
    opened = calls_of(np.lib.format, "read_array")
    catalog(folder)
    assert [call.result.size for call in opened] == [2, 2]  # the two shapes and nothing else


@pytest.mark.parametrize("format", ["csr", "csc", "coo", "bsr"])
def test_files_of_scipy_are_listed_too(tmp_path, format):
    matrix = sp.random(12, 8, density=0.5, random_state=0, format=format)
    sp.save_npz(tmp_path / "m.npz", matrix)
    (entry,) = catalog(tmp_path)
    assert (entry.rows, entry.cols) == (12, 8) and entry.nnz == matrix.data.size


def test_an_npz_that_holds_no_matrix_is_left_out(folder):
    np.savez(folder / "features.npz", x=np.zeros((3, 3)))
    assert "features" not in [entry.name for entry in catalog(folder)]


def hostile_shape(path):
    np.savez(path, indptr=np.zeros(1, int), indices=np.zeros(0, int), shape=np.zeros(2, "V9"))


def three_sizes(path):
    np.savez(path, indptr=np.zeros(1, int), indices=np.zeros(0, int), shape=np.zeros(3, int))


def broken_header(path):
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("indptr.npy", "indices.npy", "shape.npy"):
            archive.writestr(name, b"\x93NUMPY\x01\x00\x02\x00{}")


def truncated(path):
    write_npz(path, banded(50, 2))
    path.write_bytes(path.read_bytes()[:300])


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda path: path.write_bytes(b""), "not a zip file"),
        (truncated, "not a zip file"),
        (hostile_shape, "its shape is not a pair of whole numbers"),
        (three_sizes, "its shape is not a pair of whole numbers"),
        (broken_header, "Header"),
    ],
)
def test_a_damaged_npz_is_listed_with_its_problem_and_the_others_stay(folder, make, problem):
    make(folder / "bad.npz")
    by_name = {entry.name: entry for entry in catalog(folder)}
    assert problem in by_name["bad"].problem
    assert (by_name["bad"].rows, by_name["bad"].nnz) == (0, 0)
    assert by_name["alpha"].problem == "" and len(by_name) == 5


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"hello", "does not begin with %%MatrixMarket"),
        (b"%%MatrixMarket x\n% only comments\n", "no line 'ROWS COLUMNS ENTRIES'"),
        (b"%%MatrixMarket x\n1 2 many\n", "invalid literal"),
    ],
)
def test_a_damaged_mtx_is_listed_with_its_problem(tmp_path, content, problem):
    (tmp_path / "bad.mtx").write_bytes(content)
    (entry,) = catalog(tmp_path)
    assert problem in entry.problem


def test_a_truncated_gzip_is_listed_with_its_problem(tmp_path):
    (tmp_path / "bad.mtx.gz").write_bytes(gzip.compress(MARKET * 50)[:30])
    (entry,) = catalog(tmp_path)
    assert "end-of-stream" in entry.problem


def test_downloads_in_progress_are_not_listed(folder):
    (folder / ".fetch-abc").mkdir()
    (folder / ".fetch-abc" / "half.mtx").write_bytes(MARKET)
    assert len(catalog(folder)) == 4


def test_a_hundred_files_are_listed_by_name_order(tmp_path):
    for index in range(100):
        write_npz(tmp_path / f"m{index:03}.npz", banded(index, 1))
    entries = catalog(tmp_path)
    assert [entry.rows for entry in entries] == list(range(100))


def test_a_folder_that_is_none_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^catalog: directory must be a folder, got"):
        catalog(tmp_path / "absent")


def test_the_default_folder_may_not_exist_yet(tmp_path, environment):
    environment(SPARSETILE_DATA_DIR=tmp_path / "absent")
    assert catalog() == []


def test_load_takes_a_path(folder):
    assert same(load(folder / "Zebra.npz"), banded(50, 2))
    assert same(load(str(folder / "Zebra.npz")), banded(50, 2))


def test_load_takes_a_spec():
    assert same(load("gen:banded?rows=50&bandwidth=2"), banded(50, 2))
    assert same(load("gen:ppi-like?scale=0.01"), stand_in("ppi-like", 0.01))


def test_load_takes_a_spec_longer_than_a_file_name_may_be():
    spec = "gen:banded?rows=50&bandwidth=2&density=0." + "5" * 5000
    assert load(spec).nnz > 0


def test_load_takes_a_stand_in():
    assert same(load("ddi-like?scale=0.1&seed=2"), from_spec("gen:ddi-like?scale=0.1&seed=2"))
    assert load("tu-proteins-like").shape == (43_471, 43_471)


@pytest.mark.parametrize("name", ["HB/tiny", "tiny", "HB/tiny.mtx", "packed"])
def test_load_takes_a_name_in_the_folder(folder, name):
    assert load(name, folder).shape == (5, 6)


def test_load_looks_in_the_default_folder(folder, environment):
    environment(SPARSETILE_DATA_DIR=folder)
    assert load("alpha").nnz == 11


def test_a_file_goes_before_a_name_and_a_folder_does_not(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "alpha").mkdir()
    assert load("alpha", folder).nnz == 11
    write_npz(tmp_path / "alpha.npz", banded(3, 0))
    assert load("alpha.npz", folder).nnz == 3


def test_an_npz_wins_over_an_mtx_of_the_same_name(folder):
    (folder / "alpha.mtx").write_bytes(MARKET)
    assert load("alpha", folder).nnz == 11
    assert len(catalog(folder)) == 4


def test_a_short_name_that_two_groups_share_is_not_guessed(folder):
    (folder / "Other").mkdir()
    (folder / "Other" / "tiny.mtx").write_bytes(MARKET)
    with pytest.raises(ValueError, match=r"Did you mean .*HB/tiny"):
        load("tiny", folder)
    assert load("Other/tiny", folder).shape == (5, 6)


def test_an_unknown_name_lists_near_ones(folder):
    with pytest.raises(
        ValueError, match=r"^load: matrix must be a file, .* got 'zebr'. Did you mean Z"
    ):
        load("zebr", folder)
    with pytest.raises(ValueError, match=r"got 'redit-like'. Did you mean reddit-like"):
        load("redit-like", folder)
    with pytest.raises(ValueError, match=r"got 'qqqqqq'. `sparsetile data list` shows the names"):
        load("qqqqqq", folder)


def test_load_refuses_what_is_no_name(folder):
    with pytest.raises(TypeError, match=r"^load: matrix must be a path, a spec or a name, got int"):
        load(7, folder)
    with pytest.raises(ValueError, match=r"^load: data_dir must be a folder, got"):
        load("alpha", folder / "absent")


def test_a_matrix_is_found_without_being_read(folder):
    (folder / "alpha.npz").write_bytes(b"damaged")
    assert find("alpha", folder) == folder / "alpha.npz"
    assert find("tiny", folder) == folder / "HB" / "tiny.mtx"
    assert find(folder / "Zebra.npz") == folder / "Zebra.npz"
    assert find("reddit-like?scale=0.1") is find("gen:banded?rows=9&bandwidth=1") is None
    with pytest.raises(
        ValueError, match=r"^load: matrix must be a file, .* got 'Zebro'\. Did you "
    ):
        find("Zebro", folder)
    with pytest.raises(TypeError, match=r"^load: matrix must be a path, a spec or a name, got int"):
        find(3)

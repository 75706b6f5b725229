"""Suites on a machine: names resolve, options narrow, what is left out is said."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sparsetile.bench.baselines import BASELINES
from sparsetile.bench.expansion import expand
from sparsetile.bench.suites import load_suite


def _matrix(folder: Path, name: str) -> None:
    np.savez(
        folder / f"{name}.npz",
        indptr=np.array([0, 1, 2]),
        indices=np.array([0, 1], dtype=np.int32),
        shape=np.array([2, 2]),
    )


def _write(folder: Path, text: str) -> str:
    path = folder / "mine.toml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("name", ["voltrix", "brp", "rsh", "acc"])
def test_paper_suites_run_without_data_on_stand_ins_and_name_what_is_missing(name: str) -> None:
    found = expand(load_suite(name), data=None, device="cuda")
    assert all(entry.matrix.source == "stand-in" for entry in found.entries)
    assert any("neither in the data folder nor a stand-in" in text for text in found.left_out)


def test_a_real_matrix_is_preferred_to_its_stand_in(tmp_path: Path) -> None:
    _matrix(tmp_path, "reddit")
    found = expand(load_suite("acc"), data=tmp_path, device="cuda")
    sources = {entry.matrix.name: entry.matrix.source for entry in found.entries}
    assert sources["reddit"] == "file" and "reddit-like" not in sources


def test_baselines_come_before_systems_of_the_same_product(tmp_path: Path) -> None:
    _matrix(tmp_path, "PubMed")
    found = expand(load_suite("core"), data=tmp_path, device="cuda", n=[32])
    kinds = [entry.kind for entry in found.entries]
    assert kinds == sorted(kinds) and len(set(entry.key for entry in found.entries)) == len(kinds)


def test_asking_for_one_system_brings_the_yardstick_along(tmp_path: Path) -> None:
    _matrix(tmp_path, "PubMed")
    found = expand(load_suite("core"), data=tmp_path, device="cuda", systems=["csr"], n=[32])
    assert [entry.system for entry in found.entries] == [
        "cusparse-csr1", "cusparse-csr2", "cusparse-csr3", "csr",
    ]  # fmt: skip


def test_a_system_that_is_not_built_is_named_and_the_rest_runs(tmp_path: Path) -> None:
    path = _write(
        tmp_path,
        'matrices = ["road"]\nn = [8]\ndevice = "cpu"\nsystems = ["starship", "cpu"]\n'
        '[generate.road]\ngenerator = "road_grid"\nparams = { rows = 100 }\n',
    )
    found = expand(load_suite(path), data=None, device="cpu")
    assert "starship: not built yet" in found.left_out
    assert {entry.system for entry in found.entries} == {"scipy", "torch-csr", "cpu"}


def test_all_takes_every_file_of_the_folder(tmp_path: Path) -> None:
    for name in ("one", "two"):
        _matrix(tmp_path, name)
    (tmp_path / "notes.txt").write_text("no matrix")
    found = expand(load_suite("all"), data=tmp_path, device="cuda")
    assert {entry.matrix.name for entry in found.entries} == {"one", "two"}


def test_narrowing_by_matrix_width_and_type(tmp_path: Path) -> None:
    for name in ("PubMed", "DD"):
        _matrix(tmp_path, name)
    found = expand(
        load_suite("core"), data=tmp_path, device="cuda",
        n=[7], dtypes=["float16"], matrices=["DD"],
    )  # fmt: skip
    assert {(e.matrix.name, e.n, e.dtype) for e in found.entries} == {("DD", 7, "float16")}


def test_row_orders_multiply_the_systems_that_tell_them_apart(tmp_path: Path) -> None:
    _matrix(tmp_path, "PubMed")
    found = expand(
        load_suite("core"), data=tmp_path, device="cuda",
        systems=["csr", "dense"], n=[32], orders=["auto", "rcm", "affinity"],
    )  # fmt: skip
    ours = [(e.system, dict(e.config)) for e in found.entries if e.kind == "system"]
    assert ours == [
        ("csr", {}), ("csr", {"reorder": "rcm"}), ("csr", {"reorder": "affinity"}), ("dense", {}),
    ]  # fmt: skip
    assert "dense with reorder=rcm: takes rows as they come" in found.left_out
    assert len({entry.key for entry in found.entries}) == len(found.entries)


def test_a_suite_may_ask_for_row_orders_itself(tmp_path: Path) -> None:
    _matrix(tmp_path, "one")
    path = _write(tmp_path, 'matrices = ["one"]\nn = [8]\nsystems = ["csr"]\nreorder = ["rcm"]\n')
    found = expand(load_suite(path), data=tmp_path, device="cuda")
    assert [dict(e.config) for e in found.entries if e.kind == "system"] == [{"reorder": "rcm"}]


def test_a_ladder_keeps_to_its_own_widths_and_types(tmp_path: Path) -> None:
    _matrix(tmp_path, "one")
    path = _write(
        tmp_path,
        'matrices = ["one"]\nn = [8, 16]\ndtypes = ["float32", "float16"]\nsystems = ["csr"]\n'
        '[[ladder]]\nname = "l"\ntitle = "L"\nn = [16]\ndtypes = ["float16"]\n'
        'steps = [{ label = "x", system = "csr", config = { reorder = "rcm" } }]\n',
    )
    steps = [e for e in expand(load_suite(path), data=tmp_path, device="cuda").entries if e.config]
    assert [(e.n, e.dtype) for e in steps] == [(16, "float16")]


def test_the_parts_of_acc_are_measured_on_real_graphs_and_stand_ins() -> None:
    suite = load_suite("acc_parts")
    names = {choice for name in suite.parts[0].matrices for choice in name.split("|")}
    assert {"usroads", "DD", "web-NotreDame", "ogbl-ddi"} <= names
    assert {"yeasth-like", "roadnet-ca-like", "reddit-like", "protein-like"} <= names
    found = expand(suite, data=None, device="cuda", matrices=["protein-like"])
    configs = [dict(e.config) for e in found.entries if e.kind == "system"]
    off = [config.get("ablation") for config in configs]
    assert len(configs) == 9 and {"no-balance", "no-stack", "no-pipeline", "bittcf"} <= set(off)


def test_a_baseline_that_is_not_installed_is_named_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _matrix(tmp_path, "PubMed")
    monkeypatch.setattr(type(BASELINES["pyg"]), "missing", lambda self: "x is not installed")
    found = expand(load_suite("core"), data=tmp_path, device="cuda", systems=["pyg", "csr"])
    assert "pyg: x is not installed" in found.left_out
    assert "pyg" not in {entry.system for entry in found.entries}


def test_a_suite_with_nothing_to_measure_says_why() -> None:
    with pytest.raises(ValueError, match="suite core must be runnable here, got nothing"):
        expand(load_suite("core"), data=None, device="cuda")

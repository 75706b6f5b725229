"""``sparsetile bench``: exit codes, and one clear line on bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsetile.bench.driver import Outcome
from sparsetile.bench.record import append_record
from sparsetile.cli import main
from sparsetile.data.generators import random
from sparsetile.intake import write_npz

from .fakes import failed, record


def _file(folder: Path, name: str, *seconds: float) -> str:
    path = folder / name
    for n, spent in enumerate(seconds, 1):
        append_record(path, record(n=n, seconds=spent))
    return str(path)


def _fails(capsys: pytest.CaptureFixture[str], words: list[str], text: str) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert text in error and "Traceback" not in error


def test_bad_usage_is_one_line_and_exit_two(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _fails(capsys, ["bench"], "bench: SUITE must be one of")
    _fails(capsys, ["bench", "nosuch"], "bench: suite must be one of")
    _fails(capsys, ["bench", "cpu", "-n", "0"], "bench: -n must be whole numbers from 1 up")
    _fails(capsys, ["bench", "cpu", "--data", str(tmp_path / "no")], "data must be an existing")
    _fails(capsys, ["bench", "cpu", "--device", "tpu"], "bench: device must be one of")
    _fails(capsys, ["bench", "cpu", "--time-limit", "0"], "--time-limit must be seconds above 0")
    _fails(capsys, ["bench", "cpu", "--timeout", "nan"], "--timeout must be seconds above 0")
    _fails(capsys, ["bench", "cpu", "--reorder", "up"], "bench: reorder must be one of")
    _fails(capsys, ["bench", "cpu", "--weights", "up"], "bench: weights must be one of")
    _fails(capsys, ["bench", "cpu", "--layout", "up"], "bench: layout must be one of")
    _fails(capsys, ["bench", "cpu", "--dtype", "float8"], "bench: dtype must be one of")


def test_a_matrix_that_the_suite_lacks_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = _suite(tmp_path)
    text = "suite mine must be runnable here, got nothing to measure. h: no matrix of suite mine"
    _fails(capsys, [*words, "--matrices", "h"], text)
    _outcome(monkeypatch)
    out = str(tmp_path / "r.jsonl")
    assert main([*words, "--matrices", "g,h", "--out", out]) == 0
    assert "left out: h: no matrix of suite mine" in capsys.readouterr().out


def _suite(folder: Path) -> list[str]:
    path = folder / "mine.toml"
    path.write_text(
        'matrices = ["g"]\nn = [8]\ndevice = "cpu"\nsystems = ["cpu", "dense"]\n'
        '[generate.g]\ngenerator = "random"\nparams = { rows = 50, cols = 50, nnz = 300 }\n'
    )
    return ["bench", str(path)]


def test_records_are_written_to_a_file_and_not_to_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _fails(capsys, [*_suite(tmp_path), "--out", str(tmp_path)], "bench: --out must be a file")


def _outcome(monkeypatch: pytest.MonkeyPatch, *records: dict[str, Any], left: int = 0) -> None:
    """Make the driver write these records instead of measuring."""

    def run_suite(expansion: Any, options: Any, **more: Any) -> Outcome:
        entries = expansion.entries
        for entry, given in zip(entries, records, strict=False):
            body = {**given, **entry.identity(), "key": entry.key}
            append_record(options.out, body)
        return Outcome(measured=len(records), not_run=list(entries[len(entries) - left :]))

    monkeypatch.setattr("sparsetile.bench.driver.run_suite", run_suite)


def test_what_the_time_limit_cut_off_is_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _outcome(monkeypatch, record(), record(), left=2)
    words = [*_suite(tmp_path), "--out", str(tmp_path / "o.jsonl"), "--time-limit", "60"]
    assert main(words) == 0
    found = capsys.readouterr()
    assert "not run: g: 2 entries (N=8 float32)" in found.out
    assert "time limit of 60 s: 2 entries not run; the same command goes on" in found.err
    assert main([*words, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["not_run"]) == 2


def test_a_run_cut_off_before_its_first_record_says_so_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _outcome(monkeypatch, left=4)
    words = [*_suite(tmp_path), "--out", str(tmp_path / "o.jsonl"), "--time-limit", "1"]
    assert main(words) == 0
    assert "not run: g: 4 entries" in capsys.readouterr().out


def test_a_wrong_system_is_exit_one_and_a_wrong_baseline_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = failed("wrong", "error is 7 times the bound")
    _outcome(monkeypatch, wrong, record())
    words = _suite(tmp_path)
    assert main([*words, "--out", str(tmp_path / "a.jsonl")]) == 0  # scipy comes first
    _outcome(monkeypatch, record(), record(), wrong)
    assert main([*words, "--out", str(tmp_path / "b.jsonl")]) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_suite_without_a_gpu_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    _fails(capsys, ["bench", "core"], "bench: device must be a CUDA GPU for this suite, got none")


def test_the_suites_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list"]) == 0
    assert "core" in capsys.readouterr().out


def test_compare_exits_one_on_a_regression_and_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = _file(tmp_path, "old.jsonl", 1e-5, 1e-5)
    new = _file(tmp_path, "new.jsonl", 1e-5, 2e-5)
    assert main(["bench", "--compare", old, new]) == 1
    out = capsys.readouterr().out
    assert "regression: PubMed N=2 float32 csr: 100.0 % slower" in out
    assert "2 products compared, 1 regressions" in out
    assert main(["bench", "--compare", old, old]) == 0
    assert main(["bench", "--compare", old, new, "--json"]) == 1
    assert [c["verdict"] for c in json.loads(capsys.readouterr().out.split("\n", 1)[1])["changes"]]


def test_a_slower_baseline_is_said_and_is_no_regression(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = tmp_path / "old.jsonl", tmp_path / "new.jsonl"
    for path, seconds in ((old, 1e-5), (new, 2e-5)):
        append_record(path, record(system="cusparse-csr1", seconds=seconds))
        append_record(path, record(system="csr", config={"reorder": "rcm"}))
    assert main(["bench", "--compare", str(old), str(new)]) == 0
    out = capsys.readouterr().out
    assert "baseline slower: PubMed N=128 float32 cusparse-csr1: 100.0 % slower" in out
    assert "2 products compared, 0 regressions" in out
    (tmp_path / "new.jsonl").unlink()
    append_record(new, failed(system="csr", config={"reorder": "rcm"}))
    assert main(["bench", "--compare", str(old), str(new)]) == 1
    out = capsys.readouterr().out
    assert "regression: PubMed N=128 float32 csr rcm: crash, ended by SIGSEGV" in out


def test_a_file_or_a_folder_is_measured_as_a_suite_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    for name in ("one", "two"):
        write_npz(folder / f"{name}.npz", random(30, 20, nnz=50, seed=1))
    asked: list[list[tuple[str, int, str]]] = []

    def run_suite(expansion: Any, options: Any, **_: Any) -> Outcome:
        assert options.device == "cpu"
        asked.append([(each.matrix.name, each.n, each.system) for each in expansion.entries])
        assert {each.suite for each in expansion.entries} == {expansion.suite.name}
        return Outcome()

    monkeypatch.setattr("sparsetile.bench.driver.run_suite", run_suite)
    monkeypatch.chdir(tmp_path)
    for word in ("mine", "mine/one.npz"):
        assert main(["bench", word, "-n", "8", "--device", "cpu"]) == 0
    assert {name for name, _, _ in asked[0]} == {"one", "two"}
    assert {(name, n) for name, n, _ in asked[1]} == {("one", 8)}
    assert {"cpu", "scipy", "torch-csr"} <= {system for _, _, system in asked[1]}
    _fails(capsys, ["bench", "mine", "--data", "mine"], "bench: --data must be omitted with a file")

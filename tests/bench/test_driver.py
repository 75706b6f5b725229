"""The driver: a failing entry costs itself alone, interrupted runs resume, records are whole."""

from __future__ import annotations

import io
import multiprocessing
import platform
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from sparsetile.bench import driver
from sparsetile.bench.driver import Options, Outcome, run_suite
from sparsetile.bench.expansion import Expansion, MatrixSpec, expand
from sparsetile.bench.matrices import materialise
from sparsetile.bench.pool import Pool
from sparsetile.bench.record import read_records
from sparsetile.bench.suites import load_suite
from sparsetile.check.environment import core_count
from sparsetile.intake import read_matrix
from tests.bench import fake_worker


class _Forked(Pool):
    """Fake workers need no fresh interpreter, and start at once."""

    context = multiprocessing.get_context("fork")


def _fake_pool(absent: str = "") -> Pool:
    return _Forked(lambda family: fake_worker.absent if family == absent else fake_worker.serve)


def _expansion(folder: Path, names: list[str], rounds: int = 1) -> Expansion:
    for name in names:
        np.savez(
            folder / f"{name}.npz",
            indptr=np.array([0, 1, 2]),
            indices=np.array([0, 1], dtype=np.int32),
            shape=np.array([2, 2]),
        )
    listed = ", ".join(f'"{name}"' for name in names)
    path = folder / "mine.toml"
    path.write_text(
        f'matrices = [{listed}]\nn = [8]\ndevice = "cpu"\nsystems = ["cpu"]\nrounds = {rounds}\n'
    )
    return expand(load_suite(str(path)), data=folder, device="cpu")


def _run(
    expansion: Expansion, out: Path, workers: Pool | None = None, **options: object
) -> tuple[Outcome, dict[tuple[str, str], dict]]:  # type: ignore[type-arg]
    outcome = run_suite(
        expansion,
        Options(device="cpu", out=out, commit="abc", timeout=5.0, **options),  # type: ignore[arg-type]
        console=Console(file=io.StringIO()),
        pool=workers or _fake_pool(),
    )
    records = read_records(out)[0]
    return outcome, {(r["matrix"], r["system"]): r for r in records}


def test_every_entry_gives_one_whole_record(tmp_path: Path) -> None:
    outcome, records = _run(_expansion(tmp_path, ["a", "b"]), tmp_path / "out.jsonl")
    assert outcome.measured == 6 and not outcome.troubles
    found = records["a", "cpu"]
    assert found["time"]["p50"] == pytest.approx(1.1e-3)
    assert found["gflops"] == pytest.approx(1000 / 1.1e-3 / 1e9)
    assert found["environment"]["device_name"] == "Fake CPU"
    assert found["environment"]["commit"] == "abc"


def test_a_crash_costs_its_own_entry_alone(tmp_path: Path) -> None:
    outcome, records = _run(_expansion(tmp_path, ["a", "crash", "b"]), tmp_path / "out.jsonl")
    broken = records["crash", "cpu"]
    assert broken["status"] == "crash"
    assert broken["reason"] == "ended by SIGSEGV: segment broken"
    assert records["b", "cpu"]["status"] == records["crash", "scipy"]["status"] == "ok"
    assert records["a", "cpu"]["pid"] != records["b", "cpu"]["pid"]
    assert outcome.troubles == ["crash N=8 cpu: crash, ended by SIGSEGV: segment broken"]


def test_a_timeout_costs_its_own_entry_alone(tmp_path: Path) -> None:
    _, records = _run(_expansion(tmp_path, ["hang", "b"]), tmp_path / "out.jsonl")
    assert records["hang", "cpu"]["status"] == "timeout"
    assert records["hang", "cpu"]["reason"] == "no answer within 5 s"
    assert records["b", "cpu"]["status"] == "ok"


def test_a_family_that_does_not_start_is_named_once_and_left_for_the_next_run(
    tmp_path: Path,
) -> None:
    expansion, out = _expansion(tmp_path, ["a", "b"]), tmp_path / "out.jsonl"
    outcome, records = _run(expansion, out, _fake_pool(absent="cpu"))
    assert len(outcome.troubles) == 1
    assert "cpu: worker does not start" in outcome.troubles[0]
    assert "ImportError: no such library" in outcome.troubles[0]
    assert {system for _, system in records} == {"scipy", "torch-csr"}
    assert _run(expansion, out)[0].measured == 2


def test_a_finished_entry_is_not_measured_again(tmp_path: Path) -> None:
    expansion, out = _expansion(tmp_path, ["a", "b"]), tmp_path / "out.jsonl"
    _run(expansion, out)
    lines = out.read_text().splitlines()
    out.write_text("\n".join(lines[:5]) + "\n" + lines[5][:50])  # the run, and four records
    outcome, records = _run(expansion, out)
    assert (outcome.resumed, outcome.measured) == (4, 2)
    assert len(records) == 6 and "not JSON" in outcome.troubles[0]


def test_failed_entries_are_retried_on_request_only(tmp_path: Path) -> None:
    expansion, out = _expansion(tmp_path, ["crash"]), tmp_path / "out.jsonl"
    _run(expansion, out)
    assert _run(expansion, out)[0].measured == 0
    assert _run(expansion, out, retry=True)[0].measured == 1


def test_rounds_take_turns_and_pool_their_samples(tmp_path: Path) -> None:
    _, records = _run(_expansion(tmp_path, ["a"], rounds=3), tmp_path / "out.jsonl")
    assert records["a", "cpu"]["time"]["samples"] == 9


def test_wrong_and_skipped_entries_keep_their_reasons(tmp_path: Path) -> None:
    outcome, records = _run(_expansion(tmp_path, ["wrong", "skip"]), tmp_path / "out.jsonl")
    assert records["wrong", "cpu"]["reason"] == "error is 7 times the bound"
    assert records["skip", "cpu"]["status"] == "skipped"
    assert outcome.troubles == ["wrong N=8 cpu: wrong, error is 7 times the bound"]


def test_a_generated_matrix_is_made_once_and_kept(tmp_path: Path) -> None:
    spec = MatrixSpec("tiny", "generated", generator="random",
                      params={"rows": 20, "cols": 20, "nnz": 50})  # fmt: skip
    path = materialise(spec, tmp_path)
    made = Path(path).stat().st_mtime_ns
    assert read_matrix(path).nnz == 50
    assert materialise(spec, tmp_path) == path and Path(path).stat().st_mtime_ns == made
    other = MatrixSpec("tiny", "generated", generator="random",
                       params={"rows": 20, "cols": 20, "nnz": 60})  # fmt: skip
    assert materialise(other, tmp_path) != path


def test_a_small_suite_runs_for_real_on_the_host(tmp_path: Path, environment) -> None:
    environment(SPARSETILE_DATA_DIR=tmp_path)
    path = tmp_path / "real.toml"
    path.write_text(
        'matrices = ["g"]\nn = [8]\ndevice = "cpu"\nsystems = ["cpu"]\n'
        'baselines = ["scipy", "torch-csr", "numba-loop"]\n'
        '[generate.g]\ngenerator = "power_law"\nparams = { rows = 500, nnz = 4000 }\n'
    )
    expansion = expand(load_suite(str(path)), data=None, device="cpu")
    entries = list(expansion.entries)
    (own,) = [entry for entry in entries if entry.kind == "system"]
    entries.append(replace(own, config={"reorder": "rcm"}))
    out = tmp_path / "out.jsonl"
    options = Options(device="cpu", out=out)
    outcome = run_suite(
        replace(expansion, entries=tuple(entries)), options, console=Console(file=io.StringIO())
    )
    held = read_records(out)[0]
    records = {record["system"]: record for record in held if record["reorder"] != "rcm"}
    (ordered,) = [record for record in held if record["reorder"] == "rcm"]
    assert ordered["status"] == "ok"
    assert ordered["planning"]["total"] > ordered["planning"]["reorder"] > 0
    names = {"scipy", "torch-csr", "numba-loop", "cpu"}
    assert outcome.troubles == [] and set(records) == names and len(held) == 5
    for found in held:
        state = found["environment"]
        assert found["status"] == "ok" and state["device_name"].endswith(" threads")
        cpu = state["cpu"]
        assert cpu["architecture"] == platform.machine() and cpu["cores"] == core_count()
        assert cpu["threads"] >= 1 and cpu["load_average"] >= 0
        assert {"numba", "scipy", "torch"} <= set(state["versions"])
    mine = records["cpu"]
    assert mine["status"] == "ok" and mine["nnz"] == 4000 and mine["error"]["worst"] <= 1
    assert mine["planning"]["total"] > 0 and len(mine["matrix_hash"]) == 16
    assert len({record["matrix_hash"] for record in records.values()}) == 1


def test_every_worker_reads_a_matrix_before_its_first_entry(tmp_path: Path) -> None:
    _, records = _run(_expansion(tmp_path, ["a", "b"]), tmp_path / "out.jsonl")
    for system in ("cpu", "scipy", "torch-csr"):
        paths = [Path(path).stem for path in records["b", system]["loaded"]]
        assert paths == ["a", "b"]


def test_a_time_limit_ends_the_run_and_the_next_one_goes_on(tmp_path: Path) -> None:
    expansion, out = _expansion(tmp_path, ["slow", "b", "c"]), tmp_path / "out.jsonl"
    outcome, records = _run(expansion, out, time_limit=0.9)
    assert {name for name, _ in records} <= {"slow"} and not outcome.troubles
    assert outcome.measured + len(outcome.not_run) == 9
    assert {entry.matrix.name for entry in outcome.not_run} >= {"b", "c"}
    again, records = _run(expansion, out)
    assert len(records) == 9 and again.resumed == outcome.measured and again.not_run == []


def test_an_entry_cut_short_by_the_time_limit_is_not_called_a_timeout(
    tmp_path: Path, constants
) -> None:
    constants(driver, GRACE_SECONDS=0.2)
    expansion, out = _expansion(tmp_path, ["hang"]), tmp_path / "out.jsonl"
    outcome = run_suite(
        expansion,
        Options(device="cpu", out=out, commit="abc", timeout=60.0, time_limit=4.0),
        console=Console(file=io.StringIO()),
        pool=_fake_pool(),
    )
    assert [entry.system for entry in outcome.not_run] == ["cpu"]
    assert outcome.seconds < 15 and outcome.troubles == []
    assert {record["system"] for record in read_records(out)[0]} == {"scipy", "torch-csr"}


def test_the_floor_is_found_once_a_product_and_passed_on(tmp_path: Path) -> None:
    _, records = _run(_expansion(tmp_path, ["floor"]), tmp_path / "out.jsonl")
    given = [records["floor", system]["given_floor"] for system in ("scipy", "torch-csr", "cpu")]
    assert given == [None, [1e-4, "launch"], [1e-4, "launch"]]
    assert records["floor", "cpu"]["floor_share"] == pytest.approx(1e-4 / 1.1e-3)


def test_a_baseline_that_is_often_wrong_is_one_line(tmp_path: Path) -> None:
    outcome, records = _run(_expansion(tmp_path, ["rounded", "rounded2"]), tmp_path / "out.jsonl")
    assert records["rounded", "scipy"]["status"] == "wrong"
    assert outcome.troubles == [
        "scipy float32: wrong on 2 products, by 7 to 12 times the error bound"
    ]


def _generated(name: str, nnz: int) -> MatrixSpec:
    params = {"rows": 30, "cols": 30, "nnz": nnz}
    return MatrixSpec(name, "generated", generator="random", params=params)


def test_a_matrix_that_cannot_be_made_costs_its_own_entries(tmp_path: Path, environment) -> None:
    environment(SPARSETILE_DATA_DIR=tmp_path)
    expansion = _expansion(tmp_path, ["a"])
    broken = [replace(entry, matrix=_generated("bad", 10**6)) for entry in expansion.entries]
    both = replace(expansion, entries=(*broken, *expansion.entries))
    outcome, records = _run(both, tmp_path / "out.jsonl")
    assert records["a", "cpu"]["status"] == "ok" and records["bad", "cpu"]["status"] == "error"
    assert len(outcome.troubles) == 3 and "matrix not made: " in outcome.troubles[0]


def test_a_second_command_adds_systems_without_measuring_again_what_is_there(
    tmp_path: Path,
) -> None:
    _expansion(tmp_path, ["a", "b"])
    suite, out = load_suite(str(tmp_path / "mine.toml")), tmp_path / "out.jsonl"

    def run(*systems: str) -> tuple[Outcome, dict[tuple[str, str], dict]]:  # type: ignore[type-arg]
        asked = expand(suite, data=tmp_path, device="cpu", systems=systems)
        return _run(asked, out)

    first, before = run("cpu")
    assert (first.measured, first.resumed) == (6, 0)  # with scipy and torch-csr, the yardstick
    second, after = run("torch-csr", "torch-dense")
    assert (second.measured, second.resumed) == (2, 4)
    assert set(after) - set(before) == {("a", "torch-dense"), ("b", "torch-dense")}
    assert {name: after[name] for name in before} == before


def test_the_longest_that_a_baseline_may_take_reaches_its_worker(tmp_path: Path) -> None:
    expansion = _expansion(tmp_path, ["a"])
    limited = [replace(entry, slowest=0.25) for entry in expansion.entries]
    _, records = _run(replace(expansion, entries=tuple(limited)), tmp_path / "out.jsonl")
    assert records["a", "scipy"]["given_slowest"] == 0.25

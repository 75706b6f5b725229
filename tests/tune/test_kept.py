"""Timings on disk: the same question is answered, any other is not, and damage costs nothing."""

from __future__ import annotations

import json
import threading
from dataclasses import replace

import pytest
import torch

import sparsetile as st
from sparsetile.core import settings
from sparsetile.engines.request import Request
from sparsetile.reorder import Permutation
from sparsetile.tune import choose, kept, kept_timings
from sparsetile.tune.kept import KeptTimings, fingerprint, key_of
from tests.contracts.cases import csr_of, random_matrix
from tests.locks import waits_for

CSR = csr_of(random_matrix(40, 30, 0.2))
SECONDS = {"cpu": 1e-3, "dense": 2e-3, "other": 9e-3}


def request(csr=CSR, n: int = 8, dtype=torch.float32, order=None) -> Request:
    named = Permutation("identity", None) if order is None else Permutation("given", order)
    return Request(csr, n, dtype, named)


@pytest.fixture
def timings(tmp_path) -> KeptTimings:
    return KeptTimings(tmp_path / "deep" / "folder")


def test_returns_the_timing_of_the_same_key(timings):
    key = key_of(request(), ["cpu", "dense"])
    assert timings.get(key) is None
    timings.put(key, "cpu", SECONDS, frozenset({"cpu", "dense"}))
    found = timings.get(key_of(request(), ["dense", "cpu"]))
    assert found is not None and found.system == "cpu" and found.seconds == SECONDS
    assert found.measured == {"cpu", "dense"}


def _other_column() -> st.CSR:
    indices = CSR.indices.clone()
    row = CSR.indptr[1:].diff(prepend=CSR.indptr[:1]).argmin()
    first = int(CSR.indptr[row])
    absent = set(range(30)) - set(indices[first : int(CSR.indptr[row + 1])].tolist())
    indices[first] = min(absent)
    return st.CSR(CSR.indptr, indices, CSR.values, CSR.shape)


OTHERS = {
    "pattern": lambda: key_of(request(_other_column()), ["cpu", "dense"]),
    "transpose": lambda: key_of(request(CSR.transposed()), ["cpu", "dense"]),
    "values": lambda: key_of(request(CSR.with_values(None)), ["cpu", "dense"]),
    "width": lambda: key_of(request(n=9), ["cpu", "dense"]),
    "type": lambda: key_of(request(dtype=torch.float64), ["cpu", "dense"]),
    "order": lambda: key_of(request(order=torch.arange(39, -1, -1)), ["cpu", "dense"]),
    "systems": lambda: key_of(request(), ["cpu"]),
    "deterministic": lambda: key_of(replace(request(), deterministic=True), ["cpu", "dense"]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_ignores_timings_of_another_key(timings, name):
    timings.put(key_of(request(), ["cpu", "dense"]), "cpu", SECONDS, frozenset({"cpu"}))
    assert timings.get(OTHERS[name]()) is None


@pytest.mark.parametrize("fact", ["device", "driver", "torch", "sparsetile", "kernels", "threads"])
def test_ignores_timings_of_another_machine(timings, fact):
    key = key_of(request(), ["cpu", "dense"])
    timings.put(key, "cpu", SECONDS, frozenset({"cpu"}))
    assert timings.get({**key, fact: "another"}) is None
    # Not even where the file's name would be the same.
    (path,) = timings.folder.glob("*.json")
    path.write_text(path.read_text().replace(f'"{fact}": ', f'"{fact}": 1, "before": '))
    assert timings.get(key) is None


def test_given_orders_differ_by_their_rows():
    first, second = torch.arange(40), torch.arange(39, -1, -1)
    keys = [key_of(request(order=order), ["cpu"])["order"] for order in (first, second, first)]
    assert keys[0] == keys[2] != keys[1]


def test_fingerprint_tells_rows_and_columns_apart(constants):
    whole = fingerprint(CSR)
    constants(kept, CHUNK_ENTRIES=7)
    assert fingerprint(CSR) == whole, "the same in pieces"
    moved = st.CSR(CSR.indptr.flip(0).neg() + CSR.nnz, CSR.indices, None, CSR.shape)
    assert len({whole, fingerprint(moved), fingerprint(_other_column())}) == 3
    empty = st.CSR(
        torch.zeros(4, dtype=torch.int64), torch.zeros(0, dtype=torch.int32), None, (3, 5)
    )
    assert fingerprint(empty).startswith("3x5-0-")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "3",
        '{"schema": 1}',
        '{"schema": 2, "key": {}}',
        '{"schema": 3, "key": {}}',
        "\udcff" * 3,
    ],
)
def test_a_damaged_file_is_ignored_and_replaced(timings, text):
    key = key_of(request(), ["cpu", "dense"])
    timings.put(key, "cpu", SECONDS, frozenset({"cpu"}))
    (path,) = timings.folder.glob("*.json")
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert timings.get(key) is None and timings.entries() == []
    timings.put(key, "dense", SECONDS, frozenset({"dense"}))
    assert timings.get(key).system == "dense"


@pytest.mark.parametrize(
    "change", [{"system": "other"}, {"measured": ["unknown"]}, {"seconds": {"cpu": "soon"}}]
)
def test_an_inconsistent_timing_is_ignored(timings, change):
    key = key_of(request(), ["cpu", "dense"])
    timings.put(key, "cpu", SECONDS, frozenset({"cpu"}))
    (path,) = timings.folder.glob("*.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert timings.get(key) is None


def test_a_folder_that_cannot_be_written_costs_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    timings = KeptTimings(tmp_path / "file" / "folder")
    timings.put({"a": 1}, "cpu", SECONDS, frozenset({"cpu"}))
    assert timings.get({"a": 1}) is None and timings.entries() == [] and timings.clear() == 0


def test_the_oldest_go_when_there_are_too_many(timings, constants):
    constants(kept, MOST_FILES=20)
    for number in range(21):
        timings.put({"number": number}, "cpu", SECONDS, frozenset({"cpu"}))
    left = {each.key["number"] for each in timings.entries()}
    assert len(left) == 18 and 20 in left


def test_entries_come_newest_first_and_clear_removes_everything(timings):
    for number in range(3):
        timings.put({"number": number}, "cpu", SECONDS, frozenset({"cpu"}))
    assert [each.key["number"] for each in timings.entries()] == [2, 1, 0]
    (timings.folder / "damaged.json").write_text("{")
    (timings.folder / "left.1.partial").write_text("{")
    assert timings.clear() == 5 and list(timings.folder.iterdir()) == []


def test_threads_may_write_the_same_answer(timings):
    key = key_of(request(), ["cpu"])

    def work() -> None:
        for _ in range(30):
            timings.put(key, "cpu", SECONDS, frozenset({"cpu"}))
            found = timings.get(key)
            assert found is None or found.system == "cpu"

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert timings.get(key).system == "cpu" and not list(timings.folder.glob("*.partial"))


def test_a_second_plan_measures_nothing(calls_of):
    first = st.plan(CSR, 8, tune="measure")
    assert first.info["considered_by"] == "measure" and kept_timings().entries()

    measured = calls_of(choose, "measure_systems")
    second = st.plan(CSR, 8, tune="measure")
    assert second.info["considered_by"] == "kept" and second.system == first.system
    assert second.info["considered"] == first.info["considered"]
    assert "chosen: measured earlier" in second.explain()
    assert not measured
    st.plan(CSR, 9, tune="measure")
    assert len(measured) == 1


def test_timings_are_kept_where_the_settings_say(tmp_path, environment):
    environment(SPARSETILE_TUNE_DIR=tmp_path / "mine")
    st.plan(CSR, 8, tune="measure")
    assert (
        settings.tune_dir() == tmp_path / "mine" and len(list((tmp_path / "mine").iterdir())) == 1
    )


def test_an_answer_for_this_process_waits_for_a_thread_that_adds_another(timings):
    key = key_of(request(), ["cpu", "dense"])
    measured = frozenset({"cpu"})
    assert waits_for(kept._lock, lambda: timings.put(key, "cpu", SECONDS, measured, complete=False))
    assert timings.get(key) is not None


def test_the_order_in_which_a_question_is_asked_does_not_count(timings):
    key = key_of(request(), ["cpu", "dense"])
    timings.put(key, "cpu", SECONDS, frozenset({"cpu"}))
    assert timings.get(dict(reversed(key.items()))).system == "cpu"


def test_timings_of_a_cpu_are_those_of_as_many_threads(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    assert key_of(request(), ["cpu"])["threads"] == 7

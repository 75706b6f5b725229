"""Records: what is valid, what is refused and in which words, and files of them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from sparsetile.bench.record import append_record, entry_key, read_records, validate
from sparsetile.core.errors import DataError

from .fakes import environment, failed, record


def test_a_record_survives_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    written = [record(n=32), record(n=64)]
    for one in written:
        append_record(path, one)
    assert read_records(path) == (written, [])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"schema": 3}, "record: schema must be 1 or 2, got 3."),
        ({"matrix": 7}, "record: matrix must be text, got 7."),
        ({"nnz": -1}, "record: nnz must be 0 or more, got -1."),
        ({"nnz": 1.5}, "record: nnz must be a whole number, got 1.5."),
        ({"n": True}, "record: n must be a whole number, got True."),
        ({"status": "fine"}, "record: status must be one of "),
        ({"op": "gemm"}, "record: op must be one of "),
        ({"config": {"layout": "up"}}, "record: layout must be one of "),
        ({"yardstick": "scipy"}, "record: yardstick must be a list of baselines, got 'scipy'."),
        ({"time": {"p20": 1.0, "p50": 1.0}}, "record: time.p80 must be seconds above 0, got None."),
        ({"time": {"p20": 3.0, "p50": 1.0, "p80": 4.0}}, "record: time must have p20 <= p50"),
        ({"time": {"p20": 0, "p50": 1.0, "p80": 4.0}}, "record: time.p20 must be seconds above 0"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named(change: dict[str, Any], text: str) -> None:
    with pytest.raises(DataError) as caught:
        validate({**record(), **change})
    assert str(caught.value).startswith(text)


def test_a_missing_field_is_named() -> None:
    found = record()
    del found["rows"]
    with pytest.raises(DataError, match="record: rows must be present, got nothing"):
        validate(found)


def test_a_failed_record_needs_a_reason() -> None:
    found = failed()
    del found["reason"]
    with pytest.raises(DataError, match="record: reason must be present"):
        validate(found)


def test_a_line_that_is_no_object_is_refused() -> None:
    with pytest.raises(DataError, match="line must be a JSON object, got list"):
        validate([1])


def test_damaged_lines_are_named_and_the_others_kept(tmp_path: Path) -> None:
    path = tmp_path / "b.jsonl"
    lines = [json.dumps(record()), '{"schema": 1, "matr', json.dumps({"schema": 9})]
    path.write_text("\n".join(lines) + "\n")
    records, damaged = read_records(path)
    assert len(records) == 1
    assert [line.line for line in damaged] == [2, 3]
    assert "not JSON" in str(damaged[0]) and "schema must be 1 or 2, got 9" in str(damaged[1])


def test_appending_after_a_torn_line_starts_a_fresh_one(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps(record())[:100])
    append_record(path, record(n=64))
    records, damaged = read_records(path)
    assert [one["n"] for one in records] == [64] and len(damaged) == 1


def test_of_two_records_with_one_key_the_later_counts(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    append_record(path, failed(n=32))
    append_record(path, record(n=32))
    assert [one["status"] for one in read_records(path)[0]] == ["ok"]


def test_a_missing_file_is_an_error_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="path must be an existing file of records"):
        read_records(tmp_path / "none.jsonl")


def test_a_binary_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    path.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(DataError, match="path must be a text file of records"):
        read_records(path)


def test_the_key_tells_configurations_apart_but_not_machines() -> None:
    first = record()
    assert entry_key(first) == entry_key({**first, "environment": {}})
    assert entry_key(first) != entry_key({**first, "config": {"reorder": "rcm"}})


def test_records_of_the_first_schema_are_still_read(tmp_path: Path) -> None:
    path = tmp_path / "old.jsonl"
    path.write_text(json.dumps({**record(), "schema": 1}) + "\n")
    records, damaged = read_records(path)
    assert [one["schema"] for one in records] == [1] and damaged == []


def test_what_a_run_shares_stands_in_one_line(tmp_path: Path) -> None:
    path, other = tmp_path / "f.jsonl", environment(date="2026-01-02T00:00:00Z")
    written = [record(n=32), record(n=64), record(n=128, environment=other), record(n=256)]
    for one in written:
        append_record(path, one)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [("environment" in line, "matrix" in line) for line in lines] == [
        (True, False), (False, True), (False, True), (True, False), (False, True), (False, True),
    ]  # fmt: skip
    assert len({line["run"] for line in lines}) == 2 and not any("key" in line for line in lines)
    assert read_records(path) == (written, [])


def test_files_of_both_forms_are_joined_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "g.jsonl"
    append_record(path, record(n=32))
    run, own = path.read_text().splitlines()
    path.write_text(f"{own}\n{json.dumps(record(n=64))}\n{run}\n{run}\n")
    assert read_records(path) == ([record(n=32), record(n=64)], [])


def test_a_record_whose_run_was_cut_away_is_named(tmp_path: Path) -> None:
    path = tmp_path / "h.jsonl"
    append_record(path, record())
    path.write_text(path.read_text().splitlines()[1])
    records, (damage,) = read_records(path)
    assert records == [] and "run must be that of a line with an environment" in str(damage)


def test_gzipped_records_are_read_and_not_appended_to(tmp_path: Path) -> None:
    path, packed = tmp_path / "i.jsonl", tmp_path / "i.jsonl.gz"
    append_record(path, record())
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert read_records(packed) == ([record()], [])
    with pytest.raises(ValueError, match="--out must be a file that is not compressed"):
        append_record(packed, record())
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(DataError, match="path must be a text file of records"):
        read_records(packed)

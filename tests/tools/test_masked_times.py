"""tools.masked_times: the table of a record, what it refuses."""

from __future__ import annotations

import json

import pytest

from tools import masked_times


def line(sparsity: float, tokens: int, ratio: float, method: str) -> dict[str, object]:
    return {"shape": [64, 32], "sparsity": sparsity, "tokens": tokens, "ratio": ratio,
            "method": method}  # fmt: skip


def test_the_table_of_a_record(tmp_path, capsys):
    record = tmp_path / "masked.jsonl"
    lines = [{"schema": 1, "environment": {}}, line(0.5, 1, 1.5, "entries"),
             line(0.5, 8, 1.0, "dense"), line(0.9, 1, 3.456, "entries")]  # fmt: skip
    record.write_text("\n".join(map(json.dumps, lines)))
    assert masked_times.main(["--table", str(record)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "| layer | sparsity | 1 token | 8 tokens |",
        "| --- | ---: | ---: | ---: |",
        "| 64×32 | 50% | 1.50 | 1.00 (dense) |",
        "| 64×32 | 90% | 3.46 |  |",
    ]


def test_preferences_have_a_table_of_their_own():
    many = [
        line(0.5, 1, 1.1, "kept") | {"prefer": "memory", "modes": True, "bytes": 57,
                                     "dense_bytes": 100},
        line(0.5, 16, 0.5, "dense") | {"prefer": "memory", "modes": True, "bytes": 56,
                                       "dense_bytes": 100},
    ]  # fmt: skip
    few = [line(0.5, 1, 1.5, "entries") | {"bias": True, "dtype": "float16"}]
    assert masked_times.table(few + many).splitlines() == [
        "| layer | sparsity | 1 token |",
        "| --- | ---: | ---: |",
        "| 64×32, float16, bias | 50% | 1.50 |",
        "",
        "| prefer | sparsity | 1 token | 16 tokens |",
        "| --- | ---: | ---: | ---: |",
        "| memory | 50% | 1.10, 0.57 bytes | 0.50 (dense), 0.56 bytes |",
    ]


def test_a_record_has_both_preferences_biases_and_odd_widths():
    found = masked_times.cases(((64, 32),), (0.5, 0.9), (1, 2))
    assert found[0] == masked_times.Case((64, 32), 0.5, (1, 2)) and len(found) == 14
    assert {case.prefer for case in found if case.modes} == {"speed", "memory"}
    assert [case.shape for case in found if case.shape != (64, 32)] == [(63, 31)] * 2
    assert sum(case.bias for case in found) == 2


@pytest.mark.parametrize("words", [[], ["--dtype", "float16", "--out", "x"]])
def test_refuses(words, capsys):
    with pytest.raises(SystemExit) as left:
        masked_times.main(words)
    assert left.value.code == 2 and "masked_times: error" in capsys.readouterr().err

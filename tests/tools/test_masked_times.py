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


@pytest.mark.parametrize("words", [[], ["--dtype", "float32", "--out", "x"]])
def test_refuses(words, capsys):
    with pytest.raises(SystemExit) as left:
        masked_times.main(words)
    assert left.value.code == 2 and "masked_times: error" in capsys.readouterr().err

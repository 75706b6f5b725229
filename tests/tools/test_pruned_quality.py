"""tools.pruned_quality trains, prunes, tunes and records; the record of the H200 is of its form."""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path

import pytest
import torch

from sparsetile.nn import MaskedLinear, SparseLinear
from tools import pruned_quality

RECORD = Path(__file__).resolve().parents[2] / "results" / "h200" / "pruned_quality.jsonl.gz"


def test_a_tiny_run_writes_a_record_of_every_way(tmp_path, monkeypatch, capsys):
    scale = dataclasses.replace(pruned_quality.TINY, most_steps=22, tune_steps=2, test_bytes=2**11)
    monkeypatch.setattr(pruned_quality, "TINY", scale)
    ways = [way for way in pruned_quality.ways() if way["sparsity"] == 0.5]
    monkeypatch.setattr(pruned_quality, "ways", lambda: iter(ways))
    out = tmp_path / "quality.jsonl"
    assert pruned_quality.main(["--device", "cpu", "--out", str(out)]) == 0
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [each["setting"] for each in found] == ["dense"] + ["pruned"] * len(ways)
    dense = found[0]
    assert dense["steps"] == 22 and dense["license"] == "Python Software Foundation License"
    assert all(each["environment"]["device"] == "cpu" for each in found)
    for each, way in zip(found[1:], ways, strict=True):
        assert {name: each[name] for name in way} == way
        assert each["perplexity"] > 1 and each["tuned_perplexity"] > 1
        assert 0 < each["bytes"] < each["dense_bytes"]
        assert each["dense_perplexity"] == dense["perplexity"]
    assert "fine-tuned" in capsys.readouterr().out


def test_time_over_ends_the_run():
    scale = dataclasses.replace(pruned_quality.TINY, most_steps=21, tune_steps=1, test_bytes=2**11)
    found = list(pruned_quality.qualities(scale, torch.device("cpu"), lambda: 0.0))
    assert [each["setting"] for each in found] == ["dense"]


def test_what_is_held_out_is_not_trained_on():
    train, test, facts = pruned_quality.corpus(2**17)
    assert len(train) + len(test) == sum(facts["text_bytes"]) and len(test) > 0
    piece = bytes(test[:200].tolist())
    assert piece not in bytes(train.tolist())


@pytest.mark.parametrize("way", [*pruned_quality.ways()], ids=str)
def test_layers_that_are_timed_are_checked(way):
    torch.manual_seed(0)
    layer = pruned_quality._pruned_layer(torch.randn(512, 512), way, 0)
    assert isinstance(layer, SparseLinear if way["block"] else MaskedLinear)
    assert layer.sparsity == pytest.approx(way["sparsity"], abs=0.1)
    x = torch.randn(4, 512)
    with torch.no_grad():
        pruned_quality._check(layer, x)
        layer.forward = lambda x: x.new_ones(4, 512)
        with pytest.raises(ValueError, match="pruned_quality: the layer must be right, got"):
            pruned_quality._check(layer, x)


def test_the_record_shows_what_the_page_says():
    """The table of docs/how-to/pruned-quality.md, cell by cell."""
    records = [json.loads(line) for line in gzip.decompress(RECORD.read_bytes()).splitlines()]
    page = (RECORD.parents[2] / "docs" / "how-to" / "pruned-quality.md").read_text()
    names = {"2:4": "2:4", "unstructured": "any weights", "block": "blocks of 64"}
    pruned = [each for each in records if each["setting"] == "pruned"]
    speed = [each for each in records if each["setting"] == "speed"]

    def number(value: float) -> str:
        return f"{value:,.2f}" if value < 100 else f"{value:,.0f}"

    pairs = {}
    for each in pruned:
        pairs.setdefault((each["pattern"], each["sparsity"]), {})[each["method"]] = each
    assert len(pairs) == 9
    for (pattern, sparsity), ways in pairs.items():
        both = [ways[method] for method in ("magnitude", "wanda")]
        times = [
            f"{each['dense_seconds'] / each['seconds']:.2f}"
            for each in speed
            if (each["pattern"], each["sparsity"]) == (pattern, sparsity)
            and each["block"] == both[0]["block"]
        ]
        cells = [
            names[pattern], f"{sparsity * 100:.0f} %",
            f"{both[0]['bytes'] / both[0]['dense_bytes']:.2f}",
            *(number(each["perplexity"]) for each in both),
            *(number(each["tuned_perplexity"]) for each in both),
            " / ".join(times),
        ]  # fmt: skip
        assert f"| {' | '.join(cells)} |" in page
    dense = next(each for each in records if each["setting"] == "dense")
    assert f"{dense['perplexity']:.2f}" in page and f"{dense['tuned_perplexity']:.2f}" in page
    assert f"{dense['steps']} steps" in page

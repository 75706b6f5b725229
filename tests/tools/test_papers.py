"""Pages generated from the records show what the records say."""

from __future__ import annotations

import pytest

from sparsetile.bench.figures import papers as all_papers
from tools import paper_readings, papers, summary, which_system


@pytest.mark.parametrize("tool", [papers, summary, which_system], ids=lambda tool: tool.PAGE.name)
def test_pages_show_what_the_records_say(tool, tmp_path, monkeypatch, capsys):
    assert tool.main(["--check"]) == 0
    page = tmp_path / tool.PAGE.name
    page.write_text(tool.PAGE.read_text(encoding="utf-8").replace("cuSPARSE", "another", 1))
    monkeypatch.setattr(tool, "PAGE", page)
    assert tool.main(["--check"]) == 1 and "is old: run" in capsys.readouterr().err
    assert tool.main([]) == 0 and tool.main(["--check"]) == 0


def test_every_figure_that_can_be_repeated_has_a_reading_and_a_record():
    found = {each.name: each for paper in all_papers() for each in paper.figures}
    repeated = {name for name, each in found.items() if each.suite or each.tool}
    assert set(paper_readings.READINGS) == repeated
    for name in repeated:
        assert (paper_readings.RECORDS / found[name].record).is_file(), name
        assert found[name].why, name


def test_ratios_are_times_of_the_other_over_ours():
    name = "brp.jsonl"
    mine = paper_readings.select(name, "brp", {"ablation": "1x4"}, n=32, matrix="PubMed")
    times = {
        r["system"]: r["time"]["p50"]
        for r in paper_readings.suite_records(name)
        if (r["matrix"], r["n"]) == ("PubMed", 32) and r["kind"] == "baseline"
    }
    for algorithm in paper_readings.ALGORITHMS:
        expected = times[algorithm] / mine[0]["time"]["p50"]
        assert paper_readings.over(name, mine, algorithm) == [pytest.approx(expected)]
    assert mine[0]["speedup"] == pytest.approx(min(times.values()) / mine[0]["time"]["p50"])

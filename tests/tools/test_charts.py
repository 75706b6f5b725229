"""The charts of the documentation show what the records say."""

from __future__ import annotations

import dataclasses

import pytest

from tools import charts


@pytest.mark.parametrize("make", charts.CHARTS, ids=lambda make: make.__name__)
def test_charts_show_the_points_of_the_records(make):
    chart = make()
    assert sum(map(len, chart.series.values())) >= 17
    assert chart.is_current(), f"run `python -m tools.charts`: {chart.path.name} is old"


def test_a_chart_of_other_points_is_old_until_it_is_drawn(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(charts, "FOLDER", tmp_path)
    chart = charts.Chart("small", "A title", "entries", {"one": [(10.0, 1.5), (1e5, 0.9)]})
    assert not chart.is_current()
    charts.draw(chart)
    text = chart.path.read_text(encoding="utf-8")
    assert chart.is_current() and ">A title<" in text and ">one (geomean)<" in text
    assert not dataclasses.replace(chart, series={"one": [(10.0, 1.6)]}).is_current()

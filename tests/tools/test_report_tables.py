"""The choice of ``auto`` against the fastest of everything in the same file."""

from __future__ import annotations

from tools.report import render_markdown
from tools.report_tables import hindsight

from tests.bench.fakes import failed, record


def products(matrix: str, seconds: dict[str, float], **more):
    return [record(matrix, system, 128, 1e-5 * p50, **more) for system, p50 in seconds.items()]


RECORDS = [
    *products("one", {"auto": 2.0, "csr": 2.0, "acc": 3.0, "cusparse-csr1": 4.0}),
    *products("two", {"auto": 3.0, "csr": 3.0, "acc": 2.0, "cusparse-csr1": 4.0}),
    *products("three", {"auto": 3.0, "csr": 3.1, "acc": 5.0, "cusparse-csr1": 2.4}),
    *products("four", {"auto": 0.9, "csr": 1.0, "acc": 5.0, "cusparse-csr1": 2.5}),
]


def test_losses_are_counted_product_by_product():
    (row,) = hindsight(RECORDS)
    assert row.endswith("| 128 | 1.170 | 1.50 two | acc | 2 | 4 | acc, csr |")


def test_products_without_two_systems_by_name_are_left_out():
    few = products("one", {"auto": 2.0, "csr": 1.0, "dense": 0.5, "cusparse-csr1": 4.0})
    assert hindsight(few) == []
    ended = [
        failed(matrix=r["matrix"], system="acc") if r["system"] == "acc" else r for r in RECORDS
    ]
    assert hindsight(ended) == []


def test_steps_of_an_ablation_are_no_choice():
    step = products("one", {"acc": 0.1}, config={"ablation": "bits"})
    assert hindsight([*RECORDS, *step]) == hindsight(RECORDS)


def test_the_report_has_the_table():
    text = render_markdown(RECORDS)
    assert "\n## The choice of `auto` against hindsight" in text
    assert hindsight(RECORDS)[0] in text
    assert "hindsight" not in render_markdown(RECORDS[1:4])

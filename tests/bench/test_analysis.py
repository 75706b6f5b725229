"""Ratios: the best baseline of the same product, geomeans, wins, losses, break-even."""

from __future__ import annotations

import math

import pytest
from tools.report_tables import other_products

from sparsetile.bench.analysis import (
    attach_baselines,
    break_even,
    geomean,
    over,
    summarise,
    system_label,
)
from sparsetile.bench.compare import compare

from .fakes import environment, failed, record


def _timed(seconds: float, spread: float = 0.0) -> dict[str, float]:
    return {"p20": seconds * (1 - spread), "p50": seconds, "p80": seconds * (1 + spread)}


def test_the_yardstick_is_the_fastest_cusparse_algorithm() -> None:
    records = [
        record(system="cusparse-csr1", seconds=4e-5),
        record(system="cusparse-csr2", seconds=2e-5),
        record(system="cusparse-csr3", seconds=3e-5),
        record(system="torch-csr", seconds=1e-6),  # no yardstick, however fast
        record(system="csr", seconds=1e-5),
    ]
    csr = attach_baselines(records)[-1]
    assert csr["baseline"] == "cusparse-csr2" and csr["speedup"] == pytest.approx(2.0)


def test_products_of_another_width_or_machine_are_no_yardstick() -> None:
    records = [
        record(system="cusparse-csr1", n=32),
        record(system="cusparse-csr1", n=128, environment=environment(device_name="Other")),
        record(system="csr", n=128),
    ]
    assert attach_baselines(records)[-1]["speedup"] is None


def test_sixteen_bit_products_are_held_against_float32_too() -> None:
    records = [
        record(system="cusparse-csr2", seconds=2e-5),
        record(system="cusparse-csr3", dtype="bfloat16", seconds=9e-5),
        record(system="csr", dtype="bfloat16", seconds=1e-5),
    ]
    assert attach_baselines(records)[-1]["speedup"] == pytest.approx(2.0)


def test_a_record_may_name_what_it_is_held_against() -> None:
    own = {"yardstick": ["torch-dense"]}
    records = [
        record(system="cusparse-csr1", seconds=1e-6),
        record(system="torch-dense", seconds=4e-5),
        record(system="bcsr", seconds=1e-5, **own),
        record(system="csr", seconds=1e-6),
    ]
    *_, pruned, usual = attach_baselines(records)
    assert (pruned["baseline"], pruned["speedup"]) == ("torch-dense", pytest.approx(4.0))
    assert usual["baseline"] == "cusparse-csr1"
    groups = {(g.label, g.over): g.geomean for g in summarise(records) if g.kind == "system"}
    assert groups == {
        ("bcsr", "torch-dense"): pytest.approx(4.0),
        ("csr", ""): pytest.approx(1.0),
    }


def test_naming_the_usual_yardstick_changes_nothing() -> None:
    usual = ["cusparse-csr1", "cusparse-csr2", "cusparse-csr3"]
    assert over(record(yardstick=usual)) == over(record()) == ""
    assert over(record(yardstick=usual[:1])) == "cusparse-csr1"


def test_a_linear_layer_is_held_against_a_linear_layer() -> None:
    linear = {"config": {"layout": "linear"}, "yardstick": ["torch-dense"]}
    records = [
        record(system="torch-dense", seconds=8e-5),
        record(system="torch-dense", seconds=2e-5, **linear),
        record(system="bcsr", seconds=1e-5, **linear),
    ]
    found = attach_baselines(records)[-1]
    assert found["speedup"] == pytest.approx(2.0)
    assert system_label(found) == "bcsr linear"


def test_a_product_in_fp8_is_held_against_sixteen_bits_too() -> None:
    own = {"yardstick": ["torch-dense"]}
    records = [
        record(system="torch-dense", dtype="bfloat16", seconds=4e-5, **own),
        record(system="bcsr", dtype="float8_e4m3fn", seconds=1e-5, **own),
    ]
    assert attach_baselines(records)[-1]["speedup"] == pytest.approx(4.0)
    dense = record(system="torch-dense", dtype="float8_e4m3fn", seconds=2e-5, **own)
    assert attach_baselines([*records, dense])[1]["speedup"] == pytest.approx(2.0)


def test_on_a_cpu_the_yardstick_is_scipy_or_torch() -> None:
    host = environment(device="cpu")
    records = [
        record(system="scipy", seconds=2e-3, environment=host),
        record(system="cpu", seconds=1e-3, environment=host),
    ]
    assert attach_baselines(records)[-1]["baseline"] == "scipy"


def test_break_even_counts_planning_without_compilation() -> None:
    slow = record(system="cusparse-csr1", seconds=2e-5, planning={"build": 0.0, "total": 0.0})
    fast = record(seconds=1e-5, planning={"build": 1e-3, "compile": 9.0, "total": 9.001})
    assert break_even(fast, slow) == pytest.approx(100)
    assert break_even(slow, fast) is None


def test_break_even_counts_what_no_stage_of_planning_is_named_for() -> None:
    slow = record(system="cusparse-csr1", seconds=2e-5, planning={"build": 0.0, "total": 0.0})
    split = {"reorder": 2e-3, "build": 1e-3, "compile": 9.0, "total": 9.005}
    assert break_even(record(seconds=1e-5, planning=split), slow) == pytest.approx(500)


def test_break_even_adds_up_the_stages_of_a_record_without_a_total() -> None:
    slow = record(system="cusparse-csr1", seconds=2e-5, planning={"build": 0.0})
    split = {"reorder": 2e-3, "build": 1e-3, "compile": 9.0}
    assert break_even(record(seconds=1e-5, planning=split), slow) == pytest.approx(300)


def test_other_products_are_held_against_the_sum_of_the_same_system_and_order() -> None:
    records = [
        record("a", "csr", seconds=1e-5),
        record("a", "csr", seconds=5e-5, config={"reorder": "rcm"}),
        record("a", "csr", seconds=2e-5, op="transpose"),
        record("a", "csr", seconds=2e-5, op="sddmm"),  # another computation
        record("b", "csr", seconds=2e-5, op="transpose"),  # whose sum was not measured
        record("a", "cusparse-csr1", seconds=2e-5, op="transpose"),
    ]
    (found,) = other_products(records)
    assert found == "| transpose, float32, Test GPU | 128 | csr | 2.00 | 2.00 | 2.00 a | 1 |"


def test_sixteen_bit_products_know_their_ratio_to_float32_alone() -> None:
    records = [
        record(system="cusparse-csr2", seconds=4e-5),
        record(system="cusparse-csr3", dtype="float16", seconds=2e-5),
        record(system="csr", dtype="float16", seconds=1e-5),
        record(system="csr", dtype="bfloat16", n=64),  # no baseline of this width
    ]
    _, _, half, alone = attach_baselines(records)
    assert half["speedup"] == pytest.approx(2.0)
    assert half["float32_speedup"] == pytest.approx(4.0)
    assert alone.get("float32_speedup") is None


def test_the_summary_counts_wins_and_lists_every_loss() -> None:
    records = []
    for matrix, seconds in (("a", 1e-5), ("b", 4e-5), ("c", 2e-5)):
        records += [
            record(matrix, "cusparse-csr1", seconds=2e-5),
            record(matrix, "csr", seconds=seconds),
        ]
    records.append(failed(matrix="d", system="csr"))
    group = next(g for g in summarise(records) if g.system == "csr")
    assert group.geomean == pytest.approx(1.0)
    assert (group.won, group.count) == (2, 3)
    assert (group.worst_matrix, group.worst) == ("b", pytest.approx(0.5))
    assert [loss["matrix"] for loss in group.losses] == ["b"]


def test_geomean_of_nothing_is_nan() -> None:
    assert math.isnan(geomean([]))


def test_a_slowdown_beyond_the_noise_is_a_regression() -> None:
    old, new = record(time=_timed(1e-5, 0.01)), record(time=_timed(1.2e-5, 0.01))
    assert [change.verdict for change in compare([old], [new]).changes] == ["slower"]
    assert compare([new], [old]).changes[0].verdict == "faster"


def test_a_slowdown_within_the_noise_is_none() -> None:
    old, new = record(time=_timed(1e-5, 0.1)), record(time=_timed(1.2e-5, 0.1))
    assert compare([old], [new]).regressions == []


def test_a_change_under_three_percent_is_none_however_quiet_the_clock() -> None:
    old, new = record(time=_timed(1e-5)), record(time=_timed(1.02e-5))
    assert compare([old], [new]).regressions == []


def test_a_product_that_now_fails_is_a_regression() -> None:
    found = compare([record()], [failed()])
    assert [change.verdict for change in found.regressions] == ["broken"]


def test_files_without_a_common_product_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="compare: OLD and NEW must be of the same suite"):
        compare([record(n=32)], [record(n=64)])


def test_measurements_of_one_file_only_are_listed() -> None:
    found = compare([record(n=32), record(n=64)], [record(n=32), record(n=128)])
    assert len(found.missing) == 1 and "|64|" in found.missing[0]
    assert len(found.added) == 1 and "|128|" in found.added[0]

"""The choice of a system: predictions for each able one, or measurements of each."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from sparsetile.core.device import Machine
from sparsetile.formats.pairs import distinct_pairs
from sparsetile.reorder import Permutation
from sparsetile.systems import SYSTEMS, Request, base
from sparsetile.tune import choose, measure, measure_systems, predict_systems
from tests.contracts.cases import assert_close, csr_of, random_matrix

CPU = torch.device("cpu")


def request(density: float = 0.05, n: int = 16, **kwargs) -> Request:
    csr = csr_of(random_matrix(300, 200, density), **kwargs)
    return Request(csr, n, torch.float32, Permutation("identity", None))


def test_every_system_has_a_prediction():
    found = predict_systems(request(), list(SYSTEMS))
    assert found.keys() == SYSTEMS.keys()
    assert all(seconds > 0 for seconds in found.values())


def test_only_the_able_are_predicted():
    assert list(predict_systems(request(), ["cpu", "dense"])) == ["cpu", "dense"]


def test_a_sparser_matrix_is_predicted_to_be_cheaper_and_a_dense_one_to_prefer_dense():
    sparse, full = (predict_systems(request(density), ["cpu", "dense"]) for density in (0.001, 1.0))
    assert sparse["cpu"] < full["cpu"] and sparse["dense"] == full["dense"]
    assert min(sparse, key=sparse.__getitem__) == "cpu"
    assert min(full, key=full.__getitem__) == "dense"


def test_a_wider_product_is_predicted_to_cost_more():
    able = list(SYSTEMS)
    narrow, wide = predict_systems(request(n=8), able), predict_systems(request(n=800), able)
    assert all(narrow[name] < wide[name] for name in able)


def in_blocks(kept: int, of: int, *, holes: bool = False) -> Request:
    """A pruned weight of 16 bits: ``kept`` of each ``of`` blocks of 64 are there."""
    mask = (np.arange(40 * 40).reshape(40, 40) * 7 % of) < kept
    dense = np.kron(mask, np.ones((64, 64)))
    if holes:
        dense[:, ::2] = 0
    csr = csr_of(sp.csr_array(dense), dtype=torch.float16)
    return Request(csr, 4096, torch.float16, Permutation("identity", None))


def test_blocks_are_predicted_by_the_largest_of_their_three_terms(monkeypatch):
    ceilings = Machine("toy", 4e12, 9.1e12, 0, 0, 0, 400e12, 1e-6)
    monkeypatch.setattr(choose, "machine", lambda device: ceilings)
    wanted = in_blocks(1, 10)
    blocks = 160
    tensor = blocks * 8192 * 4096 / (0.6 * 800e12)
    copied = blocks * (64 * 2 * 4096 + 8192 * 16) / (0.9 * 9.1e12)
    once = (blocks * 8192 + 2 * 4096 * (2560 + 2560)) / (0.75 * 4e12)
    found = max(tensor, copied, once)
    assert predict_systems(wanted, ["bcsr", "csr"])["bcsr"] == pytest.approx(1e-6 + found)
    slow = dataclasses.replace(ceilings, l2_gather=1e10)
    monkeypatch.setattr(choose, "machine", lambda device: slow)
    found = predict_systems(wanted, ["bcsr", "csr"])["bcsr"]
    assert found == pytest.approx(1e-6 + copied * 910)
    slow = dataclasses.replace(ceilings, dense_flops=1e12)
    monkeypatch.setattr(choose, "machine", lambda device: slow)
    found = predict_systems(wanted, ["bcsr", "csr"])["bcsr"]
    assert found == pytest.approx(1e-6 + tensor * 400)
    far = dataclasses.replace(ceilings, dram=1e10)
    monkeypatch.setattr(choose, "machine", lambda device: far)
    found = predict_systems(wanted, ["bcsr", "csr"])["bcsr"]
    assert found == pytest.approx(1e-6 + once * 400)


def test_the_copy_of_a_float32_b_is_predicted_too(monkeypatch):
    ceilings = Machine("toy", 4e12, 9.1e12, 0, 0, 0, 400e12, 1e-6)
    monkeypatch.setattr(choose, "machine", lambda device: ceilings)
    wanted = dataclasses.replace(in_blocks(1, 10), dtype=torch.float32)
    blocks = 160
    copied = blocks * (64 * 4 * 4096 + 16384 * 16) / (0.9 * 9.1e12)
    once = 4 * (blocks * 4096 + 4096 * (2560 + 2560)) / (0.75 * 4e12)
    rounded = 1e-6 + 8 * 2560 * 4096 / 4e12
    found = predict_systems(wanted, ["bcsr", "csr"])["bcsr"]
    assert found == pytest.approx(1e-6 + max(copied, once) + rounded)


def test_empty_cells_cost_a_second_launch(monkeypatch):
    ceilings = Machine("toy", 4e12, 9.1e12, 0, 0, 0, 400e12, 1e-6)
    monkeypatch.setattr(choose, "machine", lambda device: ceilings)
    full, holes = (
        predict_systems(in_blocks(1, 10, holes=holes), ["bcsr", "csr"])["bcsr"]
        for holes in (False, True)
    )
    assert holes - full == pytest.approx(1e-6)


def test_a_weight_pruned_by_blocks_is_predicted_to_prefer_blocks_and_scattered_entries_not(
    monkeypatch,
):
    ceilings = Machine("toy", 4.2e12, 9.1e12, 0, 0, 0, 390e12, 2.5e-6)
    monkeypatch.setattr(choose, "machine", lambda device: ceilings)
    able = ["acc", "bcsr", "csr", "cusparse", "dense"]
    pruned = predict_systems(in_blocks(1, 10), able)
    assert min(pruned, key=pruned.__getitem__) == "bcsr"
    csr = csr_of(random_matrix(2560, 2560, 0.002), dtype=torch.float16)
    wanted = Request(csr, 4096, torch.float16, Permutation("identity", None))
    scattered = predict_systems(wanted, able)
    assert scattered["csr"] < scattered["bcsr"]


def in_windows(shared: int, n: int = 512, dtype: torch.dtype = torch.float32) -> Request:
    """A matrix whose windows of 64 rows have 256 columns; ``shared`` rows use each of them."""
    rows, each = 64 * 40, 256
    mask = np.zeros((rows, each), dtype=bool)
    at = np.arange(each)
    for row in range(shared):
        mask[(at + row) % 64, at] = True
    mask = np.tile(mask[:64], (40, 1))
    row, column = np.nonzero(mask)
    shift = row // 64 * each  # no two windows have a column in common
    matrix = sp.csr_array((np.ones(row.size), (row, column + shift)), shape=(rows, 40 * each))
    return Request(csr_of(matrix, dtype=dtype), n, dtype, Permutation("identity", None))


HOPPER = Machine("toy", 4.2e12, 9.1e12, 0, 0, 0, 390e12, 2.5e-6)


@pytest.mark.parametrize("dtype, item", [(torch.float32, 4), (torch.float16, 2)], ids=str)
@pytest.mark.parametrize("pattern", [False, True])
def test_rows_and_short_windows_are_predicted_by_the_sum_of_their_terms(dtype, item, pattern):
    wanted = in_windows(20, dtype=dtype)
    if pattern:
        bare = dataclasses.replace(wanted.csr, values=None)
        wanted = dataclasses.replace(wanted, csr=bare)
    entries, pairs = wanted.csr.nnz, distinct_pairs(wanted.csr, 8)
    assert pairs < entries / 2
    row, once = 512 * item, 40 * 256 + 64 * 40
    a_bytes = entries * (4 if pattern else 4 + item)
    machine = dataclasses.replace(HOPPER, l2_bytes=10 * row)
    found = predict_systems(wanted, ["acc", "csr"], machine)
    csr, acc = choose._CSR[item], choose._ACC[item]

    def b_and_c(rates) -> float:
        return row * (10 / rates.held + (once - 10) / rates.beyond) / 4.2e12

    gathered = row * entries / (9.1e12 * csr.entries) + row * pairs / (9.1e12 * csr.pairs)
    streamed = a_bytes / (4.2e12 * csr.a) + b_and_c(csr)
    assert found["csr"] == pytest.approx(csr.start + gathered + streamed)
    gathered = (row + acc.extra) * pairs / (9.1e12 * acc.pairs)
    assert found["acc"] == pytest.approx(acc.start + gathered + b_and_c(acc))
    roomy = predict_systems(wanted, ["acc", "csr"], dataclasses.replace(machine, l2_bytes=2**40))
    assert roomy["csr"] < found["csr"] and roomy["acc"] < found["acc"]


def test_rows_that_share_columns_are_predicted_to_be_cheaper_and_pairs_are_counted_once(
    monkeypatch,
):
    counted = []

    def count(csr, window, perm=None):
        counted.append(window)
        return distinct_pairs(csr, window, perm)

    monkeypatch.setattr(base, "distinct_pairs", count)
    together = in_windows(20)
    order = torch.randperm(together.csr.shape[0])
    apart = dataclasses.replace(together, permutation=Permutation("given", order))
    found = [predict_systems(w, ["acc", "csr", "dense"], HOPPER) for w in (together, apart)]
    assert counted == [8, 8]
    assert found[0]["csr"] < found[1]["csr"] and found[0]["acc"] < found[1]["acc"] / 2
    for able in (["csr"], ["acc"], ["csr", "cusparse", "dense"]):
        predict_systems(together, able, HOPPER)
    assert counted == [8, 8], "where tiles are no choice it would change none"
    predict_systems(together, ["csr", "wcsr"], HOPPER)
    SYSTEMS["wcsr"].build(together)
    assert counted == [8, 8, 64], "what was chosen by is not counted again to build it"


@pytest.mark.parametrize("density", [0.001, 0.03, 0.5, 1.0])
def test_uncounted_pairs_are_those_of_entries_scattered_at_random(density):
    csr = csr_of(random_matrix(800, 500, density))
    assert choose._random_pairs(csr) == pytest.approx(distinct_pairs(csr, 8), rel=0.03)
    scattered = Request(csr, 64, torch.float32, Permutation("identity", None))
    told, counted = (
        predict_systems(scattered, able, HOPPER)["csr"] for able in (["csr"], ["csr", "acc"])
    )
    assert told == pytest.approx(counted, rel=0.02)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (5, 5)])
def test_a_matrix_without_entries_has_no_pairs(shape):
    assert choose._random_pairs(csr_of(sp.csr_array(shape))) == 0


def test_float64_is_predicted_like_float32_by_its_bytes():
    single, double = (
        predict_systems(in_windows(4, dtype=dtype, n=n), ["csr", "dense"], HOPPER)["csr"]
        for dtype, n in ((torch.float32, 512), (torch.float64, 256))
    )
    assert single == pytest.approx(double, rel=0.02), "A's values alone are wider"


def test_windows_are_predicted_by_the_rows_of_B_behind_their_distinct_columns(monkeypatch):
    monkeypatch.setattr(choose, "machine", lambda device: HOPPER)
    pairs, rows = 40 * 256, 64 * 40

    def seconds(wanted: Request) -> float:
        return predict_systems(wanted, ["wcsr", "csr"])["wcsr"]

    def expected(item: int, n: int, columns: int) -> float:
        gathered = 4 * columns * pairs / (9.1e12 * choose._WCSR_L2)
        return (
            choose._WCSR_START + gathered + item * n * (pairs + rows) / (4.2e12 * choose._WCSR_DRAM)
        )

    assert seconds(in_windows(4)) == pytest.approx(expected(4, 512, 512))
    assert seconds(in_windows(4)) == seconds(in_windows(20)), "rows that share columns are free"
    # Decoding takes as long for fewer columns than 256, and for 16 bits.
    assert seconds(in_windows(4, n=100)) == pytest.approx(expected(4, 100, 256))
    assert seconds(in_windows(4, dtype=torch.float16)) == pytest.approx(expected(2, 512, 512))


def test_windows_are_predicted_to_win_where_rows_share_columns_and_to_lose_where_not(monkeypatch):
    monkeypatch.setattr(choose, "machine", lambda device: HOPPER)
    able = ["acc", "csr", "cusparse", "wcsr"]
    shared, alone = (predict_systems(in_windows(count), able) for count in (30, 1))
    assert min(shared, key=shared.__getitem__) == "wcsr"
    assert min(alone, key=alone.__getitem__) == "csr"
    half = predict_systems(in_windows(30, dtype=torch.float16), able)
    assert half["wcsr"] < shared["wcsr"]


def test_windows_are_counted_in_the_plans_order(monkeypatch):
    monkeypatch.setattr(choose, "machine", lambda device: HOPPER)
    wanted = in_windows(30)
    scattered = dataclasses.replace(
        wanted, permutation=Permutation("given", torch.randperm(wanted.csr.shape[0]))
    )
    given, worse = (predict_systems(w, ["wcsr", "csr"])["wcsr"] for w in (wanted, scattered))
    assert given < worse


def test_measuring_warms_up_and_takes_the_median():
    calls = []
    seconds = measure(lambda: calls.append(1), CPU, repeats=5)
    assert len(calls) == 7 and 0 <= seconds < 1


@pytest.mark.parametrize("pattern", [False, True], ids=["weighted", "pattern"])
def test_measured_systems_come_with_stages_that_can_be_run(pattern):
    from sparsetile.systems import runner

    wanted = request(pattern=pattern)
    seconds, stages = measure_systems(wanted, ["cpu", "dense"])
    assert seconds.keys() == stages.keys() == {"cpu", "dense"}
    assert all(value > 0 for value in seconds.values())
    B, out = torch.randn(200, 16), torch.empty(300, 16)
    for name, stage in stages.items():
        runner(stage.recipe).spmm(stage.parts, wanted.csr.values, None, B, out)
        assert stage.system == name
        assert_close(out, wanted.csr, B)

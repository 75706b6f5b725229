"""Whether a row order is looked for: only where the expected products can save its price."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import scipy.sparse as sp
import torch

import sparsetile as st
from sparsetile.core.device import H200
from sparsetile.engines.request import Request
from sparsetile.formats.column_pairs import distinct_pairs
from sparsetile.reorder import REORDERERS, Permutation
from sparsetile.tune import choose_order, orders
from sparsetile.tune.orders import OrderCost, sample_rows
from tests.contracts.cases import csr_of

ABLE = ["csr", "acc"]


def communities(count: int = 256, size: int = 32, seed: int = 0) -> st.CSR:
    """Rows of a community have the same columns; rows of all communities are mixed."""
    rng = torch.Generator().manual_seed(seed)
    member = torch.randperm(count * size, generator=rng) // size
    columns = torch.stack([torch.randperm(count * size, generator=rng)[:24] for _ in range(count)])
    rows = torch.arange(count * size).repeat_interleave(24)
    matrix = sp.coo_matrix(
        (torch.ones(rows.numel()), (rows, columns[member].reshape(-1))), shape=(count * size,) * 2
    )
    return csr_of(matrix.tocsr())


MIXED = communities()


def request(csr: st.CSR = MIXED, n: int = 512) -> Request:
    asked = Request(csr, n, torch.float32, Permutation("identity", None))
    return asked.changed(ceilings=H200)


def test_few_products_look_for_nothing_and_say_what_they_could_save(constants):
    constants(orders, REORDERERS={})  # any use would raise
    found, why = choose_order(request(), ABLE, expected_runs=1)
    assert found.perm is None
    searched = ("merging", "affinity")
    assert [line.split(":")[0] for line in why] == [f"{name} not looked for" for name in searched]
    assert "1 products might save 0." in why[0] and "it takes about" in why[0]


def test_an_order_that_pays_is_taken_and_predicted_to_be_faster():
    found, why = choose_order(request(), ABLE, expected_runs=100_000)
    assert found.name == "merging" and why[0].startswith("merging taken: predicted ")
    assert distinct_pairs(MIXED, 8, found.perm) < 0.3 * distinct_pairs(MIXED, 8)


def test_a_dear_order_is_tried_on_a_sample_before_it_is_looked_for(constants):
    seen = []

    def order(csr):
        seen.append(csr.shape[0])
        return Permutation("affinity", torch.arange(csr.shape[0]))

    constants(orders, SAMPLE_ENTRIES=20_000, REORDERERS={"affinity": order})
    dear = {"affinity": OrderCost((1e-3, 0), (1e-3, 0), sampled=True)}
    constants(orders, ORDERS=dear)
    found, why = choose_order(request(), ABLE, expected_runs=1_000_000)
    # Alike rows come together in the sample, whatever this order does.
    assert seen[0] < 1000 and found.name in ("identity", "affinity")
    seen.clear()
    scattered = csr_of(sp.random(4000, 4000, 0.01, random_state=0, format="csr"))
    found, why = choose_order(request(scattered), ABLE, expected_runs=1_000_000)
    assert found.perm is None and len(seen) == 1 and "by a sample" in why[0]


def test_an_order_that_brings_nothing_is_not_taken():
    alone = csr_of(sp.kron(sp.eye(3000), [[1.0] * 30], format="csr"))  # no two rows share a column
    found, why = choose_order(request(alone), ABLE, expected_runs=100_000)
    assert found.perm is None and why[0].startswith("merging not taken: ")
    assert why[0].endswith(" without") and "windows of 16 rows read" in why[0]


def test_an_order_with_which_rows_share_no_more_is_not_predicted(constants, monkeypatch):
    turned = Permutation("merging", torch.arange(MIXED.shape[0] - 1, -1, -1))
    constants(orders, REORDERERS={"merging": lambda csr: turned})
    constants(orders, ORDERS={"merging": OrderCost((0, 0), (0, 0))})
    asked = []

    def predict(request, able):
        asked.append(request)
        return dict.fromkeys(able, 1.0)

    monkeypatch.setattr(orders, "predict_systems", predict)
    given = request()
    found, why = choose_order(given, ABLE, expected_runs=1)
    assert found.perm is None and asked == [given] and len(why) == 1


def test_an_order_is_predicted_for_systems_that_are_nearly_as_fast(constants, monkeypatch):
    constants(orders, ORDERS={"merging": OrderCost((0, 0), (0, 0))})
    asked = []

    def predict(request, able):
        asked.append(list(able))
        seconds = {"csr": 1e-3, "acc": 1.5e-3, "wcsr": 1.7e-3}
        return {name: seconds[name] / len(asked) for name in able}

    monkeypatch.setattr(orders, "predict_systems", predict)
    found, _ = choose_order(request(), ["csr", "acc", "wcsr"], expected_runs=1)
    assert found.name == "merging" and asked == [["csr", "acc", "wcsr"], ["csr", "acc"]]


@pytest.mark.parametrize(
    ("fastest", "saved", "taken"),
    [("acc", 0.06, True), ("csr", 0.06, False), ("csr", 0.14, False), ("csr", 0.16, True)],
)
def test_an_order_must_save_more_if_rows_stay_the_fastest(
    constants, monkeypatch, fastest, saved, taken
):
    constants(orders, ORDERS={"merging": OrderCost((0, 0), (0, 0))})
    times = iter([1.0, 1.0 - saved])

    def predict(request, able):
        least = next(times)
        return {name: least if name == fastest else 1.1 for name in able}

    monkeypatch.setattr(orders, "predict_systems", predict)
    found, _ = choose_order(request(), ABLE, expected_runs=1)
    assert (found.name == "merging") == taken


def test_a_further_order_must_share_more_than_the_one_that_was_taken(constants, monkeypatch):
    constants(
        orders,
        REORDERERS={"merging": REORDERERS["merging"], "affinity": REORDERERS["lsh"]},
        ORDERS={name: OrderCost((0, 0), (0, 0)) for name in ("merging", "affinity")},
    )
    times = iter([2.0, 1.0])
    monkeypatch.setattr(
        orders, "predict_systems", lambda request, able: dict.fromkeys(able, next(times))
    )
    found, why = choose_order(request(), ABLE, expected_runs=1)
    assert found.name == "merging" and why[1].startswith("affinity not taken: ")


def test_no_order_is_searched_if_no_model_depends_on_it(constants):
    constants(orders, REORDERERS={})
    found, why = choose_order(request(), ["cpu", "dense"], 10**9)
    assert found.perm is None and why == []


def test_a_sample_takes_alike_rows_together():
    sample = sample_rows(MIXED, 20_000)
    assert 10_000 < sample.nnz <= 20_000 and sample.shape[1] == MIXED.shape[1]
    whole, part = (
        distinct_pairs(csr, 8, REORDERERS["lsh"](csr).perm) / csr.nnz for csr in (MIXED, sample)
    )
    assert abs(part / whole - 1) < 0.15
    by_chance = torch.randperm(MIXED.shape[0])[: sample.shape[0]].sort().values
    rows = csr_of(sp.csr_matrix(
        (torch.ones(MIXED.nnz), MIXED.indices, MIXED.indptr), shape=MIXED.shape
    )[by_chance.numpy()])  # fmt: skip
    assert distinct_pairs(rows, 8, REORDERERS["lsh"](rows).perm) / rows.nnz > 2 * whole


def test_a_small_matrix_is_its_own_sample():
    assert sample_rows(MIXED, MIXED.nnz) is MIXED


@pytest.mark.parametrize("runs", [0, 100])
def test_plans_say_why_they_keep_the_order(runs):
    plan = st.plan(MIXED, 8, expected_runs=runs)
    assert plan.reorder == "identity" and plan.info["orders"] == []  # the host's models know none


def test_a_plan_takes_the_order_that_was_chosen(monkeypatch):
    build = __import__("importlib").import_module("sparsetile.plan.build")
    turned = Permutation("lsh", torch.arange(MIXED.shape[0] - 1, -1, -1))
    monkeypatch.setattr(build, "choose_order", lambda *given: (turned, ["lsh taken: predicted"]))
    plan = st.plan(MIXED, 8, expected_runs=7)
    assert plan.reorder == "lsh" and "  order     lsh taken: predicted" in plan.explain()
    B = torch.randn(MIXED.shape[1], 8)
    assert torch.allclose(plan @ B, st.plan(MIXED, 8, reorder="identity") @ B, atol=1e-5)
    for options in ({"system": "cpu"}, {"reorder": "identity"}, {"tune": "none"}):
        assert st.plan(MIXED, 8, **options).reorder == "identity"


@pytest.mark.parametrize(
    "options, text",
    [
        ({"expected_runs": -1}, "expected_runs must be between 0 and 2147483647, got -1"),
        ({"expected_runs": 1.5}, "expected_runs must be a whole number, got 1.5"),
        ({"budget": 0}, "budget must be seconds above 0, got 0"),
        ({"budget": float("nan")}, "budget must be seconds above 0, got nan"),
        ({"budget": "much"}, "budget must be a number, got 'much'"),
    ],
)
def test_rejects_invalid_runs_and_seconds(options, text):
    with pytest.raises((ValueError, TypeError), match=text.replace("(", r"\(")):
        st.plan(MIXED, 8, **options)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("fits", [True, False])
def test_the_least_time_is_that_of_reading_a_and_b_and_writing_c_once(weighted, fits):
    csr = MIXED if weighted else MIXED.with_values(None)
    rows, cols = csr.shape
    moved = (8 if weighted else 4) * csr.nnz + 4 * 512 * (min(cols, csr.nnz) + rows)
    ceilings = replace(H200, l2_bytes=moved if fits else moved - 1)
    rate = ceilings.l2_gather if fits else ceilings.dram
    found = orders.least_seconds(request(csr).changed(ceilings=ceilings))
    assert found == pytest.approx(moved / rate) and found > ceilings.launch


def test_costs_differ_by_device():
    cost = OrderCost(gpu=(1.0, 0.0), host=(2.0, 0.5))
    assert cost.seconds(MIXED) == 2.0 + 0.5 * MIXED.nnz


def test_the_first_use_in_a_process_costs_more(monkeypatch):
    cost = OrderCost((1.0, 0.0), (1.0, 0.0), module="sparsetile.no_such", first_use=10.0)
    assert cost.seconds(MIXED) == 11.0
    monkeypatch.setitem(sys.modules, "sparsetile.no_such", sys)
    assert cost.seconds(MIXED) == 1.0

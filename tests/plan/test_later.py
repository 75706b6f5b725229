"""Plans for an unknown number of products: they start quickly and compare all systems later."""

from __future__ import annotations

import copy
import importlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import sparsetile as st
from sparsetile.plan import family, saved
from sparsetile.plan.family import many_products
from sparsetile.systems import SYSTEMS
from sparsetile.tune import account
from tests.locks import at_once, slowed

spmm_module = importlib.import_module("sparsetile.cache.spmm")  # a function has its name, too
# Whole numbers, of which float32 adds exactly.
FULL = torch.randint(1, 9, (160, 160), generator=torch.Generator().manual_seed(0)).float()
A = FULL.to_sparse_csr()  # so full that `dense` is predicted to take a third of the time
B = torch.randint(-9, 9, (160, 64), generator=torch.Generator().manual_seed(1)).float()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the CPU start with its exact system, as GPUs do, and comparing take long."""
    monkeypatch.setattr(type(SYSTEMS["cpu"]), "quick_on", ("cpu",))
    monkeypatch.setattr(account, "COMPARE_SECONDS", (20e-3, 0.0))
    assert st.plan(A, 64, expected_runs=10**9).system == "dense"
    yield


def planned(left: int = 3, **options: object) -> st.Plan:
    """A plan that compares all systems at its third product."""
    plan = st.plan(A, 64, **options)
    assert plan.system == "cpu" and plan._family.forward.later is not None
    plan._family.forward.later.left = left
    return plan


def test_a_plan_takes_a_better_system_when_that_pays():
    plan = planned()
    assert "compared after" in plan.explain() and "may save" in plan.explain()
    for system in ("cpu", "cpu", "dense", "dense"):
        torch.testing.assert_close(plan @ B, FULL @ B)
        assert plan.system == system
    assert "compared  after" in plan.explain() and "slower:" in plan.explain()


def test_a_comparison_that_pays_within_the_usual_number_is_made_at_once(monkeypatch):
    monkeypatch.setattr(account, "COMPARE_SECONDS", (1e-6, 0.0))
    plan = st.plan(A, 64)
    assert plan.system == "dense" and plan._family.forward.later is None


def test_a_known_number_of_products_decides_at_once():
    few = st.plan(A, 64, expected_runs=1)
    assert few.system == "cpu" and few._family.forward.later is None
    assert "not compared for 1 products" in few.explain()
    account = few.info["account"]
    pays = int(account["seconds"] / account["saves"]) + 1
    assert st.plan(A, 64, expected_runs=pays).system == "dense"
    assert st.plan(A, 64, expected_runs=pays - 2).system == "cpu"


@pytest.mark.parametrize(
    "options", [{"deterministic": True}, {"tune": "none"}, {"system": "cpu"}, {"expected_runs": 9}]
)
def test_a_choice_that_stays(options: dict[str, object]):
    assert st.plan(A, 64, **options)._family.forward.later is None


def test_plans_without_their_pattern_compare_at_once():
    assert st.plan(A, 64, keep="inference").system == "dense"


def test_gradients_and_values_before_and_after():
    values = A.values().clone()
    for left in (1, 2, 99):
        plan = planned(left)
        X = B.clone().requires_grad_()
        C = plan @ X
        plan @ B  # another system may have come between a product and its gradient
        C.sum().backward()
        torch.testing.assert_close(X.grad, FULL.T @ torch.ones_like(C))
        assert plan.system == ("dense" if left < 99 else "cpu")
        plan.update_values(2 * values)
        torch.testing.assert_close(plan @ B, 2 * FULL @ B)
        torch.testing.assert_close(plan.T @ B, 2 * FULL.T @ B)
        X.grad = None
        (plan @ X).sum().backward()
        torch.testing.assert_close(X.grad, 2 * FULL.T @ torch.ones_like(C))


def test_products_of_the_transpose_count():
    plan = planned(2)
    turned = plan.T
    for system in ("cpu", "dense"):
        torch.testing.assert_close(turned @ B, FULL.T @ B)
        assert turned.system == plan.system == system


def test_each_width_counts_its_own_products():
    plan = st.plan(A)
    plan @ B
    later = plan._family.known(False, torch.float32, 64).later
    later.left = 1
    torch.testing.assert_close(plan @ B, FULL @ B)
    assert plan._family.known(False, torch.float32, 64).system == "dense"
    assert plan._family.forward.system == "cpu" and plan._family.forward.later is not None


def test_threads_meet_the_change():
    plan, failed = planned(40), list[Exception]()

    def work() -> None:
        try:
            for _ in range(30):
                torch.testing.assert_close(plan @ B, FULL @ B)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and plan.system == "dense"


def test_threads_that_ask_together_compare_once(monkeypatch, calls_of):
    plan, compared = planned(99), calls_of(family, "build_compared")
    slowed(monkeypatch, family.Family, "settled")  # by which another thread sees that one compares
    at_once(plan._family.compared)
    assert len(compared) == 1 and plan.system == "dense"


def test_who_compiles_gets_the_best_system():
    plan = planned(99)
    compiled = torch.compile(lambda X: plan @ X, backend="eager", fullgraph=True)
    for factor in (1.0, 2.0):
        plan.update_values(factor * A.values())
        torch.testing.assert_close(compiled(B), factor * FULL @ B)
    assert plan.system == "dense"
    X = B.clone().requires_grad_()
    compiled(X).sum().backward()
    torch.testing.assert_close(X.grad, 2 * FULL.T @ torch.ones_like(B))


def test_many_products_may_be_expected_for_a_while():
    plan, other = planned(99), planned(99)
    with many_products():
        torch.testing.assert_close(plan @ B, FULL @ B)
    torch.testing.assert_close(other @ B, FULL @ B)
    assert (plan.system, other.system) == ("dense", "cpu")


def test_a_copy_keeps_what_was_chosen():
    plan = planned(2)
    other = copy.deepcopy(plan)
    plan @ B
    torch.testing.assert_close(plan @ B, other @ B)
    assert (plan.system, other.system) == ("dense", "cpu")


@pytest.mark.parametrize("left", [99, 1])
def test_a_plan_that_grows_can_be_saved(left: int, tmp_path: Path, monkeypatch):
    plan = planned(left)
    plan @ B
    for report in (saved._REPORT, dict.fromkeys(plan._family.forward.report)):
        monkeypatch.setattr(saved, "_REPORT", report)  # the second is what was written at first
        plan.save(tmp_path / "plan.safetensors")
        monkeypatch.undo()
        found = st.load_plan(tmp_path / "plan.safetensors")
        assert found.system == plan.system and found._family.forward.later is None
        assert torch.equal(found @ B, plan @ B)


def test_without_memory_to_compare_the_plan_stays(monkeypatch: pytest.MonkeyPatch):
    plan = planned(1)

    def full(request: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(SYSTEMS["dense"], "build", full)
    for _ in range(3):
        torch.testing.assert_close(plan @ B, FULL @ B)
    assert plan.system == "cpu" and plan._family.forward.later is None


def test_spmm_promotes_a_matrix_that_comes_again():
    pairs = A.to_sparse_coo()  # CSR arrays on the CPU are multiplied as they are
    st.spmm(pairs, B)
    ((plan, _),) = spmm_module._entries.get((id(pairs),)).plans.values()
    assert plan.system == "cpu"
    plan._family.forward.later.left = 1
    for factor in (1.0, 2.0):
        pairs._values().copy_(factor * A.values())
        torch.testing.assert_close(st.spmm(pairs, B), factor * FULL @ B)
        assert plan.system == "dense"

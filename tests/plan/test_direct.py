"""Plans for few products multiply from A's arrays, and get a schedule when they need one.

The kernel that does so runs on GPUs; here the product is torch's, and the exact system is the
CPU's.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsetile as st
from sparsetile.plan import build, direct
from sparsetile.plan.direct import DirectVariant
from sparsetile.plan.family import many_products
from sparsetile.systems import SYSTEMS

FULL = torch.randint(0, 3, (60, 50), generator=torch.Generator().manual_seed(0)).float()
A = FULL.to_sparse_csr()
B = torch.randint(-9, 9, (50, 8), generator=torch.Generator().manual_seed(1)).float()


def product_of_arrays(
    indptr: Tensor, indices: Tensor, values: Tensor | None, B: Tensor, reduce: str = "sum",
    epilogue: Any = None,
) -> Tensor:  # fmt: skip
    values = torch.ones(indices.numel()) if values is None else values
    shape = (indptr.numel() - 1, B.shape[0])
    found = torch.sparse_csr_tensor(indptr, indices.long(), values, shape).to_dense() @ B
    if epilogue is not None:
        if epilogue.mean:
            found = found / indptr.diff().clamp(min=1).unsqueeze(1)
        found = found * epilogue.alpha + (0 if epilogue.bias is None else epilogue.bias)
        found = found.relu() if epilogue.relu else found
    return found


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Plans on the CPU may begin without a schedule; returns the products of arrays."""
    counted: list[int] = []

    def product(*args: Any, **options: Any) -> Tensor:
        counted.append(1)
        return product_of_arrays(*args, **options)

    def into(indptr: Tensor, indices: Tensor, values: Tensor, B: Tensor, out: Tensor) -> None:
        out.copy_(product(indptr, indices, values, B))

    monkeypatch.setattr(type(SYSTEMS["cpu"]), "quick_on", ("cpu",))
    monkeypatch.setattr(build, "multiplies_arrays", lambda request: True)
    monkeypatch.setattr(direct, "direct_product", product)
    monkeypatch.setattr(direct, "product_into", into)
    monkeypatch.setattr(direct, "reachable", lambda B: B)
    monkeypatch.setattr(direct, "current_stream_handle", lambda device: 0)
    monkeypatch.setattr(direct, "record_stream", lambda tensors, device: None)
    yield counted


def planned(**options: Any) -> tuple[st.Plan, DirectVariant]:
    plan = st.plan(A, 8, **{"expected_runs": 3, **options})
    variant = plan._family.forward
    assert isinstance(variant, DirectVariant) and not variant.scheduled
    return plan, variant


def test_few_products_are_computed_from_the_arrays(on_the_host):
    plan, variant = planned()
    for _ in range(3):
        assert torch.equal(plan @ B, FULL @ B)
    assert len(on_the_host) == 3 and not variant.scheduled
    assert plan.system == "cpu"
    out = torch.full((60, 8), torch.nan)
    assert plan.run(B, out) is out and torch.equal(out, FULL @ B)
    bias = torch.arange(8.0)
    assert torch.equal(plan.run(B, alpha=2.0, bias=bias, relu=True), (2 * FULL @ B + bias).relu())
    counts = A.crow_indices().diff().unsqueeze(1)
    torch.testing.assert_close(plan.run(B, reduce="mean"), FULL @ B / counts)
    assert not variant.scheduled


def test_the_plan_does_not_follow_the_callers_arrays():
    mine = FULL.to_sparse_csr()
    plan = st.plan(mine, 8, expected_runs=3)
    mine.values().zero_()
    assert torch.equal(plan @ B, FULL @ B)


def test_as_many_products_as_pay_for_a_schedule_build_it(on_the_host):
    plan, variant = planned()
    account = plan.info["direct"]
    assert account["later"] == int(account["seconds"] / account["saves"]) + 1 == variant.later.left
    variant.later.left = 3
    for number in range(1, 6):
        assert torch.equal(plan @ B, FULL @ B)
        assert variant.scheduled == (number >= 3)
    assert len(on_the_host) == 2 and variant.later is None


def test_expectations_decide():
    account = planned()[0].info["direct"]
    assert isinstance(planned(expected_runs=account["later"] - 1)[1], DirectVariant)
    for options in ({"expected_runs": account["later"] + 1}, {}, {"expected_runs": 3, "n": None}):
        n = options.pop("n", 8)
        forward = st.plan(A, n, **options)._family.forward
        assert isinstance(forward, DirectVariant) == (n is None)
    for options in (
        {"system": "cpu"}, {"tune": "none"}, {"keep": "inference"}, {"reorder_columns": True}
    ):  # fmt: skip
        assert not isinstance(st.plan(A, 8, expected_runs=3, **options)._family, type(None))
        forward = st.plan(A, 8, expected_runs=3, **options)._family.forward
        assert not isinstance(forward, DirectVariant)


def test_each_width_begins_from_the_arrays():
    plan = st.plan(A, expected_runs=3)
    assert torch.equal(plan @ B, FULL @ B)
    assert isinstance(plan._family.known(False, torch.float32, 8), DirectVariant)


def test_repeating_bits_need_the_same_sums_in_every_product(on_the_host):
    plan, variant = planned(deterministic=True)
    assert variant.later is None
    for _ in range(300):
        plan @ B
    assert len(on_the_host) == 300 and not variant.scheduled


def test_trained_values_need_a_schedule_at_once():
    values = A.values().clone().requires_grad_()
    arrays = (A.crow_indices(), A.col_indices(), values, (60, 50))
    plan = st.plan(arrays, 8, expected_runs=3)
    assert not isinstance(plan._family.forward, DirectVariant)
    (plan @ B).sum().backward()
    assert values.grad is not None


@pytest.mark.parametrize(
    "use",
    [
        lambda plan: plan.run(B, reduce="max"),
        lambda plan: plan.flat,
        lambda plan: plan.run(torch.stack([B, B])),
        lambda plan: plan.linear(torch.ones(2, 50)),
        lambda plan: plan.run(B.double()) if plan.to(torch.float64) else None,
        lambda plan: plan.run(B, beta=1.0, out=torch.zeros(60, 8)),
    ],
    ids=["max", "flat", "batch", "linear", "to", "beta"],
)
def test_what_needs_a_schedule_builds_it(use):
    plan, _ = planned()
    wanted, found = use(st.plan(A, 8, tune="none")), use(plan)
    if isinstance(wanted, Tensor):
        torch.testing.assert_close(found, wanted)
    forward = plan._family.forward
    assert not isinstance(forward, DirectVariant) or forward.scheduled
    X = B.to(plan.dtype)
    torch.testing.assert_close(plan @ X, FULL.to(plan.dtype) @ X)


def test_gradients_and_the_transpose():
    plan, _ = planned()
    X = B.clone().requires_grad_()
    C = plan @ X
    C.backward(torch.ones_like(C))
    torch.testing.assert_close(X.grad, FULL.T @ torch.ones(60, 8))
    torch.testing.assert_close(plan.T @ torch.ones(60, 8), X.grad)


def test_new_values_before_and_after_the_schedule():
    plan, variant = planned()
    for factor in (2.0, 3.0):
        plan.update_values(factor * A.values())
        assert torch.equal(plan @ B, factor * FULL @ B)
        assert not variant.scheduled
    variant.schedule()
    assert torch.equal(plan @ B, 3 * FULL @ B)
    plan.update_values(A.values())
    assert torch.equal(plan @ B, FULL @ B)


def test_a_pattern_counts_each_entry_as_one():
    pattern = (A.crow_indices(), A.col_indices(), None, (60, 50))
    plan = st.plan(pattern, 8, expected_runs=3)
    assert torch.equal(plan @ B, (FULL != 0).float() @ B)
    assert plan.values is None and not plan._family.forward.scheduled


def test_what_a_plan_says_builds_nothing():
    plan, variant = planned()
    text = plan.explain()
    assert "A's arrays as they are" in text and "not for fewer than" in text
    info = plan.info
    assert info["format_bytes"] == 0 and info["bytes"]["matrix"] > 0 and repr(plan)
    assert not variant.scheduled
    variant.schedule()
    assert "A's arrays as they are" not in plan.explain()
    assert plan.info["schedule_seconds"] > 0 and plan.info["format_bytes"] > 0


def test_a_copy_and_a_file(tmp_path):
    plan, _ = planned()
    assert torch.equal(copy.deepcopy(plan) @ B, FULL @ B)
    plan, _ = planned()
    plan.save(tmp_path / "plan.safetensors")
    assert not plan._family.forward.scheduled
    assert torch.equal(st.load_plan(tmp_path / "plan.safetensors") @ B, FULL @ B)


def test_who_compiles_or_expects_many_products_gets_a_schedule():
    plan, variant = planned()
    compiled = torch.compile(lambda X: plan @ X, backend="eager", fullgraph=True)
    assert torch.equal(compiled(B), FULL @ B) and variant.scheduled
    plan, variant = planned()
    with many_products():
        assert torch.equal(plan @ B, FULL @ B)
    assert variant.scheduled


def test_threads_that_need_a_schedule_build_one(calls_of):
    plan, variant = planned()
    built = calls_of(type(SYSTEMS["cpu"]), "build")
    variant.later.left = 5
    failed = list[Exception]()

    def work() -> None:
        try:
            for _ in range(10):
                assert torch.equal(plan @ B, FULL @ B)
                assert torch.equal(plan.run(B, reduce="max"), maxima)
        except Exception as error:
            failed.append(error)

    maxima = st.plan(A, 8, tune="none").run(B, reduce="max")
    built.clear()
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and len(built) == 1


def test_without_memory_for_a_schedule_products_go_on(monkeypatch, on_the_host):
    plan, variant = planned()
    variant.later.left = 1

    def full(self: object, request: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(type(SYSTEMS["cpu"]), "build", full)
    for _ in range(3):
        assert torch.equal(plan @ B, FULL @ B)
    assert len(on_the_host) == 3 and variant.later is None
    with pytest.raises(AttributeError, match="colour"):
        _ = variant.colour


def test_a_bias_is_as_wide_as_the_sums():
    plan = st.plan(A.double(), 8, expected_runs=3)
    bias = torch.full((8,), 1 + 2.0**-40, dtype=torch.float64)
    found = plan.run(B.double(), bias=bias)
    assert torch.equal(found, FULL.double() @ B.double() + bias)


def test_the_report_says_how_long_a_schedule_took():
    _, variant = planned()
    begun = time.perf_counter()
    variant.schedule()
    assert 0 < variant.report["schedule_seconds"] <= time.perf_counter() - begun

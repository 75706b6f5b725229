"""Replication by c (1.5-D) over 2 and 4 gloo ranks: products and gradients of one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import sparsetile as st
from sparsetile import dist as st_dist
from sparsetile.dist import replicas as replicas_of
from tests.contracts.cases import MATRICES, assert_close, csr_of
from tests.dist.test_gradients import entries_of, leaf
from tests.dist.test_products import bounds_of, operand, whole_numbers

WIDTH = 6


def replicated(group, csr: st.CSR, partition="auto", n: int = 8, copies: int = 2, **more):
    made = st_dist.plan(csr, n, group, partition, exchange="replicate", replicas=copies, **more)
    assert made.exchange == "replicate" and made.replicas == copies
    return made


def contract(group, dtype: torch.dtype) -> None:
    for make in MATRICES.values():
        csr = csr_of(make(), dtype=dtype)
        made = replicated(group, csr, n=7)
        B = torch.randn(csr.shape[1], 7, generator=torch.Generator().manual_seed(1)).to(dtype)
        C = made @ made.shard(B)
        assert C.dtype is dtype and tuple(C.shape) == (made.local_shape[0], 7)
        assert_close(made.gather(C), csr, B)


@pytest.mark.parametrize("ranks, dtype", [(2, torch.float32), (4, torch.bfloat16)])
def test_contract_matrices_within_the_error_bound(workers, ranks, dtype):
    workers.run(contract, ranks, dtype=dtype)


def exact(group, copies: int) -> None:
    """Shares of any kind, batches, strides, options: the bits of one process."""
    csr, B = whole_numbers(90, 90, 0.06), operand(90, 8)
    single = st.plan(csr, 8)
    parts = torch.randint(
        dist.get_world_size(group), (90,), generator=torch.Generator().manual_seed(5)
    )
    for partition in (bounds_of(group, 3, 3, 80), "even", "rcm", parts):
        made = replicated(group, csr, partition, copies=copies)
        C = made @ made.shard(B)
        assert torch.equal(C, (single @ B)[made.rows])
        assert torch.equal(made.gather(C), single @ B)
    wide = whole_numbers(50, 121, 0.05)
    made = replicated(group, wide, copies=copies)
    assert torch.equal(
        made.gather(made @ made.shard(operand(121, 8))), st.plan(wide, 8) @ operand(121, 8)
    )
    made = replicated(group, csr, bounds_of(group, 40, 40, 70), copies=copies)
    for lead, width in (((3,), 5), ((2, 3), 8), ((), 33), ((), 0)):
        B = operand(90, width, torch.float64, *lead)
        for given in (made.shard(B), made.shard(B).mT.contiguous().mT):
            assert torch.equal(made.gather(made @ given), single @ B)
    B, bias = operand(90, 8), torch.arange(8).double()
    for options in (
        {"alpha": -2.0, "bias": bias, "relu": True},
        {"bias": bias},
        {"reduce": "max"},
        {"reduce": "min", "alpha": 2.0},
    ):
        found = made.gather(made.run(made.shard(B), **options))
        assert torch.equal(found, single.run(B, **options)), options
    mean = made.gather(made.run(made.shard(B), reduce="mean"))
    assert torch.allclose(mean, single.run(B, reduce="mean"))
    with torch.inference_mode():
        assert torch.equal(made.gather(made @ made.shard(B)), single @ B)
    assert torch.equal(made.gather(made @ made.shard(B)), single @ B)


@pytest.mark.parametrize("ranks, copies", [(2, 2), (4, 2), (4, 4)])
def test_products_have_the_bits_of_one_process(workers, ranks, copies):
    workers.run(exact, ranks, copies=copies)


def sixteen_bits(group) -> None:
    csr = whole_numbers(90, 90, 0.06)
    csr = csr.with_values(csr.values.to(torch.bfloat16))
    made, B = replicated(group, csr), operand(90, 8, torch.bfloat16)
    single = st.plan(csr, 8)
    for out_dtype in (None, torch.float32):
        C = made.run(made.shard(B), out_dtype=out_dtype)
        assert C.dtype is (out_dtype or torch.bfloat16)
        assert torch.equal(made.gather(C), single.run(B, out_dtype=out_dtype))
    B_local = leaf(made.shard(B))
    G = torch.ones(90, 8, dtype=torch.bfloat16)
    made.run(B_local).backward(G[made.rows])
    whole = leaf(B)
    single.run(whole).backward(G)
    assert B_local.grad.dtype is torch.bfloat16
    assert torch.allclose(B_local.grad, whole.grad[made.columns], rtol=0.02, atol=0.05)


def test_sums_of_sixteen_bits_are_rounded_once(workers):
    workers.run(sixteen_bits, 4)


def not_finite(group) -> None:
    csr, B = whole_numbers(90, 90, 0.06), operand(90, 8)
    made = replicated(group, csr)
    B[4, 1], B[50, 3], B[88, 0] = float("nan"), float("inf"), -float("inf")
    for reduce in ("sum", "max", "min"):
        C = made.gather(made.run(made.shard(B), reduce=reduce))
        assert torch.allclose(C, st.plan(csr, 8).run(B, reduce=reduce), equal_nan=True)
    assert bool(made.gather(made @ made.shard(operand(90, 8))).isfinite().all())


def test_nan_and_inf_reach_only_rows_that_reference_them(workers):
    workers.run(not_finite, 4)


# -- gradients ------------------------------------------------------------------------------------


def gradients(group, copies: int) -> None:
    csr = whole_numbers(90, 90, 0.06)
    made = replicated(group, csr, bounds_of(group, 3, 3, 80), n=WIDTH, copies=copies)
    mine = entries_of(csr, made)
    for lead, options in (((), {"alpha": 0.5, "relu": True}), ((2, 2), {"reduce": "mean"})):
        B = operand(90, WIDTH, torch.float64, *lead)
        G, bias = B.flip(-1), torch.arange(WIDTH).double()
        whole = [leaf(B), leaf(bias), leaf(csr.values)]
        st.plan(csr, WIDTH).run(whole[0], bias=whole[1], values=whole[2], **options).backward(G)
        local = [leaf(made.shard(B)), leaf(bias), leaf(csr.values[mine])]
        C = made.run(local[0], bias=local[1], values=local[2], **options)
        C.backward(G.index_select(-2, made.rows))
        assert torch.allclose(local[0].grad, whole[0].grad.index_select(-2, made.columns))
        assert torch.allclose(local[2].grad, whole[2].grad[mine])
        dist.all_reduce(local[1].grad, group=group)
        assert torch.allclose(local[1].grad, whole[1].grad)


@pytest.mark.parametrize("ranks, copies", [(2, 2), (4, 2)])
def test_gradients_of_b_values_and_bias(workers, ranks, copies):
    workers.run(gradients, ranks, copies=copies)


def extremum_gradients(group) -> None:
    """Without ties: which of equal entries wins is not the same over ranks."""
    csr = whole_numbers(90, 90, 0.06)
    csr = csr.with_values(torch.ones_like(csr.values))
    made = replicated(group, csr, n=WIDTH)
    B = torch.randperm(90 * WIDTH, generator=torch.Generator().manual_seed(1))
    B, G = B.reshape(90, WIDTH).double(), operand(90, WIDTH)
    whole, B_local = leaf(B), leaf(made.shard(B))
    st.plan(csr, WIDTH).run(whole, reduce="max").backward(G)
    made.run(B_local, reduce="max").backward(G[made.rows])
    assert torch.equal(B_local.grad, whole.grad[made.columns])


def test_gradients_of_extrema(workers):
    workers.run(extremum_gradients, 4)


def second_gradients(group) -> None:
    csr = whole_numbers(90, 90, 0.06)
    B = torch.linspace(-1, 1, 90 * WIDTH, dtype=torch.float64).reshape(90, WIDTH)

    def twice(plan, B: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        loss = (plan.run(B, values=values) ** 3).sum()
        first = torch.autograd.grad(loss, B, create_graph=True)[0]
        return torch.autograd.grad((first**2).sum(), (B, values))

    made = replicated(group, csr, n=WIDTH)
    mine = entries_of(csr, made)
    expected = twice(st.plan(csr, WIDTH), leaf(B), leaf(csr.values))
    found = twice(made, leaf(made.shard(B)), leaf(csr.values[mine]))
    assert torch.allclose(found[0], expected[0][made.columns])
    assert torch.allclose(found[1], expected[1][mine])


def test_gradients_of_gradients(workers):
    workers.run(second_gradients, 4)


def repeated(group) -> None:
    csr = whole_numbers(400, 400, 0.05)
    csr = csr.with_values(torch.randn(csr.nnz, generator=torch.Generator().manual_seed(2)))
    first, second = (replicated(group, csr, n=32) for _ in range(2))
    B = torch.randn(400, 32, generator=torch.Generator().manual_seed(3))
    found = []
    for plan in (first, first, second):
        B_local = leaf(plan.shard(B))
        C = plan.run(B_local)
        C.sin().sum().backward()
        found.append((C.detach(), plan @ plan.shard(B), B_local.grad))
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


def test_bits_do_not_change_from_run_to_run(workers):
    workers.run(repeated, 4)


# -- values and sources ---------------------------------------------------------------------------


def updates(group) -> None:
    csr, B = whole_numbers(90, 90, 0.06), operand(90, 8)
    made = replicated(group, csr)
    mine, single = entries_of(csr, made), st.plan(csr, 8)
    assert torch.equal(made.values, csr.values[mine])
    other = csr.with_values(csr.values + 1)
    expected = st.plan(other, 8) @ B
    assert torch.equal(made.gather(made.run(made.shard(B), values=other.values[mine])), expected)
    assert torch.equal(made.gather(made @ made.shard(B)), single @ B)
    made.update_values(other.values[mine])
    assert torch.equal(made.gather(made @ made.shard(B)), expected)
    assert torch.equal(made.values, other.values[mine])
    # A share in an order of its own, whose values require grad.
    first = int(made.rows[0])
    rows = csr.row_ids()[mine] - first
    edges = torch.stack([rows, csr.indices[mine].long()]).flip(1)
    values = leaf(csr.values[mine].flip(0))
    share = st_dist.Share((edges, values, (made.local_shape[0], 90)), first, (90, 90))
    made = replicated(group, share)
    whole = leaf(csr.values)
    for _ in range(2):
        values.grad = whole.grad = None
        C = made.run(made.shard(B))
        assert torch.equal(made.gather(C), single @ B)
        C.backward(operand(90, 8)[made.rows])
        single.run(B, values=whole).backward(operand(90, 8))
        assert torch.allclose(values.grad.flip(0), whole.grad[mine])


def test_values_may_be_given_replaced_or_followed(workers):
    workers.run(updates, 4)


def from_one(group) -> None:
    csr = whole_numbers(90, 90, 0.06).with_values(None)
    made = replicated(group, csr if dist.get_rank(group) == 1 else None, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        C = made @ made.shard(operand(90, 8, torch.float32))
    assert C.dtype is torch.bfloat16
    assert torch.equal(made.gather(C).float(), st.plan(csr, 8) @ operand(90, 8, torch.float32))


def test_patterns_sent_by_one_rank_and_autocast(workers):
    workers.run(from_one, 2)


def mixed_types(group) -> None:
    """Shares whose values have different types, in the plan's own."""
    csr, rank = whole_numbers(90, 90, 0.06), dist.get_rank(group)
    first, last = 45 * rank, 45 * (rank + 1)
    rows = torch.arange(first, last)
    piece = csr.select_rows(rows)[0]
    kind = torch.float32 if rank else torch.float64
    share = st_dist.Share(piece.with_values(piece.values.to(kind)), first, (90, 90))
    made = replicated(group, share, dtype=torch.float64)
    C = made.gather(made @ made.shard(operand(90, 8)))
    assert torch.equal(C, st.plan(csr, 8) @ operand(90, 8))
    assert made.values.dtype is torch.float64


def test_values_of_different_types_travel_in_the_type_of_the_plan(workers):
    workers.run(mixed_types, 2)


def sharded(group) -> None:
    from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

    mesh = DeviceMesh.from_group(group, "cpu")
    csr, B = whole_numbers(90, 90, 0.06), operand(90, WIDTH)
    made = replicated(group, csr, "even", n=WIDTH)
    C = made @ distribute_tensor(B, mesh, [Shard(0)])
    assert torch.equal(C.full_tensor(), st.plan(csr, WIDTH) @ B)


def test_a_dtensor_sharded_on_rows_gives_one(workers):
    workers.run(sharded, 2)


# -- the choice -----------------------------------------------------------------------------------


def count_bytes(made: st_dist.DistributedPlan, B: Tensor) -> tuple[int, int]:
    """Bytes that this rank received from and sent to others in one product, as torch is asked."""
    ranks, found = made._ranks, [0, 0]
    start = ranks.start_all_to_all

    def counting(received, receive_rows, sent, send_rows, function):
        for place, (rows, tensor) in enumerate(((receive_rows, received), (send_rows, sent))):
            row = tensor.element_size() * tensor.shape[1:].numel()
            found[place] += row * sum(count for rank, count in enumerate(rows) if rank != made.rank)
        return start(received, receive_rows, sent, send_rows, function)

    ranks.start_all_to_all = counting
    try:
        made @ B
    finally:
        del ranks.start_all_to_all
    return found[0], found[1]


def chosen(group, density: float, dtype: torch.dtype, **options) -> tuple:
    csr = whole_numbers(120, 120, density)
    csr = csr.with_values(csr.values.to(dtype))
    made = st_dist.plan(csr, 8, group, **options)
    B = operand(120, 8, dtype)
    assert torch.equal(made.gather(made @ made.shard(B)), st.plan(csr, 8) @ B)
    return (
        made.exchange,
        made.replicas,
        made.info,
        made.explain(),
        count_bytes(made, made.shard(B)) if made.exchange == "replicate" else (0, 0),
    )


def test_predicted_bytes_are_those_that_torch_is_asked_to_move(workers):
    for dtype in (torch.float32, torch.bfloat16):
        found = workers.run(chosen, 4, density=0.4, dtype=dtype, exchange="replicate")
        way, copies, info, text, _ = found[0]
        assert (way, copies) == ("replicate", 2)
        assert "replicate chosen: " in text and "all_gather not taken: " in text
        assert info["busiest_bytes"]["replicate"] == max(max(moved) for *_, moved in found)


@pytest.mark.parametrize("density, way", [(0.4, "all_gather"), (0.004, "all_to_all")])
def test_nothing_is_replicated_unless_asked_for(workers, density, way):
    found = workers.run(chosen, 4, density=density, dtype=torch.float32)
    assert found[0][:2] == (way, 1)


def test_the_default_is_the_divisor_nearest_to_the_square_root():
    assert [replicas_of.default_copies(size) for size in (1, 2, 4, 6, 8, 9, 16)] == [
        1, 2, 2, 2, 2, 3, 4,
    ]  # fmt: skip


def alone(group) -> str:
    return st_dist.plan(whole_numbers(20, 20, 0.2), 8, group, exchange="replicate").exchange


def test_one_rank_has_nothing_to_replicate(workers):
    assert workers.run(alone, 1) == ["none"]


# -- mistakes -------------------------------------------------------------------------------------


def said(call) -> str:
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    return str(caught.value)


def refusals(group) -> dict[str, str]:
    csr, B = whole_numbers(90, 90, 0.06), operand(90, 8)
    rank = dist.get_rank(group)

    def plan(exchange: str, replicas) -> str:
        return said(lambda: st_dist.plan(csr, 8, group, exchange=exchange, replicas=replicas))

    made = replicated(group, csr)
    values, mine = csr.values[entries_of(csr, made)], made.shard(B)
    given = values if rank else None
    found = {
        "divides": plan("replicate", 3),
        "one": plan("auto", 1),
        "whole": plan("replicate", 2.0),
        "way": plan("all_to_all", 2),
        "differs": plan("replicate", 2 if rank else 4),
        "values": said(lambda: made.run(mine, values=given)),
        "type": said(lambda: made.run(mine, values=values.float() if rank else values)),
        "grad": said(lambda: made.run(mine, values=leaf(values) if rank else values)),
        "update": said(lambda: made.update_values(values[: -1 if rank == 1 else None])),
        "update's grad": said(lambda: made.update_values(values.clone().requires_grad_(rank == 1))),
    }
    # The group is as it was.
    assert torch.equal(made.gather(made @ mine), st.plan(csr, 8) @ B)
    return found


def test_mistakes_are_one_error_on_every_rank(workers):
    found = workers.run(refusals, 4)
    expected = {
        "divides": "plan: replicas must be one of [2, 4], the divisors of 4 ranks, got 3.",
        "one": "plan: replicas must be one of [2, 4], the divisors of 4 ranks, got 1.",
        "whole": "plan: replicas must be one of [2, 4], the divisors of 4 ranks, got 2.0.",
        "way": "plan: replicas must be None with exchange='all_to_all', got 2.",
        "differs": "plan: replicas must be the same on every rank, got 4 on rank 0 and 2 on rank 1",
        "values": "run: values must be the same on every rank, got those of the plan on rank 0 and",
        "type": "run: values must be the same on every rank, got torch.float64 on rank 0 and "
        "torch.float32 on rank 1.",
        "grad": "run: values must be the same on every rank, got torch.float64 on rank 0 and "
        "torch.float64 that require grad on rank 1.",
        "update's grad": "update_values: whether values require grad must be the same on every",
    }
    for texts in found:
        for name, text in expected.items():
            assert texts[name].startswith(text), (name, texts[name])
    assert found[1]["update"].startswith("update_values: values must be of shape")
    assert "an error on rank 1" in found[0]["update"]

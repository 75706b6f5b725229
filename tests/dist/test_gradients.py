"""Gradients over 1 to 4 gloo ranks are those of one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import sparsetile as st
from sparsetile import dist as st_dist
from tests.dist.test_products import bounds_of, operand, whole_numbers

RANKS = [1, 2, 3, 4]
WIDTH = 6


def leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_()


def single(csr: st.CSR, B: Tensor, bias: Tensor, values: Tensor, G: Tensor, **options):
    """B's, bias's and the values' gradients in one process."""
    leaves = [leaf(B), leaf(bias), leaf(values)]
    bias_of = {"bias": leaves[1]} if options.get("reduce", "sum") in ("sum", "mean") else {}
    C = st.plan(csr, WIDTH).run(leaves[0], values=leaves[2], **bias_of, **options)
    C.backward(G)
    return [one.grad for one in leaves]


def entries_of(csr: st.CSR, made: st_dist.DistributedPlan) -> Tensor:
    """Numbers in A of this rank's entries, of a partition in A's own order."""
    begin = int(csr.indptr[int(made.rows[0])]) if made.rows.numel() else 0
    return torch.arange(begin, begin + made.local_nnz)


def gradients(group, exchange: str, partition: str, lead: tuple[int, ...], options: dict) -> None:
    csr = whole_numbers(90, 90, 0.06)
    shares = bounds_of(group, 3, 3, 80) if partition == "uneven" else partition
    made = st_dist.plan(csr, WIDTH, group, shares, exchange=exchange)
    B, G = (
        operand(90, WIDTH, torch.float64, *lead),
        operand(90, WIDTH, torch.float64, *lead).flip(-1),
    )
    bias = torch.arange(WIDTH).double()
    expected = single(csr, B, bias, csr.values, G, **options)

    mine = entries_of(csr, made)
    B_local, bias_local, values = leaf(made.shard(B)), leaf(bias), leaf(csr.values[mine])
    with_bias = {"bias": bias_local} if options.get("reduce", "sum") in ("sum", "mean") else {}
    C = made.run(B_local, values=values, **with_bias, **options)
    C.backward(G.index_select(-2, made.rows))
    assert torch.allclose(B_local.grad, expected[0].index_select(-2, made.columns))
    assert torch.allclose(values.grad, expected[2][mine])
    if with_bias:
        dist.all_reduce(bias_local.grad, group=group)
        assert torch.allclose(bias_local.grad, expected[1])


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("exchange", ["all_to_all", "all_gather", "fewest"])
def test_gradients_of_b_values_and_bias(workers, ranks, exchange):
    options = {"alpha": 0.5, "relu": True}
    workers.run(gradients, ranks, exchange=exchange, partition="uneven", lead=(), options=options)


@pytest.mark.parametrize("exchange", ["all_to_all", "fewest"])
@pytest.mark.parametrize("lead", [(3,), (2, 2)])
def test_gradients_of_batches(workers, lead, exchange):
    workers.run(gradients, 3, exchange=exchange, partition="auto", lead=lead, options={})


@pytest.mark.parametrize("exchange", ["all_to_all", "fewest"])
@pytest.mark.parametrize("reduce", ["mean"])
def test_gradients_of_the_mean(workers, reduce, exchange):
    options = {"reduce": reduce}
    workers.run(gradients, 3, exchange=exchange, partition="auto", lead=(), options=options)


def extremum_gradients(group, reduce: str) -> None:
    """Without ties: which of equal entries wins is not the same over ranks."""
    csr = whole_numbers(90, 90, 0.06)
    csr = csr.with_values(torch.ones_like(csr.values))
    made = st_dist.plan(csr, WIDTH, group)
    B = torch.randperm(90 * WIDTH).reshape(90, WIDTH).double()
    dist.broadcast(B, 0, group=group)
    G = operand(90, WIDTH)
    whole, B_local = leaf(B), leaf(made.shard(B))
    st.plan(csr, WIDTH).run(whole, reduce=reduce).backward(G)
    made.run(B_local, reduce=reduce).backward(G[made.rows])
    assert torch.equal(B_local.grad, whole.grad[made.columns])


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_gradients_of_extrema(workers, reduce):
    workers.run(extremum_gradients, 3, reduce=reduce)


def second_gradients(group, exchange: str) -> None:
    csr = whole_numbers(90, 90, 0.06)
    B = torch.linspace(-1, 1, 90 * WIDTH, dtype=torch.float64).reshape(90, WIDTH)

    def twice(plan, B: Tensor, values: Tensor, group=None) -> tuple[Tensor, Tensor]:
        loss = (plan.run(B, values=values) ** 3).sum()
        first = torch.autograd.grad(loss, B, create_graph=True)[0]
        return torch.autograd.grad((first**2).sum(), (B, values))

    made = st_dist.plan(csr, WIDTH, group, exchange=exchange)
    mine = entries_of(csr, made)
    expected = twice(st.plan(csr, WIDTH), leaf(B), leaf(csr.values))
    found = twice(made, leaf(made.shard(B)), leaf(csr.values[mine]))
    assert torch.allclose(found[0], expected[0][made.columns])
    assert torch.allclose(found[1], expected[1][mine])


@pytest.mark.parametrize("exchange", ["auto", "fewest"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_gradients_of_gradients(workers, ranks, exchange):
    workers.run(second_gradients, ranks, exchange=exchange)


def repeated(group, exchange: str) -> None:
    csr = whole_numbers(400, 400, 0.05)
    csr = csr.with_values(torch.randn(csr.nnz, generator=torch.Generator().manual_seed(2)))
    made = st_dist.plan(csr, 32, group, exchange=exchange)
    made_again = st_dist.plan(csr, 32, group, exchange=exchange)
    B = torch.randn(400, 32, generator=torch.Generator().manual_seed(3))
    found = []
    for plan in (made, made, made_again):
        B_local = leaf(plan.shard(B))
        plan.run(B_local).sin().sum().backward()
        found.append(B_local.grad)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("exchange", ["all_to_all", "all_gather", "fewest"])
def test_bits_of_gradients_do_not_change_from_run_to_run(workers, exchange):
    workers.run(repeated, 4, exchange=exchange)


def overlap(group) -> list[str]:
    """Order of events of a backward pass: the exchange starts before the local gradient."""
    csr = whole_numbers(90, 90, 0.06)
    made = st_dist.plan(csr, WIDTH, group)
    events: list[str] = []
    start, summed = made._exchange.start_back, made._exchange.sum_back

    def start_back(G):
        events.append("start")
        return start(G)

    def sum_back(*arguments):
        events.append("sum")
        return summed(*arguments)

    made._exchange.start_back, made._exchange.sum_back = start_back, sum_back
    B_local = leaf(made.shard(operand(90, WIDTH)))
    local_run = made._local.run

    def run(B, **options):
        C = local_run(B, **options)
        C.register_hook(lambda grad: events.append("local's gradient"))
        if C.grad_fn is not None:
            C.grad_fn.register_hook(lambda *_: events.append("local"))
        return C

    made._local.run = run
    made.run(B_local).sum().backward()
    return events


def test_the_exchange_of_a_backward_pass_overlaps_with_the_local_product(workers):
    for events in workers.run(overlap, 3):
        assert events.index("start") < events.index("local") < events.index("sum"), events


def half_gradients(group, dtype: torch.dtype) -> None:
    csr = whole_numbers(90, 90, 0.06)
    csr = csr.with_values(
        torch.randn(csr.nnz, generator=torch.Generator().manual_seed(2)).to(dtype)
    )
    made = st_dist.plan(csr, WIDTH, group)
    G = torch.randn(90, WIDTH, generator=torch.Generator().manual_seed(4)).to(dtype)
    B_local = leaf(made.shard(operand(90, WIDTH, dtype)))
    made.run(B_local).backward(G[made.rows])
    assert B_local.grad.dtype is dtype
    # Each rank rounds its part of the sum once, and the owner rounds the total.
    transposed = csr.transposed()
    exact = transposed.with_values(transposed.values.double())
    expected = (st.plan(exact, WIDTH) @ G.double())[made.columns]
    size = st.plan(exact.with_values(exact.values.abs()), WIDTH) @ G.double().abs()
    allowed = (dist.get_world_size(group) + 2) * torch.finfo(dtype).eps * size[made.columns]
    assert bool(((B_local.grad.double() - expected).abs() <= allowed).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_gradients(workers, dtype):
    workers.run(half_gradients, 3, dtype=dtype)


def followed(group, kind: str) -> None:
    """Values that require grad are read at each product, and their gradients stay here."""
    csr = whole_numbers(90, 90, 0.06)
    B, G = operand(90, WIDTH), operand(90, WIDTH).flip(-1)
    expected = single(csr, B, torch.zeros(WIDTH).double(), csr.values, G)[2]
    probe = st_dist.plan(csr, WIDTH, group)
    mine = entries_of(csr, probe)
    if kind == "update_values":
        values = leaf(csr.values[mine])
        made, where = probe.update_values(values), torch.arange(mine.numel())
    elif kind == "whole":
        values = leaf(csr.values)
        made = st_dist.plan((csr.indptr, csr.indices, values, csr.shape), WIDTH, group)
        where = mine
    else:
        first, last = int(probe.rows[0]), int(probe.rows[-1]) + 1
        values = leaf(csr.values[mine].flip(0))  # entries in an order of their own
        rows = csr.row_ids()[mine] - first
        edges = torch.stack([rows, csr.indices[mine].long()]).flip(1)
        piece = (edges, values, (last - first, 90))
        made = st_dist.plan(st_dist.Share(piece, first, (90, 90)), WIDTH, group)
        where = torch.arange(mine.numel()).flip(0)
    for _ in range(2):
        values.grad = None
        C = made.run(made.shard(B))
        assert torch.equal(made.gather(C), st.plan(csr, WIDTH) @ B)
        C.backward(G[made.rows])
        assert torch.allclose(values.grad[where], expected[mine])
    with torch.no_grad():
        values.mul_(2)
    assert torch.equal(made.gather(made.run(made.shard(B))), 2 * (st.plan(csr, WIDTH) @ B))


@pytest.mark.parametrize("kind", ["update_values", "whole", "share"])
def test_values_that_require_grad_are_followed(workers, kind):
    workers.run(followed, 3, kind=kind)


# -- DTensor --------------------------------------------------------------------------------------


def sharded(group, rows: int, cols: int) -> None:
    from torch.distributed.tensor import DeviceMesh, DTensor, Shard, distribute_tensor

    mesh = DeviceMesh.from_group(group, "cpu")
    csr = whole_numbers(rows, cols, 0.06)
    made = st_dist.plan(csr, WIDTH, group, "even")
    B, G = operand(cols, WIDTH), operand(rows, WIDTH).flip(-1)
    given = distribute_tensor(B, mesh, [Shard(0)]).requires_grad_()
    C = made @ given
    assert isinstance(C, DTensor) and C.placements == (Shard(0),)
    whole = leaf(B)
    expected = st.plan(csr, WIDTH) @ whole
    assert torch.equal(C.full_tensor(), expected.detach())
    C.backward(distribute_tensor(G, mesh, [Shard(0)]))
    expected.backward(G)
    assert isinstance(given.grad, DTensor)
    assert torch.allclose(given.grad.full_tensor(), whole.grad)


@pytest.mark.parametrize("rows, cols", [(90, 90), (50, 121), (5, 3)])
def test_a_dtensor_sharded_on_rows_gives_one(workers, rows, cols):
    workers.run(sharded, 3, rows=rows, cols=cols)


def wrongly_sharded(group) -> str:
    from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

    mesh = DeviceMesh.from_group(group, "cpu")
    made = st_dist.plan(whole_numbers(90, 90, 0.06), WIDTH, group, "even")
    with pytest.raises(ValueError) as caught:
        made @ distribute_tensor(operand(90, 8), mesh, [Shard(1)])
    return str(caught.value)


def test_a_dtensor_sharded_on_columns_is_refused(workers):
    for text in workers.run(wrongly_sharded, 3):
        assert text.startswith("run: B must be a DTensor sharded on dimension 0")
        assert "partition='even'" in text

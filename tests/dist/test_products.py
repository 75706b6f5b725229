"""Products over 1 to 4 gloo ranks are those of one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import sparsetile as st
from sparsetile import dist as st_dist
from sparsetile.dist.partition import row_costs, share_bounds
from tests.contracts.cases import (
    MATRICES,
    assert_close,
    csr_of,
    random_matrix,
)

RANKS = [1, 2, 3, 4]
SQUARE = csr_of(random_matrix(90, 90, 0.06), dtype=torch.float64)


def operand(rows: int, cols: int, dtype: torch.dtype = torch.float64, *lead: int) -> Tensor:
    """The same numbers on every rank, small whole ones: sums are exact in any order."""
    made = torch.Generator().manual_seed(rows + cols)
    return torch.randint(-4, 5, (*lead, rows, cols), generator=made).to(dtype)


def whole_numbers(rows: int, cols: int, density: float, seed: int = 0) -> st.CSR:
    csr = csr_of(random_matrix(rows, cols, density, seed), dtype=torch.float64)
    return csr.with_values((csr.values * 4).round())


def bounds_of(group, *firsts: int) -> Tensor:
    """Shares that begin at ``firsts``, as many as the group has ranks."""
    return torch.tensor([0, *firsts[: dist.get_world_size(group) - 1], 90])


# -- the matrices of the contract suites ----------------------------------------------------------


def contract(group, dtype: torch.dtype, exchange: str) -> list[str]:
    ways = set()
    for make in MATRICES.values():
        csr = csr_of(make(), dtype=dtype)
        made = st_dist.plan(csr, 7, group, exchange=exchange)
        ways.add(made.exchange)
        B = torch.randn(csr.shape[1], 7, generator=torch.Generator().manual_seed(1)).to(dtype)
        assert_close(made.gather(made @ made.shard(B)), csr, B)
    return sorted(ways)


# Every number of ranks and every dtype, not every pair: each runs fourteen matrices.
PAIRS = list(zip(RANKS, (torch.float32, torch.float16, torch.float64, torch.bfloat16), strict=True))


@pytest.mark.parametrize("ranks, dtype", PAIRS)
def test_contract_matrices_within_the_error_bound(workers, ranks, dtype):
    workers.run(contract, ranks, dtype=dtype, exchange="auto")


@pytest.mark.parametrize("exchange", ["all_to_all", "all_gather", "fewest"])
def test_every_exchange_is_right_on_every_contract_matrix(workers, exchange):
    assert workers.run(contract, 3, dtype=torch.float32, exchange=exchange)[0] == [exchange]


# -- shares ---------------------------------------------------------------------------------------


def exact(group, csr: st.CSR, partition, exchange: str = "auto", **more) -> dict:
    made = st_dist.plan(csr, 8, group, partition, exchange=exchange, **more)
    B = operand(csr.shape[1], 8)
    C = made @ made.shard(B)
    assert tuple(C.shape) == (made.local_shape[0], 8)
    assert torch.equal(made.gather(C), st.plan(csr, 8) @ B)
    assert torch.equal(C, (st.plan(csr, 8) @ B)[made.rows])
    return made.info


def uneven(group) -> list[int]:
    csr = whole_numbers(90, 90, 0.06)
    return exact(group, csr, bounds_of(group, 3, 3, 80))["rows"]


@pytest.mark.parametrize("ranks", RANKS)
def test_uneven_and_empty_shares_give_the_same_bits(workers, ranks):
    rows = workers.run(uneven, ranks)[0]
    assert rows == [*[0, 3, 3, 80][:ranks], 90]


def without_halo(group) -> tuple[str, int]:
    size = dist.get_world_size(group)
    blocks = torch.block_diag(*(torch.ones(5, 5, dtype=torch.float64) for _ in range(size)))
    csr = st.plan(blocks.to_sparse_csr(), 8)._csr.with_values(torch.ones(25 * size).double())
    info = exact(group, csr, "even")
    return info["exchange"], info["halo_rows"]


@pytest.mark.parametrize("ranks", RANKS)
def test_nothing_is_exchanged_where_no_rank_has_a_halo(workers, ranks):
    assert workers.run(without_halo, ranks) == [("none", 0)] * ranks


def one_sided(group) -> tuple[int, int]:
    """The last rank needs rows of the first; nobody else needs any."""
    dense = torch.eye(40, dtype=torch.float64)
    dense[35:, :10] = 1.0
    csr = st.plan(dense.to_sparse_csr(), 8)
    csr = csr._csr.with_values(csr.values)
    info = exact(group, csr, "even")
    return info["halo_rows"], info["sent_rows"]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_without_halo_still_sends(workers, ranks):
    found = workers.run(one_sided, ranks)
    assert [halo for halo, _ in found] == [0] * (ranks - 1) + [10]
    assert [sent for _, sent in found] == [10] + [0] * (ranks - 1)


def in_an_order(group, partition) -> str:
    return exact(group, whole_numbers(90, 90, 0.06), partition)["partition"]


@pytest.mark.parametrize("partition", ["auto", "even", "rcm", "identity"])
def test_named_partitions_give_the_same_bits(workers, partition):
    assert set(workers.run(in_an_order, 3, partition=partition)) == {partition}


def test_rows_may_be_given_to_ranks_one_by_one(workers):
    parts = torch.randint(3, (90,), generator=torch.Generator().manual_seed(5))
    assert workers.run(in_an_order, 3, partition=parts) == ["given"] * 3


def rectangular(group, columns) -> list[int]:
    csr = whole_numbers(50, 120, 0.05)
    return exact(group, csr, "auto", columns=columns)["columns"]


def test_rows_of_b_are_shared_on_their_own_where_a_is_not_square(workers):
    assert workers.run(rectangular, 3, columns=None)[0] == [0, 40, 80, 120]
    assert workers.run(rectangular, 3, columns=[0, 7, 7, 120])[0] == [0, 7, 7, 120]


def halo_of_all(group) -> tuple[str, str]:
    csr = whole_numbers(90, 90, 0.5)
    made = st_dist.plan(csr, 8, group)
    return made.exchange, made.explain()


def test_all_gather_is_chosen_where_nearly_all_of_b_is_needed(workers):
    way, text = workers.run(halo_of_all, 3)[0]
    assert way == "all_gather"
    assert "all_gather of all of B" in text and "all_to_all not taken" in text


def test_shares_are_balanced_by_entries_and_rows():
    first = share_bounds(row_costs(torch.tensor([90] * 10 + [1] * 80), 64, 4), 2)
    assert first == (0, 6, 90)
    assert share_bounds(torch.ones(0), 3) == (0, 0, 0, 0)
    assert share_bounds(torch.ones(2), 4)[-1] == 2


@pytest.mark.parametrize("seed", range(20))
def test_each_share_ends_at_the_row_nearest_to_its_aim(seed):
    generator = torch.Generator().manual_seed(seed)
    costs = torch.randint(1, 12, (4 + seed,), generator=generator).double()
    ends = torch.cat([torch.zeros(1), torch.cumsum(costs, 0)])
    for parts in range(1, 5):
        bounds = share_bounds(costs, parts)
        assert bounds[0] == 0 and bounds[-1] == costs.numel()
        for part, bound in enumerate(bounds):
            aim = ends[-1] * part / parts
            assert (ends[bound] - aim).abs() == (ends - aim).abs().min(), (bounds, part)


# -- operands and epilogue ------------------------------------------------------------------------


def shapes(group, exchange: str) -> None:
    csr = whole_numbers(90, 90, 0.06)
    made = st_dist.plan(csr, 8, group, exchange=exchange)
    for lead, width in (((), 1), ((), 33), ((3,), 5), ((), 5), ((2, 3), 8), ((4,), 8), ((), 0)):
        B = operand(90, width, torch.float64, *lead)
        expected = st.plan(csr, 8) @ B
        for given in (B, B.mT.contiguous().mT):
            assert torch.equal(made.gather(made @ made.shard(given)), expected), (lead, width)
        strided = made.shard(B).mT.contiguous().mT
        assert torch.equal(made.gather(made @ strided), expected), (lead, width)


@pytest.mark.parametrize("exchange", ["all_to_all", "all_gather"])
def test_batches_strides_and_other_widths(workers, exchange):
    workers.run(shapes, 3, exchange=exchange)


OPTIONS = [
    {"alpha": 0.5},
    {"bias": True},
    {"relu": True},
    {"alpha": -2.0, "bias": True, "relu": True},
    {"reduce": "max"},
    {"reduce": "min", "alpha": 2.0},
]


def epilogue(group, dtype: torch.dtype) -> None:
    csr = whole_numbers(90, 90, 0.06)
    csr = csr.with_values(csr.values.to(dtype))
    single, B, bias = st.plan(csr, 8), operand(90, 8, dtype), torch.arange(8).to(dtype)
    for partition in ("auto", bounds_of(group, 40, 40)):
        made = st_dist.plan(csr, 8, group, partition)
        for options in OPTIONS:
            more = {**options, **({"bias": bias} if "bias" in options else {})}
            found = made.gather(made.run(made.shard(B), **more))
            assert torch.equal(found, single.run(B, **more)), (partition, options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_epilogue_is_applied_once(workers, dtype):
    workers.run(epilogue, 3, dtype=dtype)


def mean(group) -> None:
    csr = SQUARE
    made = st_dist.plan(csr, 8, group)
    B = torch.randn(90, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert_close(made.gather(made.run(made.shard(B), reduce="mean")), csr, B, "mean")


@pytest.mark.parametrize("ranks", RANKS)
def test_the_mean_is_over_local_and_remote_entries(workers, ranks):
    workers.run(mean, ranks)


def wide_result(group) -> None:
    csr = whole_numbers(90, 90, 0.06)
    csr = csr.with_values(csr.values.to(torch.bfloat16))
    made, B = st_dist.plan(csr, 8, group), operand(90, 8, torch.bfloat16)
    C = made.run(made.shard(B), out_dtype=torch.float32)
    assert C.dtype is torch.float32
    assert torch.equal(made.gather(C), st.plan(csr, 8).run(B, out_dtype=torch.float32))


def test_sixteen_bit_sums_may_be_kept_in_float32(workers):
    workers.run(wide_result, 2)


def not_finite(group, exchange: str) -> None:
    csr = whole_numbers(90, 90, 0.06)
    made, B = st_dist.plan(csr, 8, group, exchange=exchange), operand(90, 8)
    B[4, 1], B[50, 3], B[88, 0] = float("nan"), float("inf"), -float("inf")
    for reduce in ("sum", "max", "min"):
        C = made.gather(made.run(made.shard(B), reduce=reduce))
        assert torch.allclose(C, st.plan(csr, 8).run(B, reduce=reduce), equal_nan=True)
    again = made.gather(made @ made.shard(operand(90, 8)))
    assert bool(again.isfinite().all()), "a buffer kept numbers of the product before"


@pytest.mark.parametrize("exchange", ["all_to_all", "all_gather"])
def test_nan_and_inf_reach_only_rows_that_reference_them(workers, exchange):
    workers.run(not_finite, 4, exchange=exchange)


def padding(group) -> None:
    """Shares of 3, 0 and 87 rows. Memory that torch has not filled holds NaN here."""
    csr = whole_numbers(90, 90, 0.06)
    made = st_dist.plan(csr, 8, group, bounds_of(group, 3, 3), exchange="all_gather")
    B = operand(90, 8) + 1.0
    torch.use_deterministic_algorithms(True)
    try:
        for keep in (False, True):
            received, pending = made._exchange.start(made.shard(B), keep=keep)
            pending.wait()
            by_rank = received.reshape(3, 87, 8)
            for part, first, last in ((0, 0, 3), (1, 3, 3), (2, 3, 90)):
                assert torch.equal(by_rank[part, : last - first], B[first:last])
                assert not bool(by_rank[part, last - first :].any()), "a dense system reads these"
    finally:
        torch.use_deterministic_algorithms(False)


def test_rows_that_pad_a_gathered_share_are_zero(workers):
    workers.run(padding, 3)


def autocast(group) -> None:
    csr = whole_numbers(90, 90, 0.06).with_values(None)
    made = st_dist.plan(csr, 8, group, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        C = made @ made.shard(operand(90, 8, torch.float32))
    assert C.dtype is torch.bfloat16
    assert torch.equal(made.gather(C).float(), st.plan(csr, 8) @ operand(90, 8, torch.float32))
    B = operand(90, 8, torch.float32) / 3  # its buffers are no longer those of bfloat16
    torch.testing.assert_close(made.gather(made @ made.shard(B)), st.plan(csr, 8) @ B)


def test_autocast_is_honoured_and_patterns_have_ones(workers):
    workers.run(autocast, 2)


def updates(group) -> None:
    csr = whole_numbers(90, 90, 0.06)
    made, B = st_dist.plan(csr, 8, group), operand(90, 8)
    begin = int(csr.indptr[made.rows[0]])
    mine = slice(begin, begin + made.local_nnz)
    assert torch.equal(made.values, csr.values[mine])
    other = csr.with_values(csr.values + 1)
    expected = st.plan(other, 8) @ B
    given = made.run(made.shard(B), values=other.values[mine])
    assert torch.equal(made.gather(given), expected)
    assert torch.equal(made.gather(made @ made.shard(B)), st.plan(csr, 8) @ B)
    made.update_values(other.values[mine])
    assert torch.equal(made.gather(made @ made.shard(B)), expected)
    assert torch.equal(made.values, other.values[mine])


@pytest.mark.parametrize("ranks", [1, 3])
def test_values_may_be_given_or_replaced(workers, ranks):
    workers.run(updates, ranks)


def modes(group, exchange: str) -> None:
    csr, B = whole_numbers(90, 90, 0.06), operand(90, 8)
    made = st_dist.plan(csr, 8, group, exchange=exchange)
    expected, mine = st.plan(csr, 8) @ B, made.shard(B)
    with torch.inference_mode():
        assert torch.equal(made.gather(made @ mine), expected)
    buffers = made._exchange._buffers
    assert torch.equal(made.gather(made @ mine), expected)
    assert made._exchange._buffers is buffers is not None
    with torch.no_grad():
        assert torch.equal(made.gather(made @ mine.clone().requires_grad_()), expected)


@pytest.mark.parametrize("exchange", ["all_to_all", "all_gather"])
def test_buffers_made_in_inference_mode_serve_outside_of_it(workers, exchange):
    workers.run(modes, 2, exchange=exchange)

"""Products straight from CSR arrays, run on the host thread by thread."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sparsetile.kernels.direct import Lists
from sparsetile.launch import direct, faults
from sparsetile.launch.interface import Epilogue
from tests.emulator.build import host_compiler
from tests.emulator.products import load_on_host
from tests.host import one_processor, unread_scratch

pytestmark = pytest.mark.skipif(host_compiler() is None, reason="no g++ here")

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64


@pytest.fixture(autouse=True)
def counters(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, folder: Path, torch_cuda
) -> Iterator[list[Tensor]]:
    """Kernels run on the host. Yields the counters of each product, which must end as zeros."""
    used: list[Tensor] = []

    def scratch(*sizes: int) -> tuple[Tensor, Tensor]:
        memory, counters = unread_scratch(*sizes)
        used.append(counters)
        return memory, counters

    words = torch.zeros(4, dtype=torch.int64)
    load_on_host(
        monkeypatch, folder, direct, scratch=scratch, processors=one_processor,
        current_device=lambda: -1,  # what tensors of the host say
        faults_address=lambda device: words.data_ptr(),
    )  # fmt: skip
    torch_cuda(synchronize=None)
    monkeypatch.setattr(
        faults, "_words", [(faults.ctypes.c_int64 * 4).from_address(words.data_ptr())]
    )
    for each in (direct._prepared, direct._recent):
        each.clear()
    yield used
    for each in (direct._prepared, direct._recent):
        each.clear()
    wrong_pointers = "pointers" in request.node.name
    assert wrong_pointers or all(not counters.any() for counters in used)


def arrays(
    lengths: Sequence[int], cols: int, dtype: torch.dtype, weighted: bool = True
) -> tuple[Tensor, Tensor, Tensor | None]:
    indptr = torch.tensor([0, *lengths]).cumsum(0)
    entries = int(indptr[-1])
    indices = torch.randint(0, cols, (entries,)) if cols else torch.zeros(0, dtype=torch.int64)
    return indptr, indices, torch.randint(-4, 5, (entries,)).to(dtype) if weighted else None


def products(indptr: Tensor, indices: Tensor, values: Tensor | None, B: Tensor) -> Tensor:
    """The product of each entry, in float64."""
    weights = torch.ones(indices.shape[0]) if values is None else values
    return weights.double()[:, None] * B.double()[..., indices.long(), :]


def rows_of(indptr: Tensor) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(indptr) - 1), indptr.diff())


def summed(indptr: Tensor, indices: Tensor, values: Tensor | None, B: Tensor) -> Tensor:
    zeros = torch.zeros((*B.shape[:-2], len(indptr) - 1, B.shape[-1]), dtype=F64)
    return zeros.index_add(-2, rows_of(indptr), products(indptr, indices, values, B))


def operand(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(-4, 5, shape).to(dtype)


# Rows of one warp, of pieces, of two levels of a tree; none.
UNEVEN = [3, 0, 33, 700, 1, 0, 0, 64, 65, 130, 2, 9, 5000]


@pytest.mark.parametrize(
    "dtype, n",
    [
        *itertools.product([F32, F16, F64], [1, 2, 4, 6, 7, 8, 16, 32, 128, 200]),
        (BF16, 1), (BF16, 6), (BF16, 200),  # its accesses are those of float16
    ],
)  # fmt: skip
def test_sums_match_bit_for_bit(dtype: torch.dtype, n: int) -> None:
    where = arrays(UNEVEN, 90, dtype)
    B = operand(90, n, dtype=dtype).clamp(-1, 1)
    assert torch.equal(direct.direct_product(*where, B), summed(*where, B).to(dtype))


def test_random_arrays_of_any_index_types_match() -> None:
    draw = random.Random(5)
    for number in range(12):
        lengths = [draw.choice((0, 1, 2, 9, 40, 300)) for _ in range(draw.choice((1, 5, 60)))]
        indptr, indices, values = arrays(lengths, 50, F32, weighted=number % 3 > 0)
        B = operand(50, draw.choice((4, 31, 64)), dtype=F32)
        want = summed(indptr, indices, values, B)
        types = [(torch.int32, torch.int64)[number >> bit & 1] for bit in (0, 1)]
        got = direct.direct_product(indptr.to(types[0]), indices.to(types[1]), values, B)
        assert torch.equal(got, want.to(F32))


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_extrema_and_their_nans(reduce: str) -> None:
    indptr, indices, values = arrays(UNEVEN, 60, F32)
    B = operand(60, 8, dtype=F32)
    B[7, 3] = torch.nan
    each = products(indptr, indices, values, B)
    want = torch.zeros(len(UNEVEN), 8, dtype=F64).scatter_reduce(
        0, rows_of(indptr)[:, None].expand_as(each), each, f"a{reduce}", include_self=False
    )
    got = direct.direct_product(indptr, indices, values, B, reduce)
    assert torch.equal(got.nan_to_num(nan=99.0), want.float().nan_to_num(nan=99.0))


def test_means_bias_and_relu() -> None:
    where = arrays(UNEVEN, 60, F32)
    B, bias = operand(60, 16, dtype=F32), torch.arange(-8.0, 8.0)
    mean = summed(*where, B) / where[0].diff().clamp(min=1)[:, None]
    got = direct.direct_product(*where, B, "mean")
    torch.testing.assert_close(got, mean.float())
    got = direct.direct_product(
        *where, B, "mean", Epilogue(alpha=2.0, mean=True, bias=bias, relu=True)
    )
    torch.testing.assert_close(got, (2.0 * mean + bias).relu().float())


def test_rows_of_B_and_batches_may_lie_apart() -> None:
    where = arrays(UNEVEN[:12], 40, F32)
    wide = operand(3, 40, 24, dtype=F32)
    for B in (wide, wide[:, :, 5:14], wide[:2, :, ::1].contiguous()[..., :3]):
        assert torch.equal(direct.direct_product(*where, B), summed(*where, B).float())


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0], [1]])
def test_hardly_any_entries(lengths: list[int]) -> None:
    where = arrays(lengths, 3, F32)
    B = operand(3, 4, dtype=F32)
    assert torch.equal(direct.direct_product(*where, B), summed(*where, B).float())
    assert direct.direct_product(*where, B[:, :0]).shape == (len(lengths), 0)


@pytest.mark.parametrize("weighted", [True, False])
def test_a_wrong_column_makes_its_row_nan_and_is_raised_once(weighted: bool) -> None:
    indptr, indices, values = arrays(UNEVEN, 90, F32, weighted)
    indices[40], indices[700] = 90, -3
    B = operand(90, 32, dtype=F32)
    C = direct.direct_product(indptr, indices, values, B)
    wrong = torch.bincount(rows_of(indptr)[[40, 700]], minlength=len(UNEVEN)) > 0
    assert torch.equal(C.isnan().all(1), wrong) and torch.equal(C.isnan().any(1), wrong)
    with pytest.raises(
        ValueError,
        match=r"column indices must be from 0 to 89 .*, got (90 at entry 40|-3 at entry 700) in an",
    ):
        faults.raise_faults()
    faults.raise_faults()


@pytest.mark.parametrize(
    ("place", "number", "text"),
    [
        (0, 2, "got 2 at row 0"),
        (3, -7, "got"),
        (3, 10**12, "got"),
        (13, 5999, "got 5999 at row 13"),
    ],
)
def test_wrong_row_pointers_are_raised_and_read_nothing_else(
    place: int, number: int, text: str
) -> None:
    indptr, indices, values = arrays(UNEVEN, 90, F32)
    indptr[place] = number
    direct.direct_product(indptr, indices, values, operand(90, 32, dtype=F32))
    with pytest.raises(ValueError, match=f"row pointers must be ascending .* {text}"):
        faults.raise_faults()


@pytest.mark.parametrize("dtype", [F32, BF16, F64])
@pytest.mark.parametrize("n", [1, 8, 40, 300])
def test_sampled_products(dtype: torch.dtype, n: int) -> None:
    indptr, indices, _ = arrays(UNEVEN, 90, dtype)
    G, B = operand(len(UNEVEN), n, dtype=dtype), operand(90, n, dtype=dtype)
    want = (G.double()[rows_of(indptr)] * B.double()[indices]).sum(1)
    assert torch.equal(direct.direct_sddmm(indptr, indices, G, B).double(), want)


def test_sampled_products_add_batches_and_mark_wrong_columns() -> None:
    indptr, indices, _ = arrays(UNEVEN, 90, F32)
    indices[11] = 400
    G, B = operand(2, len(UNEVEN), 12, dtype=F32), operand(2, 90, 12, dtype=F32)
    got = direct.direct_sddmm(indptr, indices, G, B)
    inside = indices.clamp(max=89)
    want = (G.double()[:, rows_of(indptr)] * B.double()[:, inside]).sum((0, 2))
    want[11] = torch.nan
    torch.testing.assert_close(got.double(), want, equal_nan=True)
    with pytest.raises(ValueError, match="400 at entry 11"):
        faults.raise_faults()


def test_lists_have_room_for_the_rows_that_need_most() -> None:
    for entries in (0, 1, 127, 128, 129, 4096, 10**6, 2**31 - 1):
        for rows, lanes in ((1, 32), (100, 8), (10**6, 16)):
            lists = Lists.of(rows, entries, lanes, 4 * (entries % 500), 4)
            assert lists.wide <= lists.segment
            # All entries in one row, or in rows just long enough to be cut, or to be listed.
            for length in {entries, lists.segment + 1, lists.wide + 1}:
                count = entries // max(length, 1)
                pieces = -(-length // lists.segment)
                assert count * pieces <= lists.items or length <= lists.wide
                if pieces > 1:
                    slots, nodes, level = pieces, 0, pieces
                    while level > 1:
                        level = -(-level // 16)
                        nodes, slots = nodes + level, slots + (level if level > 1 else 0)
                    assert count * slots <= lists.slots and count * nodes <= lists.nodes

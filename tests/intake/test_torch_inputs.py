"""torch sparse tensors of every layout become the matrix that ``to_dense`` shows."""

from __future__ import annotations

import pytest
import torch

from sparsetile.intake import as_csr

EXAMPLE = torch.tensor(
    [[0.0, 2.0, 0.0, 3.0], [0.0, 0.0, 0.0, 0.0], [5.0, 0.0, 7.0, 0.0], [0.0, 0.0, 0.0, 11.0]]
)
LAYOUTS = {
    "csr": lambda d: d.to_sparse_csr(),
    "csc": lambda d: d.to_sparse_csc(),
    "coo": lambda d: d.to_sparse_coo(),
    "bsr": lambda d: d.to_sparse_bsr((2, 2)),
    "bsr_flat": lambda d: d.to_sparse_bsr((1, 2)),
    "bsc": lambda d: d.to_sparse_bsc((2, 1)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_layout_and_float_type_reads_as_its_dense_matrix(layout, dtype, device, dense):
    matrix = EXAMPLE.to(device, dtype)
    csr = as_csr(LAYOUTS[layout](matrix))
    assert csr.values.dtype == dtype
    assert csr.device.type == device
    assert torch.equal(dense(csr), matrix.cpu())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rectangular_matrix_keeps_its_shape(layout, dense):
    matrix = torch.cat([EXAMPLE, EXAMPLE + 1], dim=1)
    csr = as_csr(LAYOUTS[layout](matrix))
    assert csr.shape == (4, 8)
    assert torch.equal(dense(csr), matrix)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0), (4, 6)])
def test_a_matrix_without_entries_reads_as_one(layout, shape, dense):
    csr = as_csr(LAYOUTS[layout](torch.zeros(shape)))
    assert (csr.shape, csr.nnz, csr.entry_map) == (shape, 0, None)
    assert csr.values.dtype == torch.float32
    assert torch.equal(dense(csr), torch.zeros(shape))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_entry_map_carries_stored_values_to_canonical_ones(layout):
    A = LAYOUTS[layout](EXAMPLE)
    csr = as_csr(A)
    stored = (A._values() if layout == "coo" else A.values()).reshape(-1)
    assert torch.equal(csr.canonical_values(stored), csr.values)
    assert torch.equal(csr.canonical_values(10 * stored), 10 * csr.values)


@pytest.mark.parametrize("layout", ["csr", "coo"])
def test_canonical_input_needs_no_entry_map(layout):
    assert as_csr(LAYOUTS[layout](EXAMPLE)).entry_map is None


def test_zeros_inside_blocks_are_entries():
    csr = as_csr(EXAMPLE.to_sparse_bsr((2, 2)))
    assert csr.nnz == 16
    assert csr.values.count_nonzero() == 5


def test_explicit_zeros_are_entries():
    A = torch.sparse_csr_tensor([0, 2, 2], [0, 2], [0.0, 4.0], size=(2, 3))
    csr = as_csr(A)
    assert csr.indices.tolist() == [0, 2]
    assert csr.values.tolist() == [0.0, 4.0]


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_both_index_types_read_alike(index, dense):
    A = torch.sparse_csr_tensor(
        torch.tensor([0, 1, 2], dtype=index), torch.tensor([1, 0], dtype=index), [3.0, 4.0]
    )
    assert torch.equal(dense(as_csr(A)), A.to_dense())


def test_unsorted_csr_rows_are_sorted(dense):
    A = torch.sparse_csr_tensor(
        [0, 3, 4], [2, 0, 1, 1], [3.0, 1.0, 2.0, 4.0], size=(2, 3), check_invariants=False
    )
    csr = as_csr(A)
    assert torch.equal(dense(csr), torch.tensor([[1.0, 2.0, 3.0], [0.0, 4.0, 0.0]]))
    assert csr.entry_map.tolist() == [2, 0, 1, 3]


def test_uncoalesced_coo_sums_its_duplicates(device, dense):
    A = torch.sparse_coo_tensor(
        [[1, 0, 1, 1], [2, 0, 2, 1]], [1.0, 2.0, 4.0, 8.0], (2, 3), device=device
    )
    csr = as_csr(A)
    assert torch.equal(dense(csr), A.to_dense().cpu())
    assert csr.entry_map.tolist() == [2, 0, 2, 1]


def test_a_wrong_coalesced_flag_is_ignored(dense):
    A = torch.sparse_coo_tensor([[1, 0, 1], [0, 1, 0]], [1.0, 2.0, 4.0], (2, 2))
    A = A._coalesced_(True).requires_grad_(True)
    assert torch.equal(dense(as_csr(A)), torch.tensor([[0.0, 2.0], [5.0, 0.0]]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tracked", [False, True])
def test_half_types_are_summed_in_float32(dtype, tracked):
    # 256 + 1 rounds back to 256 at every step in bfloat16, and 2048 + 1 in float16.
    large = 2048.0 if dtype == torch.float16 else 256.0
    values = torch.tensor([large, *[1.0] * 64], dtype=dtype)
    A = torch.sparse_coo_tensor(torch.zeros(2, 65, dtype=torch.int64), values, (1, 1))
    csr = as_csr(A.requires_grad_(tracked))
    assert csr.values.dtype == dtype
    assert csr.values.item() == large + 64


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64])
def test_whole_numbers_become_the_default_float_type(dtype, dense):
    A = EXAMPLE.to(dtype).to_sparse_csr()
    csr = as_csr(A)
    assert csr.values.dtype == torch.get_default_dtype()
    assert torch.equal(dense(csr), EXAMPLE.to(dtype).float())


@pytest.mark.parametrize("build", ["csr", "csc", "bsr", "bsc", "coo", "coalesced"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_gradients_reach_the_values_the_matrix_was_built_from(build, dtype, device):
    blocked = build in ("bsr", "bsc")
    values = torch.arange(1, 13, device=device, dtype=dtype)
    values = values.reshape(3, 2, 2) if blocked else values[:3].clone()
    values.requires_grad_(True)
    pointers = torch.tensor([0, 1, 3], device=device)
    inner = torch.tensor([1, 0, 1], device=device)
    outer = torch.tensor([0, 1, 1], device=device)
    size = (4, 4) if blocked else (2, 2)
    if build.startswith("co"):
        # Out of order and, uncoalesced, with a duplicate.
        indices = torch.stack([outer, inner]).flip(1)
        if build == "coo":
            indices[:, 1] = indices[:, 0]
        A = torch.sparse_coo_tensor(indices, values, size)
        A = A.coalesce() if build == "coalesced" else A
    else:
        make = getattr(torch, f"sparse_{build}_tensor")
        A = make(pointers, inner, values, size)
    csr = as_csr(A)
    weights = torch.arange(1, csr.nnz + 1, device=device, dtype=dtype)
    (csr.values * weights).sum().backward()
    position = csr.entry_map
    if position is None:
        position = torch.arange(csr.nnz, device=device)
    if build == "coalesced":  # the entries of A are no longer those of `values`, but reversed
        position = position.flip(0)
    assert torch.equal(values.grad.reshape(-1), weights[position])


@pytest.mark.parametrize("layout", ["csr", "coo"])
def test_a_sparse_leaf_receives_a_gradient(layout):
    A = LAYOUTS[layout](EXAMPLE).requires_grad_(True)
    (3 * as_csr(A).values).sum().backward()
    assert torch.equal(A.grad.to_dense(), 3.0 * (EXAMPLE != 0))


def test_non_finite_values_are_ordinary(dense):
    matrix = torch.tensor([[float("nan"), 0.0], [float("inf"), -float("inf")]])
    csr = as_csr(matrix.to_sparse_csc())
    assert torch.equal(dense(csr).nan_to_num(1.5), matrix.nan_to_num(1.5))


def broken(layout, first, second, values, size):
    make = getattr(torch, f"sparse_{layout}_tensor")
    first, second = torch.tensor(first), torch.tensor(second)
    if layout == "coo":
        return make(torch.stack([first, second]), values, size, check_invariants=False)
    return make(first, second, values, size, check_invariants=False)


MALFORMED = {
    "dense": (
        lambda: torch.ones(2, 3),
        TypeError,
        "plan: A must be a sparse matrix, got a dense tensor of shape (2, 3). "
        "Call A.to_sparse_csr() first.",
    ),
    "batched": (
        lambda: torch.ones(2, 2, 2).to_sparse_csr(),
        ValueError,
        "plan: A must be a matrix of two sparse dimensions, got shape (2, 2, 2). "
        "Pass one matrix at a time.",
    ),
    "hybrid": (
        lambda: torch.sparse_coo_tensor([[0]], torch.ones(1, 3), (2, 3)),
        ValueError,
        "plan: A must be a matrix of two sparse dimensions, "
        "got shape (2, 3) with 1 dense dimensions. Pass one matrix at a time.",
    ),
    "meta": (
        lambda: torch.ones(2, 2).to_sparse_csr().to("meta"),
        ValueError,
        "plan: A must be a tensor that holds data, got one on the meta device. "
        "Move the matrix to the CPU or a GPU first.",
    ),
    "complex": (
        lambda: torch.ones(2, 2, dtype=torch.complex64).to_sparse_csr(),
        TypeError,
        "plan: values must be float16, bfloat16, float32, float64, or whole numbers, "
        "got complex64. Split it into real and imaginary parts.",
    ),
    "csr column": (
        lambda: broken("csr", [0, 1, 1], [7], torch.ones(1), (2, 3)),
        ValueError,
        "plan: col_indices must be at least 0 and below 3, the number of columns, "
        "got 7 at entry 0. Check shape, and that indices count from 0.",
    ),
    "csc row": (
        lambda: broken("csc", [0, 1, 1, 1], [-7], torch.ones(1), (2, 3)),
        ValueError,
        "plan: row_indices must be at least 0 and below 2, the number of rows, "
        "got -7 at entry 0. Check shape, and that indices count from 0.",
    ),
    "csr pointers": (
        lambda: broken("csr", [0, 2, 1], [0], torch.ones(1), (2, 3)),
        ValueError,
        "plan: crow_indices must be non-decreasing, got 2 followed by 1 at position 2. "
        "Pass cumulative counts of the entries.",
    ),
    "csc pointers": (
        lambda: broken("csc", [0, 1], [0], torch.ones(1), (2, 3)),
        ValueError,
        "plan: ccol_indices must be of length 4 (columns + 1), got length 2. "
        "Check it against shape.",
    ),
    "bsr column": (
        lambda: broken("bsr", [0, 1], [7], torch.ones(1, 2, 2), (2, 4)),
        ValueError,
        "plan: col_indices must be at least 0 and below 2, the number of block columns, "
        "got 7 at entry 0. Check shape, and that indices count from 0.",
    ),
    "coo row": (
        lambda: broken("coo", [9], [0], torch.ones(1), (2, 3)),
        ValueError,
        "plan: indices[0] must be at least 0 and below 2, the number of rows, "
        "got 9 at entry 0. Check shape, and that indices count from 0.",
    ),
    "too many columns": (
        lambda: torch.sparse_coo_tensor([[0], [0]], [1.0], (2, 2**31)),
        ValueError,
        "plan: shape[1] must be between 0 and 2147483647, got 2147483648. "
        "Give a whole number from 0 to 2147483647.",
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_tensor_is_refused_with_one_clear_text(case):
    build, kind, text = MALFORMED[case]
    with pytest.raises(kind) as refused:
        as_csr(build())
    assert str(refused.value) == text


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs another layout")
def test_a_layout_that_is_not_sparse_is_refused():
    with pytest.raises(TypeError) as refused:
        as_csr(torch.ones(2, 2).to_mkldnn())
    assert str(refused.value) == (
        "plan: A must be a sparse tensor of layout CSR, CSC, COO, BSR or BSC, "
        "got layout torch._mkldnn. Call A.to_sparse_csr() first."
    )

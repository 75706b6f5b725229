"""Matrices of scipy, cupyx and torch_sparse."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import sparsetile as st
from sparsetile.intake import as_csr

EXAMPLE = np.array(
    [[0.0, 2.0, 0.0, 3.0], [0.0, 0.0, 0.0, 0.0], [5.0, 0.0, 7.0, 0.0], [0.0, 0.0, 0.0, 11.0]]
)
FORMATS = ["csr", "csc", "coo", "bsr", "dia", "lil", "dok"]


def named(name: str, module: str, **body: object) -> type:
    """Make a class that claims to come from another library."""
    return type(name, (), {"__module__": module, **body})


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("family", [sp.csr_array, sp.csr_matrix])
def test_every_scipy_format_reads_as_its_dense_matrix(name, family, dense):
    A = family(EXAMPLE).asformat(name)
    csr = as_csr(A)
    assert csr.values.dtype == torch.float64
    assert torch.equal(dense(csr), torch.from_numpy(EXAMPLE))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (3, 0), (2, 5), (1, 1)])
def test_an_empty_scipy_matrix_reads_as_one(name, shape, dense):
    csr = as_csr(sp.coo_array(shape, dtype=np.float32).asformat(name))
    assert csr.values.dtype == torch.float32
    assert torch.equal(dense(csr), torch.zeros(shape))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(3, 8), (8, 3)])
def test_a_rectangular_scipy_matrix_keeps_its_shape(name, shape, dense):
    matrix = np.arange(24, dtype=np.float32).reshape(shape) % 5
    csr = as_csr(sp.csr_array(matrix).asformat(name))
    assert csr.shape == shape
    assert torch.equal(dense(csr), torch.from_numpy(matrix))


@pytest.mark.parametrize("name", ["csr", "csc", "coo", "bsr"])
def test_the_entry_map_follows_the_order_of_data(name):
    A = sp.csr_array(EXAMPLE).asformat(name)
    csr = as_csr(A)
    data = torch.from_numpy(A.data).reshape(-1)
    assert torch.equal(csr.canonical_values(data), csr.values)


def test_the_entry_map_of_lil_and_dok_follows_tocoo():
    A = sp.dok_array((3, 3))
    A[2, 0], A[0, 1], A[0, 0] = 1.0, 2.0, 3.0
    csr = as_csr(A)
    assert csr.entry_map.tolist() == [2, 1, 0]
    assert torch.equal(csr.canonical_values(torch.from_numpy(A.tocoo().data)), csr.values)


def test_stored_zeros_are_kept(dense):
    A = sp.csr_array((np.zeros(2), [0, 2], [0, 1, 2]), shape=(2, 3))
    assert as_csr(A).nnz == 2
    B = sp.coo_array((np.zeros(2), ([0, 1], [0, 2])), shape=(2, 3))
    assert as_csr(B).nnz == 2


def test_entries_of_a_diagonal_are_its_nonzeros_inside_the_matrix(dense):
    data = np.array([[1.0, 0.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
    A = sp.dia_array((data, [0, 2]), shape=(3, 4))
    csr = as_csr(A)
    assert csr.nnz == A.tocsr().nnz == 4  # two of the main diagonal, whose zero pads it, and two
    assert torch.equal(dense(csr), torch.from_numpy(A.toarray()))


def test_nan_on_a_diagonal_is_an_entry():
    A = sp.dia_array((np.array([[1.0, np.nan, 0.0]]), [0]), shape=(3, 3))
    assert as_csr(A).nnz == 2


@pytest.mark.parametrize("reduce", ["mean", "max", "min"])
def test_padding_of_diagonals_does_not_count_in_a_reduction(reduce):
    matrix = sp.csr_array(np.array([[2.0, 0.0, 4.0], [0.0, 0.0, 0.0], [-3.0, 0.0, -5.0]]))
    B = torch.tensor([[1.0], [float("inf")], [1.0]], dtype=torch.float64)
    expected = st.plan(matrix, 1, device="cpu").run(B, reduce=reduce)
    assert torch.equal(st.plan(matrix.todia(), 1, device="cpu").run(B, reduce=reduce), expected)


def test_ignores_diagonal_data_beyond_the_last_column(dense):
    A = sp.dia_array((np.arange(1.0, 7.0).reshape(1, 6), [-1]), shape=(8, 3))
    csr = as_csr(A)
    assert csr.nnz == 3
    assert torch.equal(dense(csr), torch.from_numpy(A.toarray()))


def test_unsorted_and_repeated_scipy_entries_are_summed(dense):
    A = sp.csr_array(
        (np.array([1.0, 2.0, 4.0, 8.0]), np.array([2, 0, 2, 1]), np.array([0, 3, 4])), shape=(2, 3)
    )
    csr = as_csr(A)
    assert torch.equal(dense(csr), torch.from_numpy(A.toarray()))
    assert csr.entry_map.tolist() == [1, 0, 1, 2]


def test_ignores_unused_capacity_of_scipy_arrays(dense):
    A = sp.csr_array((np.array([1.0, 2.0]), np.array([0, 1]), np.array([0, 1, 2])), shape=(2, 2))
    A.data = np.array([1.0, 2.0, 99.0])
    A.indices = np.array([0, 1, 7], dtype=np.int32)
    assert torch.equal(dense(as_csr(A)), torch.tensor([[1.0, 0.0], [0.0, 2.0]]).double())


@pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.uint16, np.uint32, np.int64, np.uint64])
def test_whole_numbers_become_the_default_float_type(dtype, dense):
    csr = as_csr(sp.csr_array(EXAMPLE.astype(dtype)))
    assert csr.values.dtype == torch.get_default_dtype()
    assert torch.equal(dense(csr), torch.from_numpy(EXAMPLE.astype(dtype).astype(np.float32)))


@pytest.mark.parametrize(
    "dtype", [np.int8, np.int16, np.uint8, np.uint16, np.uint32, np.int32, np.int64, np.uint64]
)
def test_any_integer_type_of_scipy_indices_is_converted(dtype, dense):
    A = sp.csr_array(EXAMPLE)
    A.indices, A.indptr = A.indices.astype(dtype), A.indptr.astype(dtype)
    assert torch.equal(dense(as_csr(A)), torch.from_numpy(EXAMPLE))


def test_a_subclass_of_a_scipy_matrix_is_recognised(dense):
    class Adjacency(sp.csr_array):
        pass

    assert torch.equal(dense(as_csr(Adjacency(EXAMPLE))), torch.from_numpy(EXAMPLE))


def test_a_corrupt_scipy_matrix_is_refused():
    A = sp.csr_array(EXAMPLE)
    A.indices[1] = 99
    with pytest.raises(ValueError) as refused:
        as_csr(A, function="spmm")
    assert str(refused.value) == (
        "spmm: indices must be at least 0 and below 4, the number of columns, got 99 at entry 1. "
        "Check shape, and that indices count from 0."
    )


def test_a_one_dimensional_scipy_array_is_refused():
    with pytest.raises(ValueError) as refused:
        as_csr(sp.coo_array(np.ones(3)))
    assert str(refused.value) == (
        "plan: A must be a matrix of two dimensions, got shape (3,). "
        "Reshape it to one row or one column."
    )


def test_complex_and_extended_scipy_values_are_refused():
    with pytest.raises(TypeError, match=r"^plan: values must be float16, .* got complex128\. "):
        as_csr(sp.csr_array(EXAMPLE * 1j))
    with pytest.raises(TypeError, match=r"^plan: values must be an array of a type that torch has"):
        as_csr(sp.csr_array(EXAMPLE.astype(np.longdouble)))


def test_a_format_that_is_not_known_is_refused():
    strange = named("odd_matrix", "scipy.sparse._odd", format="odd", shape=(2, 2))()
    with pytest.raises(TypeError) as refused:
        as_csr(strange)
    assert str(refused.value) == (
        "plan: A must be a sparse matrix of format csr, csc, coo, bsr, dia, lil or dok, "
        "got format 'odd'. Call A.tocsr() first."
    )


class GpuArray:
    """Stands for a cupy array: no numpy array and no tensor, only DLPack."""

    def __init__(self, content: np.ndarray, device: str = "cpu") -> None:
        self._content = torch.from_numpy(content.copy()).to(device)

    def __len__(self) -> int:
        return len(self._content)

    def __dlpack__(self, **options):
        return self._content.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._content.__dlpack_device__()


@pytest.mark.parametrize("name", ["csr", "csc", "coo", "dia"])
def test_cupyx_matrices_are_read_through_dlpack(name, device, dense):
    A = sp.csr_array(EXAMPLE.astype(np.float32)).asformat(name)
    parts = {"csr": ["indptr", "indices"], "csc": ["indptr", "indices"], "coo": ["row", "col"]}
    fields = {part: GpuArray(getattr(A, part), device) for part in parts.get(name, ["offsets"])}
    fields["data"] = GpuArray(A.data, device)
    foreign = named(f"{name}_matrix", f"cupyx.scipy.sparse._{name}", format=name, shape=A.shape)()
    vars(foreign).update(fields)
    csr = as_csr(foreign)
    assert csr.device.type == device
    assert torch.equal(dense(csr), torch.from_numpy(EXAMPLE).float())


def sparse_tensor(value, sizes=(2, 3)):
    rowptr, col = torch.tensor([0, 2, 3]), torch.tensor([2, 0, 1])
    cls = named(
        "SparseTensor",
        "torch_sparse.tensor",
        csr=lambda self: (rowptr, col, value),
        sparse_sizes=lambda self: sizes,
    )
    return cls()


def test_a_torch_sparse_tensor_is_read_through_csr(dense):
    value = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    csr = as_csr(sparse_tensor(value))
    assert torch.equal(dense(csr), torch.tensor([[2.0, 0.0, 1.0], [0.0, 3.0, 0.0]]))
    (csr.values * torch.tensor([1.0, 10.0, 100.0])).sum().backward()
    assert value.grad.tolist() == [10.0, 1.0, 100.0]


def test_a_torch_sparse_tensor_without_value_is_a_pattern():
    assert as_csr(sparse_tensor(None)).values is None


def test_a_torch_sparse_tensor_of_vectors_is_refused():
    with pytest.raises(ValueError) as refused:
        as_csr(sparse_tensor(torch.ones(3, 8)))
    assert str(refused.value) == (
        "plan: value must be 1-dimensional, got shape (3, 8). Flatten it with .reshape(-1)."
    )


def test_a_class_of_the_same_name_from_another_package_is_not_recognised():
    other = named("SparseTensor", "somewhere_else", csr=lambda self: None)()
    with pytest.raises(TypeError, match=r"^plan: A must be a sparse matrix, got SparseTensor\. "):
        as_csr(other)

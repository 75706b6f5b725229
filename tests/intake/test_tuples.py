"""Matrices given as tuples of arrays, and PyG's EdgeIndex."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from sparsetile.intake import as_csr

EDGES = torch.tensor([[2, 0, 1, 0], [0, 1, 2, 0]])
WEIGHT = torch.tensor([1.0, 2.0, 3.0, 4.0])
PATTERN = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
WEIGHTED = torch.tensor([[4.0, 2.0, 0.0], [0.0, 0.0, 3.0], [1.0, 0.0, 0.0]])


def csr_parts(indptr, indices, values=None, shape=(2, 3)):
    return (
        torch.tensor(indptr),
        torch.tensor(indices, dtype=torch.int64),
        None if values is None else torch.tensor(values),
        shape,
    )


def test_edges_are_rows_above_columns(device, dense):
    csr = as_csr((EDGES.to(device), WEIGHT.to(device), (3, 3)))
    assert csr.device.type == device
    assert torch.equal(dense(csr), WEIGHTED)
    assert csr.entry_map.tolist() == [3, 1, 2, 0]


def test_edges_agree_with_torch_coo(dense):
    csr = as_csr((EDGES, WEIGHT, (3, 4)))
    assert torch.equal(dense(csr), torch.sparse_coo_tensor(EDGES, WEIGHT, (3, 4)).to_dense())


def test_edges_without_weight_stay_a_pattern(dense):
    csr = as_csr((EDGES, None, (3, 3)))
    assert csr.values is None
    assert torch.equal(dense(csr), PATTERN)


def test_sorted_edges_need_no_entry_map():
    csr = as_csr((torch.tensor([[0, 0, 2], [1, 2, 0]]), None, (3, 3)))
    assert csr.entry_map is None
    assert csr.indptr.tolist() == [0, 2, 2, 3]


def test_a_repeated_edge_without_weight_counts_as_often_as_it_occurs(dense):
    edges = torch.tensor([[0, 1, 0, 0], [1, 0, 1, 1]])
    csr = as_csr((edges, None, (2, 2)))
    assert csr.values.dtype == torch.get_default_dtype()
    assert torch.equal(dense(csr), torch.tensor([[0.0, 3.0], [1.0, 0.0]]))
    assert torch.equal(csr.canonical_values(torch.ones(4)), csr.values)


def test_no_edges_make_an_empty_matrix(dense):
    none = torch.zeros(2, 0, dtype=torch.int64)
    assert as_csr((none, None, (3, 2))).values is None
    assert torch.equal(dense(as_csr((none, torch.zeros(0), (3, 2)))), torch.zeros(3, 2))
    assert as_csr((none, torch.zeros(0, dtype=torch.int64), (0, 0))).values.is_floating_point()


def test_accepts_numpy_arrays_and_lists(dense):
    parts = [EDGES.numpy(), WEIGHT.numpy(), np.array([3, 3])]
    assert torch.equal(dense(as_csr(parts)), WEIGHTED)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_accepts_int32_and_int64_indices(index, dense):
    assert torch.equal(dense(as_csr((EDGES.to(index), WEIGHT, (3, 3)))), WEIGHTED)


def test_strided_parts_are_read_in_their_order(dense):
    edges = torch.stack([EDGES, EDGES], dim=2)[:, :, 0]
    weight = torch.stack([WEIGHT, WEIGHT], dim=1)[:, 0]
    assert not edges.is_contiguous() and not weight.is_contiguous()
    assert torch.equal(dense(as_csr((edges, weight, (3, 3)))), WEIGHTED)


def test_awkward_numpy_memory_is_read_in_its_order(dense):
    edges = EDGES.numpy()[:, ::-1]
    weight = WEIGHT.numpy()[::-1].astype(">f4")
    edges.flags.writeable = False
    assert torch.equal(dense(as_csr((edges, weight, (3, 3)))), WEIGHTED)


def test_read_only_memory_is_read_without_a_warning(dense):
    edges, weight = EDGES.numpy().copy(), WEIGHT.numpy().copy()
    edges.flags.writeable = weight.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(dense(as_csr((edges, weight, (3, 3)))), WEIGHTED)


def test_gradients_reach_the_weight_through_sorting_and_summing():
    edges = torch.tensor([[1, 0, 1, 0], [0, 1, 0, 0]])
    weight = torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=torch.float64, requires_grad=True)

    def canonical(w):
        return as_csr((edges, w, (2, 2))).values

    assert canonical(weight).tolist() == [8.0, 2.0, 5.0]
    assert torch.autograd.gradcheck(canonical, (weight,))


def test_canonical_parts_are_taken_as_they_are(device, dense):
    indptr, indices, values, shape = csr_parts([0, 2, 3], [0, 2, 1], [1.0, 2.0, 3.0])
    values = values.to(device).requires_grad_(True)
    csr = as_csr((indptr.to(device), indices.int().to(device), values, shape))
    assert csr.entry_map is None
    assert csr.values is values
    assert torch.equal(dense(csr), torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 0.0]]))


def test_unsorted_and_repeated_parts_are_brought_to_canonical_form(device, dense):
    parts = csr_parts([0, 4, 5], [2, 0, 2, 1, 1], [1.0, 2.0, 4.0, 8.0, 16.0])
    csr = as_csr(tuple(p.to(device) if isinstance(p, torch.Tensor) else p for p in parts))
    assert torch.equal(dense(csr), torch.tensor([[2.0, 8.0, 5.0], [0.0, 16.0, 0.0]]))
    assert csr.entry_map.tolist() == [2, 0, 2, 1, 3]


def test_parts_without_values_stay_a_pattern():
    csr = as_csr(csr_parts([0, 2, 3], [2, 0, 1]))
    assert csr.values is None
    assert csr.indices.tolist() == [0, 2, 1]
    assert csr.entry_map.tolist() == [1, 0, 2]


@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0), (1, 1)])
def test_parts_without_entries_make_an_empty_matrix(shape, dense):
    csr = as_csr((torch.zeros(shape[0] + 1, dtype=torch.int32), np.empty(0, np.int64), None, shape))
    assert torch.equal(dense(csr), torch.zeros(shape))


def test_a_pyg_edge_index_is_read_with_its_size(dense):
    pyg = pytest.importorskip("torch_geometric")
    edges = pyg.EdgeIndex(EDGES, sparse_size=(3, 3))
    csr = as_csr(edges)
    assert csr.values is None
    assert torch.equal(dense(csr), PATTERN)
    X = torch.arange(9.0).reshape(3, 3)
    by_row = pyg.EdgeIndex(EDGES[:, EDGES[0].argsort()], sparse_size=(3, 3), sort_order="row")
    assert torch.equal(dense(csr) @ X, by_row @ X)


def test_a_pyg_edge_index_in_a_tuple_takes_weight_and_size(dense):
    pyg = pytest.importorskip("torch_geometric")
    edges = pyg.EdgeIndex(EDGES, sparse_size=(3, 3))
    assert torch.equal(dense(as_csr((edges, WEIGHT, None))), WEIGHTED)
    assert torch.equal(dense(as_csr((edges, WEIGHT, (3, 3)))), WEIGHTED)
    assert as_csr((pyg.EdgeIndex(EDGES), WEIGHT, (4, 5))).shape == (4, 5)


@pytest.mark.parametrize("parts", [(EDGES, WEIGHT), (EDGES, WEIGHT, None), [EDGES, WEIGHT]])
def test_edges_without_a_shape_make_a_square_matrix(dense, parts):
    assert torch.equal(dense(as_csr(parts)), WEIGHTED)
    assert as_csr((EDGES[:, :0], None)).shape == (0, 0)
    assert as_csr((np.array([[5], [1]]), None)).shape == (6, 6)


def test_a_pyg_edge_index_of_unknown_size_is_square():
    pyg = pytest.importorskip("torch_geometric")
    assert as_csr(pyg.EdgeIndex(EDGES)).shape == (3, 3)
    assert as_csr(pyg.EdgeIndex(EDGES, sparse_size=(7, None))).shape == (7, 7)


def test_a_pyg_graph_is_its_edges_weights_and_nodes(dense):
    data = pytest.importorskip("torch_geometric.data")
    graph = data.Data(edge_index=EDGES, num_nodes=3)
    assert torch.equal(dense(as_csr(graph)), PATTERN)
    graph.edge_weight = WEIGHT
    assert torch.equal(dense(as_csr(graph)), WEIGHTED)
    graph.num_nodes = 5
    assert as_csr(graph).shape == (5, 5)


def test_a_pyg_graph_of_several_kinds_or_without_edges_is_refused():
    data = pytest.importorskip("torch_geometric.data")
    several = data.HeteroData()
    several["a", "to", "b"].edge_index = EDGES
    for graph in (several, data.Data(num_nodes=3)):
        with pytest.raises(TypeError, match=r"^plan: A must be a graph with one edge_index, got "):
            as_csr(graph)


@pytest.mark.parametrize("edges, form", [(EDGES, "edge_index"), (EDGES.t(), r"edge_index\.t\(\)")])
def test_an_edge_index_alone_is_not_taken_for_a_dense_matrix(edges, form):
    text = rf"^plan: A must be a sparse matrix, got an edge_index .* Pass \({form}, weight or None"
    with pytest.raises(TypeError, match=text):
        as_csr(edges)


def test_rejects_a_shape_that_contradicts_the_edge_index():
    pyg = pytest.importorskip("torch_geometric")
    with pytest.raises(ValueError) as refused:
        as_csr((pyg.EdgeIndex(EDGES, sparse_size=(3, 3)), None, (3, 4)))
    assert str(refused.value) == (
        "plan: shape must be (3, 3), the sparse_size of the EdgeIndex, got (3, 4). "
        "Pass None to take the size of the EdgeIndex."
    )


RANGE = "Check shape, and that indices count from 0."
MALFORMED = {
    "indptr too short": (
        csr_parts([0, 1], [0]),
        ValueError,
        "plan: indptr must be of length 3 (rows + 1), got length 2. Check it against shape.",
    ),
    "indptr starts late": (
        csr_parts([1, 1, 2], [0, 1]),
        ValueError,
        "plan: indptr[0] must be 0, got 1. "
        "Subtract the first element when this is a slice of a larger matrix.",
    ),
    "indptr falls": (
        csr_parts([0, 9, 1], [0]),
        ValueError,
        "plan: indptr must be non-decreasing, got 9 followed by 1 at position 2. "
        "Pass cumulative counts of the entries.",
    ),
    "indptr below zero": (
        csr_parts([0, -4, 1], [0]),
        ValueError,
        "plan: indptr must be non-decreasing, got 0 followed by -4 at position 1. "
        "Pass cumulative counts of the entries.",
    ),
    "indptr ends elsewhere": (
        csr_parts([0, 1, 3], [0, 1]),
        ValueError,
        "plan: indptr[-1] must be 2, the number of indices, got 3. "
        "Pass indptr and indices of the same matrix.",
    ),
    "index negative": (
        csr_parts([0, 1, 2], [0, -1]),
        ValueError,
        f"plan: indices must be at least 0 and below 3, the number of columns, got -1 at entry 1. "
        f"{RANGE}",
    ),
    "index too large": (
        csr_parts([0, 1, 2], [0, 3]),
        ValueError,
        f"plan: indices must be at least 0 and below 3, the number of columns, got 3 at entry 1. "
        f"{RANGE}",
    ),
    "index that int32 would wrap": (
        csr_parts([0, 1, 2], [0, 2**32]),
        ValueError,
        "plan: indices must be at least 0 and below 3, the number of columns, "
        f"got 4294967296 at entry 1. {RANGE}",
    ),
    "entries in no columns": (
        csr_parts([0, 1, 1], [0], None, (2, 0)),
        ValueError,
        f"plan: indices must be at least 0 and below 0, the number of columns, got 0 at entry 0. "
        f"{RANGE}",
    ),
    "values too short": (
        csr_parts([0, 1, 2], [0, 1], [1.0]),
        ValueError,
        "plan: values must be of length 2, one for each entry, got length 1. "
        "Give one value for each index, or None for a pattern.",
    ),
    "values of two dimensions": (
        csr_parts([0, 1, 1], [0], [[1.0]]),
        ValueError,
        "plan: values must be 1-dimensional, got shape (1, 1). Flatten it with .reshape(-1).",
    ),
    "indptr of floats": (
        csr_parts([0.0, 1.0, 1.0], [0]),
        TypeError,
        "plan: indptr must be int32 or int64, got float32. Convert it with .to(torch.int64).",
    ),
    "indices int16": (
        (torch.tensor([0, 1]), torch.zeros(1, dtype=torch.int16), None, (1, 1)),
        TypeError,
        "plan: indices must be int32 or int64, got int16. Convert it with .to(torch.int64).",
    ),
    "indices uint8 from numpy": (
        (torch.tensor([0, 1]), np.zeros(1, np.uint8), None, (1, 1)),
        TypeError,
        "plan: indices must be int32 or int64, got uint8. Convert it with .to(torch.int64).",
    ),
    "indptr a list": (
        ([0, 1], torch.tensor([0]), None, (1, 1)),
        TypeError,
        "plan: indptr must be a torch tensor or a numpy array, got list. "
        "Wrap it in torch.as_tensor.",
    ),
    "values of objects": (
        (torch.tensor([0, 1]), torch.tensor([0]), np.array([None]), (1, 1)),
        TypeError,
        "plan: values must be an array of a type that torch has, got dtype object. "
        "Convert it with astype, for instance to float32 or int64.",
    ),
    "values sparse": (
        (torch.tensor([0, 1]), torch.tensor([0]), torch.ones(1).to_sparse(), (1, 1)),
        TypeError,
        "plan: values must be a dense tensor, got one of layout torch.sparse_coo. "
        "Pass the parts of a sparse tensor, or the sparse tensor alone as A.",
    ),
    "values complex": (
        csr_parts([0, 1, 1], [0], [1j]),
        TypeError,
        "plan: values must be float16, bfloat16, float32, float64, or whole numbers, "
        "got complex64. Split it into real and imaginary parts.",
    ),
    "values float8": (
        (torch.tensor([0, 1]), torch.tensor([0]), torch.ones(1).to(torch.float8_e5m2), (1, 1)),
        TypeError,
        "plan: values must be float16, bfloat16, float32, float64, or whole numbers, "
        "got float8_e5m2. Convert it with .to(torch.float32).",
    ),
    "values on meta": (
        (torch.tensor([0, 1]), torch.tensor([0]), torch.ones(1, device="meta"), (1, 1)),
        ValueError,
        "plan: values must be a tensor that holds data, got one on the meta device. "
        "Move the matrix to the CPU or a GPU first.",
    ),
    "shape NaN": (
        csr_parts([0, 1, 1], [0], None, (float("nan"), 3)),
        ValueError,
        "plan: shape[0] must be a whole number, got nan. Give a whole number from 0 to 2147483647.",
    ),
    "shape negative": (
        csr_parts([0, 1, 1], [0], None, (2, -3)),
        ValueError,
        "plan: shape[1] must be between 0 and 2147483647, got -3. "
        "Give a whole number from 0 to 2147483647.",
    ),
    "shape of 2^31": (
        csr_parts([0, 1, 1], [0], None, (2**31, 3)),
        ValueError,
        "plan: shape[0] must be between 0 and 2147483647, got 2147483648. "
        "Give a whole number from 0 to 2147483647.",
    ),
    "shape of three": (
        csr_parts([0, 1, 1], [0], None, (2, 3, 4)),
        ValueError,
        "plan: shape must be a pair (rows, columns), got 3 numbers. Pass (M, K).",
    ),
    "edges of one dimension": (
        (EDGES[0], None, (3, 3)),
        ValueError,
        "plan: edge_index must be 2-dimensional, got shape (4,). Check the order of the arguments.",
    ),
    "edges transposed": (
        (EDGES.t(), None, (3, 3)),
        ValueError,
        "plan: edge_index must be of shape [2, E], rows above columns, got shape [4, 2]. "
        "Transpose it with .t() when it is [E, 2].",
    ),
    "edges of floats": (
        (EDGES.float(), None, (3, 3)),
        TypeError,
        "plan: edge_index must be int32 or int64, got float32. Convert it with .to(torch.int64).",
    ),
    "edge row too large": (
        (EDGES, None, (2, 3)),
        ValueError,
        f"plan: edge_index[0] must be at least 0 and below 2, the number of rows, got 2 at entry 0."
        f" {RANGE}",
    ),
    "edge column negative": (
        (EDGES - 1, None, (3, 3)),
        ValueError,
        "plan: edge_index[0] must be at least 0 and below 3, the number of rows, got -1 at entry 1."
        f" {RANGE}",
    ),
    "edge column too large": (
        (EDGES, None, (3, 2)),
        ValueError,
        "plan: edge_index[1] must be at least 0 and below 2, the number of columns, "
        f"got 2 at entry 2. {RANGE}",
    ),
    "weight too long": (
        (EDGES, torch.ones(5), (3, 3)),
        ValueError,
        "plan: weight must be of length 4, one for each entry, got length 5. "
        "Give one value for each index, or None for a pattern.",
    ),
    "weight of two dimensions": (
        (EDGES, torch.ones(4, 1), (3, 3)),
        ValueError,
        "plan: weight must be 1-dimensional, got shape (4, 1). Flatten it with .reshape(-1).",
    ),
    "weight a number": (
        (EDGES, 2.0, (3, 3)),
        TypeError,
        "plan: weight must be a torch tensor or a numpy array, got float. "
        "Wrap it in torch.as_tensor.",
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_tuple_is_refused_with_one_clear_text(case):
    parts, kind, text = MALFORMED[case]
    with pytest.raises(kind) as refused:
        as_csr(parts)
    assert str(refused.value) == text

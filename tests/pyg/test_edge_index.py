"""``EdgeIndex.matmul``, ``@`` and ``utils.spmm`` of an ``EdgeIndex`` under the patch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsetile.pyg
from sparsetile.nn import cache
from sparsetile.pyg import matrix
from tests.nn.cases import Largest, weights_of, without_parallel_edges

pytest.importorskip("torch_geometric")
import torch_geometric.edge_index
from torch_geometric import EdgeIndex
from torch_geometric.utils import spmm

ROWS, COLUMNS, WIDTH = 30, 24, 6
REDUCES = ["sum", "add", "mean", "max", "min", "amax", "amin"]
SMALL = "few edges: PyG is faster on a CPU"


@pytest.fixture
def every_size(constants: Callable[..., None]) -> None:
    """Small products run on sparsetile too."""
    constants(matrix, LEAST_ON_CPU=0, LEAST_EXTREMUM=0)


def graph(
    order: str, edges: int = 120, columns: int = COLUMNS, parallel: bool = False,
    undirected: bool = False, sized: bool = True,
) -> EdgeIndex:  # fmt: skip
    """Random edges of A[rows, columns]; the last two rows and columns have none."""
    generator = torch.Generator().manual_seed(edges)
    sizes = ROWS, columns
    pair = [torch.randint(size - 2, (edges,), generator=generator) for size in sizes]
    made = torch.stack(pair)
    if undirected:
        made = torch.cat([made, made.flip(0)], dim=1)
    made = torch.cat([made, made[:, :9]], dim=1) if parallel else without_parallel_edges(made)
    made = made[:, made[0 if order == "row" else 1].argsort()]
    size = sizes if sized else None
    return EdgeIndex(made, sparse_size=size, sort_order=order, is_undirected=undirected)


def reference(
    edges: EdgeIndex, other: Tensor, value: Tensor | None, reduce: str, transpose: bool
) -> Tensor:
    """The product from messages, with autograd's gradients."""
    target, source = edges.as_tensor().flip(0) if transpose else edges.as_tensor()
    messages = other[source] if value is None else other[source] * value[:, None]
    name = {"add": "sum", "max": "amax", "min": "amin"}.get(reduce, reduce)
    rows = edges.sparse_size(1 if transpose else 0)
    at = target[:, None].expand_as(messages)
    zeros = other.new_zeros(rows, other.shape[1])
    return zeros.scatter_reduce(0, at, messages, name, include_self=False)


def outcome(product: Callable[..., Tensor], *tensors: Tensor | None) -> list[Tensor]:
    """The result for copies of tensors, and the gradients of those that require them."""
    copies = [
        None if each is None else each.detach().clone().requires_grad_(each.requires_grad)
        for each in tensors
    ]
    out = product(*copies)
    if out.requires_grad:
        slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(0), dtype=out.dtype)
        out.backward(slope)
    leaves = [each for each in copies if each is not None and each.requires_grad]
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def operands(
    edges: EdgeIndex, transpose: bool, values: str, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(1)
    rows = edges.sparse_size(0 if transpose else 1)
    other = torch.randn(rows, WIDTH, generator=generator, dtype=dtype)
    value = None if values == "none" else weights_of(edges.as_tensor(), dtype)
    return other, value if value is None else value.requires_grad_(values == "trained")


def ran() -> list[tuple[str, str, int]]:
    return [(row.name, row.ran, row.calls) for row in sparsetile.pyg.report().rows]


def assert_product(
    edges: EdgeIndex, transpose: bool, values: str, reduce: str, gradient: bool = True
) -> None:
    other, value = operands(edges, transpose, values)
    other.requires_grad_(gradient)
    expected = outcome(lambda x, v: reference(edges, x, v, reduce, transpose), other, value)
    with sparsetile.pyg.patch():
        found = outcome(
            lambda x, v: edges.matmul(x, v, reduce=reduce, transpose=transpose), other, value
        )
    assert ran() == [("EdgeIndex.matmul", "sparsetile", 1)]
    assert len(found) == len(expected) == 1 + gradient + (values == "trained")
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("gradient", [True, False])
@pytest.mark.parametrize("values", ["none", "fixed", "trained"])
@pytest.mark.parametrize("order", ["row", "col"])
@pytest.mark.parametrize("reduce", REDUCES)
def test_every_reduction_has_every_gradient(reduce, order, values, gradient, every_size):
    """PyG raises for the gradient of a transpose that is not square, and for plain float64."""
    assert_product(graph(order), order == "col", values, reduce, gradient)


@pytest.mark.parametrize("values", ["none", "trained"])
@pytest.mark.parametrize("order", ["row", "col"])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_parallel_edges_count_each(reduce, order, values, every_size):
    assert_product(graph(order, parallel=True), order == "col", values, reduce)


@pytest.mark.parametrize("values", ["none", "trained"])
@pytest.mark.parametrize("order", ["row", "col"])
@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
def test_edges_that_are_new_in_each_step(reduce, order, values, every_size):
    """Their graphs are prepared in another way."""
    cache._Regime.short_lived = True
    assert_product(graph(order), order == "col", values, reduce)


@pytest.mark.parametrize("values", ["none", "trained"])
@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
def test_undirected_edges(reduce, values, every_size):
    for order in ("row", "col"):
        edges = graph(order, columns=ROWS, undirected=True)
        assert_product(edges, order == "col", values, reduce)


def test_a_weighted_maximum_over_parallel_edges_is_pyg_s(every_size):
    edges = graph("row", parallel=True)
    other, value = operands(edges, False, "trained")
    other.requires_grad_()
    expected = outcome(lambda x, v: reference(edges, x, v, "max", False), other, value)
    with sparsetile.pyg.patch() as patched:
        found = outcome(lambda x, v: edges.matmul(x, v, reduce="max"), other, value)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    (row,) = patched.report().rows
    assert row.ran == "PyG" and "parallel edges" in row.why


@pytest.mark.parametrize("form", ["@", "spmm", "spmm of a mean"])
def test_other_spellings_have_gradients_too(form, every_size):
    """The gradient of PyG's ``@`` raises: torch takes it of a matrix [2, E]."""
    edges = graph("row")
    reduce = "mean" if form == "spmm of a mean" else "sum"
    other = operands(edges, False, "none", torch.float32)[0].requires_grad_()
    expected = outcome(lambda x: reference(edges, x, None, reduce, False), other)
    with sparsetile.pyg.patch():
        found = outcome(lambda x: edges @ x if form == "@" else spmm(edges, x, reduce), other)
    assert ran() == [("EdgeIndex.matmul", "sparsetile", 1)]
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_a_size_that_is_not_known_is_read_from_the_edges(every_size):
    edges = graph("row", sized=False)
    other = torch.randn(COLUMNS - 2, WIDTH)
    expected = edges.matmul(other)
    assert expected.shape[0] == ROWS - 2
    again = graph("row", sized=False)
    with sparsetile.pyg.patch():
        torch.testing.assert_close(again.matmul(other), expected)
    assert ran() == [("EdgeIndex.matmul", "sparsetile", 1)]


def test_one_graph_serves_products_and_layers(every_size):
    edges = graph("row")
    with sparsetile.pyg.patch():
        for reduce in ("sum", "mean", "max"):
            edges.matmul(torch.randn(COLUMNS, WIDTH), reduce=reduce)
    assert len(cache._graphs) == 1


@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
@pytest.mark.parametrize("values", ["none", "trained"])
def test_nothing_of_size_edges_times_features_is_made(values, reduce):
    edges = graph("row", edges=2000)
    count = edges.shape[1]
    other = torch.randn(COLUMNS, 512, requires_grad=True)
    value = None if values == "none" else torch.rand(count, requires_grad=True)
    sizes = []
    for on in (False, True):
        if on:
            sparsetile.pyg.patch()
        with Largest() as largest:
            edges.matmul(other, value, reduce=reduce).sum().backward()
        sizes.append(largest.numbers)
    assert ran() == [("EdgeIndex.matmul", "sparsetile", 1)]
    assert sizes[1] <= ROWS * 512 < count * 512
    if values == "trained":
        assert sizes[0] >= count * 512, "PyG's code makes it, so it would be noticed"


@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
@pytest.mark.parametrize("order", ["row", "col"])
@pytest.mark.parametrize("values", ["none", "fixed", "trained"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_small_products_are_pyg_s_where_it_computes_them(dtype, values, order, reduce):
    edges, transpose = graph(order), order == "col"
    other, value = operands(edges, transpose, values, dtype)
    other.requires_grad_()

    def product(x: Tensor, v: Tensor | None) -> Tensor:
        return edges.matmul(x, v, reduce=reduce, transpose=transpose)

    expected = outcome(lambda x, v: reference(edges, x, v, reduce, transpose), other, value)
    with sparsetile.pyg.patch() as patched:
        found = outcome(product, other, value)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    (row,) = patched.report().rows
    # PyG's own values are float32, and it transposes square matrices only.
    works = (values != "none" or dtype is torch.float32) and (values == "trained" or not transpose)
    assert (row.ran, row.why) == (("PyG", SMALL) if works else ("sparsetile", ""))
    if not works and reduce != "max":
        with pytest.raises(RuntimeError):  # without the patch
            outcome(product, other, value)


@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_size_from_which_products_are_taken(reduce, constants):
    made = graph("row")
    numbers = made.shape[1] * WIDTH
    given = operands(made, False, "fixed", torch.float32)
    least = "LEAST_EXTREMUM" if reduce == "max" else "LEAST_ON_CPU"
    for limit, expected in ((numbers, "sparsetile"), (numbers + 1, "PyG")):
        constants(matrix, **{least: limit})
        with sparsetile.pyg.patch():
            made.matmul(given[0].requires_grad_(), given[1], reduce=reduce)
        assert ran() == [("EdgeIndex.matmul", expected, 1)]


def left(name: str) -> tuple[EdgeIndex, dict[str, Any], str]:
    """A call that PyG must run or refuse, and the reason."""
    edges = graph("row")
    x, value = torch.randn(COLUMNS, WIDTH), weights_of(edges.as_tensor())
    return {
        "order": (graph("col"), {"other": x}, "not sorted"),
        "transpose": (edges, {"other": torch.randn(ROWS, 2), "transpose": True}, "not sorted"),
        "reduce": (edges, {"other": x, "reduce": "std"}, "reduction"),
        "integers": (edges, {"other": x.long()}, "dtype int64"),
        "sizes": (edges, {"other": x[1:]}, "sizes"),
        "types": (edges, {"other": x, "input_value": value.double()}, "different types"),
        "values": (edges, {"other": x, "input_value": value[1:]}, "one number for each edge"),
        "vector": (edges, {"other": x[:, 0]}, "two dimensions"),
        "vector of a maximum": (
            edges,
            {"other": x[:, 0].clone().requires_grad_(), "reduce": "max"},
            "two dimensions",
        ),
        "number": (edges, {"other": x[0, 0]}, "two dimensions"),
        "cube": (edges, {"other": x[..., None]}, "two dimensions"),
    }[name]  # fmt: skip


LEFT = [
    "order", "transpose", "reduce", "integers", "sizes", "types", "values", "vector",
    "vector of a maximum", "number", "cube",
]  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_other_calls_are_pyg_s_with_its_errors(name, every_size):
    edges, given, why = left(name)

    def result() -> Any:
        try:
            return edges.matmul(**given)
        except Exception as error:
            return type(error), str(error)

    expected = result()
    with sparsetile.pyg.patch() as patched:
        found = result()
    (row,) = patched.report().rows
    assert row.ran == "PyG" and why in row.why
    if isinstance(expected, Tensor):
        assert torch.equal(found, expected)
    else:
        assert found == expected


def test_products_of_two_sparse_matrices_are_pyg_s():
    one, other = graph("row"), graph("row", columns=ROWS)
    expected = other.matmul(one)
    with sparsetile.pyg.patch():
        found = other.matmul(one)
    assert torch.equal(found[0].as_tensor(), expected[0].as_tensor())
    assert torch.equal(found[1], expected[1]) and ran() == []


def test_unpatch_restores_edge_index():
    from torch_geometric import edge_index as module

    before = module._spmm
    with sparsetile.pyg.patch():
        assert module._spmm is not before and "__matmul__" in vars(EdgeIndex)
    assert module._spmm is before and "__matmul__" not in vars(EdgeIndex)


def test_edges_that_are_new_in_each_step_are_pyg_s_on_a_gpu(constants, every_size):
    constants(matrix, LEFT_TO_PYG=("cpu",))
    edges = graph("row")
    other, value = operands(edges, False, "fixed")
    expected = reference(edges, other, value, "sum", False)
    with sparsetile.pyg.patch() as patched:
        cache._Regime.short_lived = True
        torch.testing.assert_close(edges.matmul(other, value), expected)
    (row,) = patched.report().rows
    assert row.ran == "PyG" and "new in each step" in row.why


def test_a_product_of_two_edge_indexes_is_pyg_s():
    """PyG 2.8 with torch 2.13 has the pair of its result refused by torch's dispatcher."""
    edges = graph("row", columns=ROWS)

    def what() -> tuple[type, str] | list[Tensor]:
        try:
            return [each.as_subclass(Tensor) for each in edges @ edges]
        except RuntimeError as error:
            return type(error), str(error)[:20]

    without = what()
    with sparsetile.pyg.patch():
        found = what()
    assert str(found) == str(without)


def test_a_product_is_not_of_the_transpose_unless_it_says_so(every_size):
    edges = graph("row", columns=ROWS)
    other, _ = operands(edges, False, "none")
    with sparsetile.pyg.patch():
        found = torch_geometric.edge_index._spmm(edges, other)
    assert ran() == [("EdgeIndex.matmul", "sparsetile", 1)]
    torch.testing.assert_close(found, reference(edges, other, None, "sum", False))


def test_a_batch_of_matrices_is_pyg_s():
    batch = torch.eye(3).expand(2, 3, 3).to_sparse_csr()
    with sparsetile.pyg.patch(), contextlib.suppress(RuntimeError, ValueError):
        spmm(batch, torch.ones(2, 3, 4))
    (row,) = sparsetile.pyg.report().rows
    assert (row.ran, row.why) == ("PyG", "the matrix is batched or has dense dimensions")


@pytest.mark.parametrize("order", ["col", None])
@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
def test_spmm_takes_edges_in_any_order(reduce, order):
    edges = graph("col")
    if order is None:
        shuffled = edges.as_tensor()[:, torch.randperm(edges.shape[1])]
        edges = EdgeIndex(shuffled, sparse_size=(ROWS, COLUMNS))
    other = torch.randn(COLUMNS, WIDTH, requires_grad=True)
    with pytest.raises(ValueError, match="sorted by rows"):
        spmm(edges, other, reduce)
    expected = outcome(lambda x: reference(edges, x, None, reduce, False), other)
    with sparsetile.pyg.patch():
        found = outcome(lambda x: torch_geometric.utils.spmm(edges, x, reduce), other)
        (row,) = sparsetile.pyg.report().rows
    assert (row.name, row.ran) == ("utils.spmm", "sparsetile")
    torch.testing.assert_close(found, expected)

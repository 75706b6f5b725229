"""Products of arrays as operators: results, gradients of gradients, traces, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import sparsetile.functional as F
from sparsetile.cache import operators
from tests.examples import load_example

INDPTR = torch.tensor([0, 3, 3, 4, 7])
INDICES = torch.tensor([4, 0, 0, 2, 1, 4, 3])  # unsorted, and one place twice
ROWS, COLS = 4, 5


@pytest.fixture(params=["as they are", "planned"])
def path(request: pytest.FixtureRequest, constants) -> str:
    """Both kinds of products: other devices have plans."""
    constants(operators, UNPLANNED_ON_CPU=request.param == "as they are")
    return request.param


def values_of(dtype: torch.dtype) -> Tensor:
    return torch.tensor([1, -2, 3, 0.5, 2, -1, 4], dtype=dtype)


def dense_of(values: Tensor | None) -> Tensor:
    values = torch.ones(7) if values is None else values
    rows = torch.repeat_interleave(torch.arange(ROWS), INDPTR.diff())
    return torch.zeros(ROWS, COLS, dtype=values.dtype).index_put(
        (rows, INDICES), values, accumulate=True
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(
    "shape", [(5,), (5, 1), (5, 19), (3, 5, 4), (2, 3, 5, 2), (0, 5, 4), (5, 0)]
)
def test_products_are_those_of_a_dense_matrix(path, dtype, weighted, shape):
    values = values_of(dtype) if weighted else None
    x = torch.randint(-4, 5, shape).to(dtype)
    A = dense_of(values).to(dtype)
    expected = A @ x
    found = F.spmm(INDPTR, INDICES, values, x)
    assert found.dtype is dtype and torch.equal(found, expected)
    counts = INDPTR.diff().clamp(min=1).to(torch.float64)
    counts = counts if len(shape) == 1 else counts[:, None]
    mean = F.spmm(INDPTR, INDICES, values, x, "mean")
    torch.testing.assert_close(mean, (expected.double() / counts).to(dtype))


@pytest.mark.parametrize("types", [(torch.int32, torch.int32), (torch.int64, torch.int32)])
def test_index_types_may_differ(path, types):
    x = torch.randint(-4, 5, (COLS, 3)).float()
    arrays = INDPTR.to(types[0]), INDICES.to(types[1])
    assert torch.equal(F.spmm(*arrays, None, x), dense_of(None) @ x)
    x.requires_grad_()
    F.spmm(*arrays, None, x).sum().backward()
    assert torch.equal(x.grad, dense_of(None).sum(0)[:, None].expand(COLS, 3))


def test_operands_of_any_strides(path):
    values = values_of(torch.float32)
    x = torch.randint(-4, 5, (6, 2 * COLS)).float().t()[::2]
    every = torch.stack([values, values * 2], 1)[:, 0]
    assert torch.equal(F.spmm(INDPTR, INDICES, every, x), dense_of(values) @ x)
    one = torch.tensor(2.0).expand(7)
    assert torch.equal(F.spmm(INDPTR, INDICES, one, x), dense_of(None) @ x * 2)


def test_first_and_second_derivatives(path):
    values = values_of(torch.float64).requires_grad_()
    x = torch.randn(COLS, 3, dtype=torch.float64, requires_grad=True)
    batch = torch.randn(2, COLS, 3, dtype=torch.float64, requires_grad=True)
    for dense in (x, batch):
        for reduce in ("sum", "mean"):

            def product(v: Tensor, d: Tensor, how: str = reduce) -> Tensor:
                return F.spmm(INDPTR, INDICES, v, d, how)

            assert torch.autograd.gradcheck(product, (values, dense))
            assert torch.autograd.gradgradcheck(product, (values, dense))
    assert torch.autograd.gradcheck(lambda d: F.spmm(INDPTR, INDICES, None, d), (x,))
    G = torch.randn(ROWS, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda g, d: F.sddmm(INDPTR, INDICES, g, d), (G, x))
    assert torch.autograd.gradgradcheck(lambda g, d: F.sddmm(INDPTR, INDICES, g, d), (G, x))


def test_operators_pass_opcheck(path):
    x = torch.randn(COLS, 3, requires_grad=True)
    values, G = values_of(torch.float32).requires_grad_(), torch.randn(ROWS, 3, requires_grad=True)
    for weights in (values, None):
        torch.library.opcheck(operators.csr_spmm, (INDPTR, INDICES, weights, x, "mean"))
        torch.library.opcheck(operators.csr_spmm_t, (INDPTR, INDICES, weights, G, COLS))
    torch.library.opcheck(operators.csr_sddmm, (INDPTR, INDICES, G, x))


def test_a_compiled_step_is_one_graph_of_any_sizes():
    counter = CompileCounter()

    @torch.compile(fullgraph=True, backend=counter, dynamic=True)
    def product(indptr: Tensor, indices: Tensor, values: Tensor, x: Tensor) -> Tensor:
        return F.spmm(indptr, indices, values, torch.relu(x), "mean") * 2

    for rows in (4, 9, 30):
        dense = torch.randn(rows, rows + 3) * (torch.rand(rows, rows + 3) < 0.5)
        A = dense.to_sparse_csr()
        # torch cannot trace views of a sparse tensor.
        arrays = [each.clone() for each in (A.crow_indices(), A.col_indices(), A.values())]
        x = torch.randn(rows + 3, rows + 1)
        eager = F.spmm(*arrays, torch.relu(x), "mean") * 2
        assert torch.equal(product(*arrays, x), eager)
    assert counter.frame_count == 1


def test_a_compiled_training_step_has_the_gradients_of_eager_mode():
    def loss(values: Tensor, x: Tensor) -> Tensor:
        return F.spmm(INDPTR, INDICES, values, x).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=True)
    grads = []
    for step in (loss, compiled):
        values = values_of(torch.float32).requires_grad_()
        x = torch.arange(15.0).reshape(COLS, 3).requires_grad_()
        step(values, x).backward()
        grads.append((values.grad, x.grad))
    assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))


def test_an_exported_program_takes_another_matrix():
    class Layer(torch.nn.Module):
        def forward(self, indptr: Tensor, indices: Tensor, values: Tensor, x: Tensor) -> Tensor:
            return F.spmm(indptr, indices, values, x)

    entries = torch.export.Dim("entries")
    rows = torch.export.Dim("pointers", min=3)
    x = torch.randn(COLS, 3)
    program = torch.export.export(
        Layer(),
        (INDPTR, INDICES, values_of(torch.float32), x),
        dynamic_shapes=({0: rows}, {0: entries}, {0: entries}, None),
    )
    other = torch.tensor([0, 1, 2]), torch.tensor([4, 1]), torch.tensor([2.0, 3.0])
    assert torch.equal(program.module()(*other, x), torch.stack([2 * x[4], 3 * x[1]]))


def test_entries_in_any_order(path):
    row = torch.tensor([3, 0, 2, 0, 3, 0, 3])
    col = torch.tensor([1, 4, 2, 0, 4, 0, 3])
    values = torch.tensor([2, 1, 0.5, -2, -1, 3, 4])
    x = torch.randint(-4, 5, (COLS, 3)).float()
    expected = dense_of(values_of(torch.float32)) @ x
    assert torch.equal(F.spmm_coo(row, col, values, x, ROWS), expected)
    assert torch.equal(F.spmm_edges(torch.stack([col, row]), values, x, ROWS), expected)
    square = F.spmm_edges(torch.stack([col, row]), values, x)
    assert torch.equal(square, torch.cat([expected, torch.zeros(1, 3)]))
    compiled = torch.compile(F.spmm_edges, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(torch.stack([col, row]), values, x, ROWS), expected)


def test_edges_have_the_results_of_pyg():
    edge_index = torch.randint(0, 30, (2, 200), generator=torch.Generator().manual_seed(0))
    weight, x = torch.randn(200, dtype=torch.float64), torch.randn(30, 6, dtype=torch.float64)
    sources = x[edge_index[0]] * weight[:, None]
    expected = torch.zeros(30, 6, dtype=torch.float64).index_add(0, edge_index[1], sources)
    torch.testing.assert_close(F.spmm_edges(edge_index, weight, x), expected)
    counts = torch.bincount(edge_index[1], minlength=30).clamp(min=1)[:, None]
    torch.testing.assert_close(
        F.spmm_edges(edge_index, weight, x, reduce="mean"), expected / counts
    )


def test_new_patterns_in_the_same_tensors_are_seen(path):
    indptr, indices = INDPTR.clone(), INDICES.clone()
    x = torch.arange(10.0).reshape(COLS, 2)
    for shift in range(4):
        indices.copy_((INDICES + shift) % COLS)
        d = x.clone().requires_grad_()
        C = F.spmm(indptr, indices, None, d)
        C.sum().backward()
        rows = torch.repeat_interleave(torch.arange(ROWS), INDPTR.diff())
        expected = torch.zeros(ROWS, 2).index_add(0, rows, x[indices])
        assert torch.equal(C, expected)
        assert torch.equal(d.grad[:, 0], torch.bincount(indices, minlength=COLS).float())
    for shift in range(30):  # memory of freed tensors comes again
        indices.data = (INDICES + shift) % COLS
        d = x.clone().requires_grad_()
        F.spmm(indptr, indices, None, d).sum().backward()
        assert torch.equal(d.grad[:, 0], torch.bincount(indices, minlength=COLS).float())


def test_trained_values_are_read_in_every_product(path):
    values = torch.nn.Parameter(values_of(torch.float32))
    x = torch.randint(-4, 5, (COLS, 3)).float()
    optimizer = torch.optim.SGD([values], lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        C = F.spmm(INDPTR, INDICES, values, x)
        assert torch.allclose(C, dense_of(values.detach()) @ x)
        C.sum().backward()
        optimizer.step()
        values.data.mul_(0.5)


def test_what_is_kept_ends_with_the_pattern():
    before = len(operators._patterns)
    indptr, indices = INDPTR.clone(), INDICES.clone()
    x = torch.randn(COLS, 2, requires_grad=True)
    F.spmm(indptr, indices, None, x).sum().backward()
    assert len(operators._patterns) == before + 1
    del indptr, indices
    assert len(operators._patterns) == before


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a column outside": (dict(indices=INDICES + 1), "column"),
    "row pointers that end late": (dict(indptr=INDPTR + 1), "indptr"),
    "values of another length": (dict(values=torch.ones(6)), "values must be of shape"),
    "values of another type": (dict(values=torch.ones(7).double()), "values must be of x's type"),
    "floating indices": (dict(indices=INDICES.float()), "indices must be a vector of int32"),
    "an integer x": (dict(x=torch.ones(COLS, 2).long()), "x must be a tensor of type"),
    "another reduction": (dict(reduce="max"), "reduce must be 'sum' or 'mean'"),
    "no row pointers": (dict(indptr=INDPTR[:0]), "indptr must be of M"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_wrong_arguments_are_named(path, mistake):
    changes, text = WRONG[mistake]
    given = dict(indptr=INDPTR, indices=INDICES, values=None, x=torch.ones(COLS, 2), reduce="sum")
    with pytest.raises((ValueError, TypeError), match=r"^functional\.spmm: ") as caught:
        F.spmm(**{**given, **changes})
    assert text in str(caught.value)


def test_wrong_arguments_of_the_others_are_named():
    x = torch.ones(COLS, 2)
    with pytest.raises(ValueError, match=r"^functional\.sddmm: G must be of shape \[4, 2\]"):
        F.sddmm(INDPTR, INDICES, x, x)
    with pytest.raises(TypeError, match=r"^functional\.sddmm: G must be of x's type"):
        F.sddmm(INDPTR, INDICES, torch.ones(ROWS, 2).double(), x)
    with pytest.raises(ValueError):
        F.sddmm(INDPTR, INDICES + 1, torch.ones(ROWS, 2), x)
    with pytest.raises(ValueError, match=r"^functional\.spmm_coo: row must be of col's shape"):
        F.spmm_coo(INDICES[:3], INDICES, None, x, 5)
    with pytest.raises(ValueError, match=r"^functional\.spmm_edges: edge_index must be of shape"):
        F.spmm_edges(INDICES, None, x)
    for row in ([0, -1, 2], [0, 1, 4]):  # a target that does not exist
        with pytest.raises(ValueError):
            F.spmm_coo(torch.tensor(row), torch.tensor([0, 1, 2]), None, x, 4)
    with pytest.raises(ValueError, match="x's device"):
        F.spmm(INDPTR, INDICES, None, x.to("meta"))


def test_autocast_casts_x_and_values():
    with torch.autocast("cpu", torch.bfloat16):
        C = F.spmm(INDPTR, INDICES, values_of(torch.float32), torch.ones(COLS, 2))
    assert C.dtype is torch.bfloat16


def test_the_flop_counter_counts_them():
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counted:
        F.spmm(INDPTR, INDICES, None, torch.ones(3, COLS, 2))
    assert counted.get_total_flops() == 2 * 7 * 2 * 3


def test_the_example_of_an_autoencoder_learns():
    assert load_example("sparse_autoencoder").main(steps=100) > 0.8


def test_no_plan_is_built_in_a_capture(capturing, constants):
    indptr, indices = INDPTR.clone(), INDICES.clone()
    x = torch.ones(COLS, 2, requires_grad=True)
    constants(operators, UNPLANNED_ON_CPU=False)
    capturing(True)
    with pytest.raises(ValueError, match=r"^functional\.spmm: the call must be outside of a CUDA"):
        F.spmm(indptr, indices, None, x).sum().backward()
    capturing(False)
    F.spmm(indptr, indices, None, x).sum().backward()
    capturing(True)
    F.spmm(indptr, indices, None, x).sum().backward()
    assert torch.equal(x.grad[:, 0], 2 * torch.bincount(INDICES, minlength=COLS).float())

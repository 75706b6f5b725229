"""A whole step of graph attention on one set of nodes, on the host, against torch in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tools.attention import attended
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import sparsetile as st
from sparsetile.kernels import columns
from sparsetile.kernels import gat as sizes
from sparsetile.layers.graph_attention import attention_layer
from sparsetile.plan.traced.flat import flatten, parsed
from tests.emulator.attention import attention_on_host, direction, flat_plan, pattern
from tests.emulator.build import host_compiler
from tests.host import cut_rows

pytestmark = pytest.mark.skipif(host_compiler() is None, reason="no g++ here")

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
SLOPE = 0.2
# Rounding of messages and gradients to the type, and what their products add.
CLOSE = {F32: 2e-5, F16: 4e-3, BF16: 3e-2}
# Empty rows, short ones, long ones; 50 nodes.
UNEVEN = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 31, 32, 33, 40, 0, *([2] * 34)]
HUBS = [300, 0, 3, 40, 17, *([1] * 395)]


@pytest.fixture(autouse=True)
def on_host(monkeypatch: pytest.MonkeyPatch, folder: Path, fresh_runners: None) -> None:
    attention_on_host(monkeypatch, folder)


def inputs(nodes: int, heads: int, width: int, dtype: torch.dtype = F32) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    drawn = {
        "messages": draw(nodes, heads * width).to(dtype),
        "first": draw(1, heads, width) / width**0.5,
        "second": draw(1, heads, width) / width**0.5,
        "bias": draw(heads * width),
    }
    return {name: tensor.requires_grad_() for name, tensor in drawn.items()}


def reference(csr: st.CSR, given: dict[str, Any], **more: Tensor | None) -> Tensor:
    heads = given["first"].shape[1]
    messages = given["messages"].double().view(len(given["messages"]), heads, -1)
    of_source = (messages * given["first"].double()).sum(-1)
    of_target = (messages * given["second"].double()).sum(-1)
    out = attended(csr, messages, of_source, of_target, SLOPE, **more)
    return out if given["bias"] is None else out + given["bias"].double()


def layer(
    flat: Any, given: dict[str, Any], counts: Tensor | None = None, scales: Tensor | None = None
) -> Tensor:
    return attention_layer(
        flat, given["messages"], given["first"], given["second"], counts, scales, given["bias"],
        SLOPE,
    )  # fmt: skip


def assert_near(found: Any, wanted: Any, near: float) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        atol = near * max(float(theirs.detach().abs().max()), 1.0)
        torch.testing.assert_close(mine.double(), theirs.double(), rtol=near, atol=atol)


def check(
    csr: st.CSR,
    heads: int,
    width: int,
    dtype: torch.dtype = F32,
    bias: bool = True,
    **more: Any,
) -> None:
    """Output and all gradients are those of the float64 reference."""
    given = inputs(csr.shape[0], heads, width, dtype)
    if not bias:
        given["bias"] = None
    tracked = [each for each in given.values() if each is not None]
    out, wanted = layer(flat_plan(csr), given, **more), reference(csr, given, **more)
    assert out.dtype is dtype
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(dtype)
    found = torch.autograd.grad(out, tracked, grad)
    right = torch.autograd.grad(wanted, tracked, grad.double())
    assert [each.shape for each in found] == [each.shape for each in tracked]
    assert [each.dtype for each in found] == [each.dtype for each in tracked]
    assert_near([out, *found], [wanted, *right], CLOSE[dtype])


@pytest.mark.parametrize(
    "heads, width",
    [(8, 32), (4, 8), (3, 5), (2, 40), (1, 252), (5, 44),  # a head's lanes are no power of two
     (1, 300), (8, 7), (1, 47)],  # heads that lie in several slabs
)  # fmt: skip
def test_gradients_of_every_layout_of_heads(heads, width):
    check(pattern(UNEVEN, 50), heads, width)


@pytest.mark.parametrize("heads, width, parts", [(1, 252, 1), (5, 44, 1), (1, 300, 2), (8, 7, 2)])
def test_heads_of_one_slab_have_their_whole_gradient_in_registers(heads, width, parts):
    tile = sizes.gat_tile(F32, heads * width, 4 if width % 4 == 0 else 1)
    assert sizes.gat_parts(tile, heads, width) == parts


@pytest.mark.parametrize(
    "heads, width, dtype", [(8, 32, F16), (2, 12, BF16), (3, 5, F16), (2, 200, BF16)]
)
def test_messages_of_16_bits_are_summed_in_float32(heads, width, dtype):
    check(pattern(UNEVEN, 50), heads, width, dtype)


@pytest.mark.parametrize("heads, width, dtype", [(2, 32, F32), (5, 44, F32), (3, 8, BF16)])
def test_hubs_are_cut_and_joined_before_the_scores_are_added(monkeypatch, heads, width, dtype):
    cut_rows(monkeypatch, longer=16, length=16)
    csr = pattern(HUBS, 400)
    assert parsed(flat_plan(csr)[1]).exact.plain.slots > 16  # type: ignore[attr-defined]
    check(csr, heads, width, dtype)
    check(csr.transposed(), heads, width, dtype)


def test_parallel_edges_dropout_and_no_bias():
    csr = pattern(UNEVEN, 50)
    generator = torch.Generator().manual_seed(4)
    counts = torch.randint(1, 4, (csr.nnz,), generator=generator).float()
    scales = torch.randint(0, 3, (csr.nnz, 3), generator=generator).float() * 2
    check(csr, 3, 8, counts=counts)
    check(csr, 3, 8, counts=counts, scales=scales)
    check(csr, 3, 8, BF16, bias=False, scales=scales)


@pytest.mark.parametrize("nodes", [0, 5])
def test_graphs_without_edges_give_the_bias(nodes):
    given = inputs(nodes, 2, 4)
    out = layer(flat_plan(pattern([0] * nodes, nodes)), given)
    assert torch.equal(out, given["bias"].detach().expand(nodes, 8))
    out.sum().backward()
    for name in ("messages", "first", "second"):
        assert given[name].grad.shape == given[name].shape and not given[name].grad.any()
    assert torch.equal(given["bias"].grad, torch.full((8,), float(nodes)))


@pytest.mark.parametrize("wanted", ["messages", "first", "second", "bias"])
def test_gradients_of_one_input_alone(wanted):
    csr = pattern(UNEVEN, 50)
    given = {name: each.detach() for name, each in inputs(50, 2, 8).items()}
    given[wanted].requires_grad_()
    out = layer(flat_plan(csr), given)
    grad = torch.randn(out.shape)
    (found,) = torch.autograd.grad(out, [given[wanted]], grad)
    (right,) = torch.autograd.grad(reference(csr, given), [given[wanted]], grad.double())
    assert_near([found], [right], 2e-5)


@pytest.mark.parametrize("nodes, sets", [(400, 1), (400, 8), (70, 1)])
def test_sums_of_thread_blocks_are_added_in_their_order(nodes, sets, constants):
    constants(columns, _SETS=sets)
    assert columns.column_grid(nodes, 64, 4).chunks > 2
    lengths = [3] * nodes
    results = []
    for _ in range(2):
        check(pattern(lengths, nodes), 2, 32)
        given = inputs(nodes, 2, 32)
        layer(flat_plan(pattern(lengths, nodes)), given).square().sum().backward()
        results.append([each.grad for each in given.values()])
    for first, again in zip(*results, strict=True):
        assert torch.equal(first, again)


def test_operands_of_any_strides_and_alignment():
    csr = pattern(UNEVEN, 50)
    given = inputs(50, 2, 8)
    grad = torch.randn(16, 50).t()
    out = layer(flat_plan(csr), given)
    right = torch.autograd.grad(out, list(given.values()), grad)
    moved = {
        "messages": given["messages"].detach().t().contiguous().t(),
        "first": torch.cat([torch.zeros(1), given["first"].detach().flatten()])[1:].view(1, 2, 8),
        "second": given["second"].detach().transpose(1, 2).contiguous().transpose(1, 2),
        "bias": torch.stack([given["bias"].detach()] * 2, 1)[:, 0],
    }
    moved = {name: each.requires_grad_() for name, each in moved.items()}
    again = layer(flat_plan(csr), moved)
    assert torch.equal(out, again)
    found = torch.autograd.grad(again, list(moved.values()), grad)
    for mine, theirs in zip(found, right, strict=True):
        assert torch.equal(mine, theirs)


def test_a_gradient_that_is_not_finite_stays_with_its_neighbours():
    csr = pattern(UNEVEN, 50)
    given = inputs(50, 2, 8)
    grad = torch.randn(50, 16)
    grad[5] = torch.nan
    (found,) = torch.autograd.grad(layer(flat_plan(csr), given), [given["messages"]], grad)
    touched = torch.zeros(50, dtype=torch.bool)
    touched[csr.indices[csr.indptr[5] : csr.indptr[6]].long()] = True
    touched[5] = True
    assert torch.equal(found.isnan().any(1), touched)


def test_gradients_of_gradients_are_refused():
    given = inputs(50, 2, 8)
    out = layer(flat_plan(pattern(UNEVEN, 50)), given)
    leaves = list(given.values())
    plain = torch.autograd.grad(out.square().sum(), leaves, retain_graph=True)
    seen = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
    assert_near(seen, plain, 2e-5)
    for each in seen[:3]:
        with pytest.raises(RuntimeError, match="attend: gradients must be of first order"):
            torch.autograd.grad(each.sum(), leaves, retain_graph=True)


def test_modes_see_operators_also_in_the_backward_pass_alone():
    csr = pattern(UNEVEN, 50)
    given = inputs(50, 2, 8)
    leaves = list(given.values())
    out = layer(flat_plan(csr), given)
    plain = torch.autograd.grad(out, leaves, torch.ones_like(out), retain_graph=True)
    with FlopCounterMode(display=False) as counted:
        seen = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert counted.get_total_flops() == 4 * csr.nnz * 16
    assert_near(seen, plain, 2e-5)
    with FlopCounterMode(display=False) as counted:
        again = layer(flat_plan(csr), given)
    assert counted.get_total_flops() == 2 * csr.nnz * 16
    assert_near([again], [out], 2e-5)


def test_a_compiled_function_is_one_graph():
    flat = flat_plan(pattern(UNEVEN, 50))

    def step(messages: Tensor, first: Tensor, second: Tensor, bias: Tensor) -> Tensor:
        return attention_layer(flat, messages, first, second, None, None, bias, SLOPE)

    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        given = inputs(50, 2, 8)
        out = function(*given.values())
        out.square().sum().backward()
        results.append([out, *(each.grad for each in given.values())])
    assert_near(results[1], results[0], 2e-5)


def test_a_plan_without_its_transpose_has_no_gradients():
    flat = flatten(direction(pattern(UNEVEN, 50)), None, None, None)
    out = layer(flat, inputs(50, 2, 8))
    with pytest.raises(RuntimeError, match="attend: tensors must hold the planned transpose"):
        out.sum().backward()


def test_launches_are_prepared_once_for_each_kind_of_operand():
    flat = flat_plan(pattern(UNEVEN, 50))
    runner = parsed(flat[1]).exact
    given = inputs(50, 2, 8)
    counted = []
    for _ in range(3):
        layer(flat, given).sum().backward()
        counted.append(dict(runner.attention_launches))  # type: ignore[attr-defined]
    # Scores, softmax, sum, terms and vectors; the gather of gradients is the transpose's.
    assert len(counted[0]) == 5
    assert counted[1] == counted[0] == counted[2]
    layer(flat, inputs(50, 2, 8, BF16)).sum().backward()
    assert len(runner.attention_launches) > 5  # type: ignore[attr-defined]

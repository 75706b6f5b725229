"""Graph attention on CUDA cores, run on the host thread by thread, against torch in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tools.attention import attended
from torch import Tensor

import sparsetile as st
from sparsetile.kernels.gat import gat_config, gat_tile
from sparsetile.layers.graph_attention import graph_attention, node_scores
from sparsetile.plan.traced.flat import flatten, parsed
from tests.emulator.attention import attention_on_host, direction, flat_plan, pattern
from tests.emulator.build import host_compiler
from tests.host import cut_rows

pytestmark = pytest.mark.skipif(host_compiler() is None, reason="no g++ here")

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
SLOPE = 0.2
# Rounding of messages and gradients to the type, and what their products add.
CLOSE = {F32: 2e-5, F16: 4e-3, BF16: 3e-2}


@pytest.fixture(autouse=True)
def on_host(monkeypatch: pytest.MonkeyPatch, folder: Path, fresh_runners: None) -> None:
    attention_on_host(monkeypatch, folder)


# Rows of every length up to 9, longer ones, empty ones.
UNEVEN = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 31, 32, 33, 40, 0]


def inputs(
    csr: st.CSR, heads: int, width: int, dtype: torch.dtype, seed: int = 1
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    targets, sources = csr.shape
    drawn = {
        "messages": torch.randn(sources, heads, width, generator=generator).to(dtype),
        "of_source": torch.randn(sources, heads, generator=generator),
        "of_target": torch.randn(targets, heads, generator=generator),
        "bias": torch.randn(heads * width, generator=generator),
    }
    return {name: tensor.requires_grad_() for name, tensor in drawn.items()}


def expected(csr: st.CSR, given: dict[str, Any], **more: Tensor | None) -> Tensor:
    out = attended(csr, given["messages"], given["of_source"], given["of_target"], SLOPE, **more)
    return out if given["bias"] is None else out + given["bias"].double()


def check(
    csr: st.CSR,
    heads: int,
    width: int,
    dtype: torch.dtype = F32,
    leave: tuple[str, ...] = (),
    **more: Any,
) -> None:
    """Output and gradients are those of the float64 reference."""
    given: dict[str, Any] = inputs(csr, heads, width, dtype)
    given |= dict.fromkeys(leave)
    tracked = [each for each in given.values() if each is not None]
    flat = flat_plan(csr)
    out = graph_attention(
        flat, given["messages"], given["of_source"], given["of_target"], more.get("counts"),
        more.get("scales"), given["bias"], SLOPE,
    )  # fmt: skip
    wanted = expected(csr, given, **more)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(dtype)
    found = torch.autograd.grad(out, tracked, grad, allow_unused=True)
    right = torch.autograd.grad(wanted, tracked, grad.double(), allow_unused=True)
    for mine, theirs in zip([out, *found], [wanted, *right], strict=True):
        assert mine is not None and theirs is not None
        scale = max(float(theirs.detach().abs().max()), 1.0) if theirs.numel() else 1.0
        atol = CLOSE[dtype] * scale
        torch.testing.assert_close(mine.double(), theirs.double(), rtol=CLOSE[dtype], atol=atol)


@pytest.mark.parametrize(
    "heads, width", [(8, 32), (1, 128), (4, 8), (3, 5), (2, 6), (1, 1), (9, 4), (2, 40), (6, 32)]
)
def test_sums_and_gradients_of_every_layout_of_heads(heads, width):
    check(pattern(UNEVEN, 50), heads, width)


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("heads, width", [(8, 32), (1, 128), (2, 12), (3, 5)])
def test_messages_of_16_bits_are_summed_in_float32(dtype, heads, width):
    check(pattern(UNEVEN, 50), heads, width, dtype)


@pytest.mark.parametrize("heads, width, dtype", [(2, 32, F32), (8, 32, F32), (3, 8, BF16)])
def test_hubs_are_cut_and_joined(monkeypatch, heads, width, dtype):
    cut_rows(monkeypatch, longer=16, length=16)
    csr = pattern([300, 0, 3, 40, 17], 400)  # 19 pieces: a tree of two levels
    assert work_of(csr).slots > 16
    check(csr, heads, width, dtype)
    # The other way round: sources are hubs in the backward pass.
    check(csr.transposed(), heads, width, dtype)


@pytest.mark.parametrize("heads", [1, 2, 3])
def test_rows_of_a_thousand_entries(heads):
    csr = pattern([1000, 5, 0, 999, 513], 1200)
    assert work_of(csr).sections[2] + work_of(csr).sections[0] > 0
    check(csr, heads, 16)


def test_targets_without_features_have_no_term():
    check(pattern(UNEVEN, 50), 2, 8, leave=("of_target",))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_gradients_without_a_bias(dtype):
    check(pattern(UNEVEN, 50), 2, 8, dtype, leave=("bias",))


def test_entries_that_stand_for_parallel_edges_and_dropout():
    csr = pattern(UNEVEN, 50)
    generator = torch.Generator().manual_seed(4)
    counts = torch.randint(1, 4, (csr.nnz,), generator=generator).float()
    check(csr, 3, 8, counts=counts)
    scales = torch.randint(0, 3, (csr.nnz, 3), generator=generator).float() * 2
    check(csr, 3, 8, scales=scales)
    check(csr, 3, 8, counts=counts, scales=scales)
    check(csr, 3, 8, BF16, counts=counts, scales=scales)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (5, 5)])
def test_graphs_without_edges_give_the_bias(shape):
    csr = pattern([0] * shape[0], shape[1])
    given: dict[str, Any] = inputs(csr, 2, 4, F32)
    out = graph_attention(
        flat_plan(csr), given["messages"], given["of_source"], given["of_target"], None, None,
        given["bias"], SLOPE,
    )  # fmt: skip
    assert torch.equal(out, given["bias"].detach().expand(shape[0], 8))
    out.sum().backward()
    for name in ("messages", "of_source", "of_target"):
        assert given[name].grad.shape == given[name].shape and not given[name].grad.any()
    assert torch.equal(given["bias"].grad, torch.full((8,), float(shape[0])))


@pytest.mark.parametrize("wanted", ["messages", "of_source", "of_target", "bias"])
def test_gradients_of_one_input_alone(wanted):
    csr = pattern(UNEVEN, 50)
    given: dict[str, Any] = {k: v.detach() for k, v in inputs(csr, 2, 8, F32).items()}
    given[wanted].requires_grad_()
    out = graph_attention(
        flat_plan(csr), given["messages"], given["of_source"], given["of_target"], None, None,
        given["bias"], SLOPE,
    )  # fmt: skip
    grad = torch.randn(out.shape)
    (found,) = torch.autograd.grad(out, [given[wanted]], grad)
    (right,) = torch.autograd.grad(expected(csr, given), [given[wanted]], grad.double())
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)


def without_bias(csr: st.CSR, given: dict[str, Any]) -> Tensor:
    return graph_attention(
        flat_plan(csr), given["messages"], given["of_source"], given["of_target"], None, None,
        None, SLOPE,
    )  # fmt: skip


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["of_source", "of_target", "messages"])
def test_what_is_not_finite_spreads_as_in_torch(where, value):
    csr = pattern(UNEVEN, 50)
    given: dict[str, Any] = {k: v.detach() for k, v in inputs(csr, 2, 8, F32).items()}
    given["bias"] = None
    given[where][3] = value
    given[where][14] = value  # of a long row
    out, wanted = without_bias(csr, given), expected(csr, given)
    torch.testing.assert_close(out, wanted.float(), rtol=1e-4, atol=1e-4, equal_nan=True)
    assert bool(out.isfinite().all(1).any()), "other rows are untouched"


def test_scores_of_minus_infinity_before_finite_ones():
    csr = pattern([40, 3], 50)
    given: dict[str, Any] = {k: v.detach() for k, v in inputs(csr, 1, 4, F32).items()}
    given["bias"] = None
    given["of_source"][csr.indices[:39].long()] = -torch.inf
    out, wanted = without_bias(csr, given), expected(csr, given)
    assert bool(out[0].isfinite().all())
    torch.testing.assert_close(out, wanted.float(), rtol=1e-4, atol=1e-4, equal_nan=True)


def test_scores_beyond_the_range_of_exp():
    csr = pattern(UNEVEN, 50)
    given: dict[str, Any] = {k: v.detach() for k, v in inputs(csr, 2, 8, F32).items()}
    given["bias"] = None
    given["of_source"] *= 1e4
    out = without_bias(csr, given)
    assert bool(out.isfinite().all())
    torch.testing.assert_close(out, expected(csr, given).float(), rtol=1e-2, atol=1e-2)


def test_two_runs_have_the_same_bits(monkeypatch):
    cut_rows(monkeypatch, longer=16, length=16)
    csr = pattern([300, 0, 3, 40, 17], 400)
    results = []
    for _ in range(2):
        given: dict[str, Any] = inputs(csr, 2, 8, F32)
        out = without_bias(csr, given)
        out.sum().backward()
        results.append([out, *(given[k].grad for k in ("messages", "of_source", "of_target"))])
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)


def test_gradients_of_gradients_are_refused():
    csr = pattern(UNEVEN, 50)
    given = inputs(csr, 2, 8, F32)
    out = without_bias(csr, given)
    (found,) = torch.autograd.grad(out.square().sum(), [given["messages"]], create_graph=True)
    with pytest.raises(RuntimeError, match="attend: gradients must be of first order"):
        found.sum().backward()


def test_operators_pass_torch_s_own_check():
    csr = pattern(UNEVEN, 50)
    given = inputs(csr, 2, 8, F32)
    tensors, recipe = flat_plan(csr)
    operands = [given[name] for name in ("messages", "of_source", "of_target")]
    messages = operands[0].detach().flatten(1).requires_grad_()
    for bias, scales in ((given["bias"], torch.rand(csr.nnz, 2)), (None, None)):
        torch.library.opcheck(
            torch.ops.sparsetile.attend,
            (tensors, messages, *operands[1:], None, scales, bias, recipe, SLOPE, True),
            test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_static"),
        )


def test_a_compiled_function_is_one_graph():
    csr = pattern(UNEVEN, 50)
    flat = flat_plan(csr)

    def step(messages: Tensor, of_source: Tensor, of_target: Tensor, bias: Tensor) -> Tensor:
        return graph_attention(flat, messages, of_source, of_target, None, None, bias, SLOPE)

    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        given = inputs(csr, 2, 8, F32)
        out = function(*given.values())
        out.square().sum().backward()
        results.append([out, *(each.grad for each in given.values())])
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


def test_a_plan_without_its_transpose_has_no_gradients_of_sources():
    csr = pattern(UNEVEN, 50)
    forward = direction(csr)
    flat = flatten(forward, None, None, None)
    given = inputs(csr, 2, 8, F32)
    out = graph_attention(
        flat, given["messages"], given["of_source"], given["of_target"], None, None, None, SLOPE
    )
    with pytest.raises(RuntimeError, match="attend: tensors must hold the planned transpose"):
        out.sum().backward()
    with torch.no_grad():
        kept = torch.ops.sparsetile.attend(
            flat[0], given["messages"].flatten(1), given["of_source"], None, None, None, None,
            flat[1], SLOPE, False,
        )  # fmt: skip
    assert kept[2].numel() == 0


def test_gradients_need_what_the_forward_pass_keeps():
    csr = pattern(UNEVEN, 50)
    given = inputs(csr, 2, 8, F32)
    tensors, recipe = flat_plan(csr)
    out, _, _ = torch.ops.sparsetile.attend(
        tensors, given["messages"].flatten(1), given["of_source"], None, None, None, None, recipe,
        SLOPE, False,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="attend: keep must be True to compute gradients"):
        out.sum().backward()


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("nodes, heads, width", [(37, 8, 32), (5, 3, 5), (9, 1, 128), (0, 2, 4)])
@pytest.mark.parametrize("two", [True, False])
def test_terms_of_scores_and_their_gradients(dtype, nodes, heads, width, two):
    generator = torch.Generator().manual_seed(2)
    messages = torch.randn(nodes, heads, width, generator=generator).to(dtype).requires_grad_()
    vectors = [torch.randn(heads, width, generator=generator) for _ in range(1 + two)]
    leaves = [messages, *(vector.requires_grad_() for vector in vectors)]
    found = node_scores(*leaves)
    wanted = [(messages.double() * vector.double()).sum(-1) for vector in vectors]
    grads = [torch.randn(nodes, heads, generator=generator) for _ in found]
    mine = torch.autograd.grad(found, leaves, grads)
    right = torch.autograd.grad(wanted, leaves, [grad.double() for grad in grads])
    assert all(each.dtype is F32 for each in found)
    for one, other in zip(found, wanted, strict=True):  # exact products, summed in float32
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-4)
    for one, other in zip(mine, right, strict=True):
        largest = max(float(other.abs().max()), 1.0) if other.numel() else 1.0
        atol = CLOSE[dtype] * largest
        torch.testing.assert_close(one.double(), other.double(), rtol=CLOSE[dtype], atol=atol)


def test_tiles_cover_a_row_with_one_warp_where_they_can():
    assert gat_tile(F32, 256, 4).slabs(256) == 1 and gat_tile(BF16, 256, 8).slabs(256) == 1
    assert gat_tile(F32, 128, 4).lanes == 32 and gat_tile(BF16, 128, 8).lanes == 16
    assert gat_config(F32, gat_tile(F32, 256, 4), "backward", False)["kUnroll"] == 2


def work_of(csr: st.CSR) -> Any:
    return parsed(flat_plan(csr)[1]).exact.plain  # type: ignore[attr-defined]

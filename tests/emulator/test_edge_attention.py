"""Scores of entries and attention with them, run on the host thread by thread, against float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import sparsetile as st
from sparsetile.engines.rows import lengths as rows
from sparsetile.layers import edge_attention
from sparsetile.layers.edge_attention import Entries, attend_entries, bent_scores, dot_scores
from sparsetile.plan.traced.flat import parsed
from tests.emulator.attention import attention_on_host, flat_plan, pattern
from tests.emulator.build import host_compiler
from tests.emulator.test_gat import BF16, CLOSE, F16, F32, UNEVEN

pytestmark = pytest.mark.skipif(host_compiler() is None, reason="no g++ here")

SLOPE = 0.2


@pytest.fixture(autouse=True)
def on_host(monkeypatch: pytest.MonkeyPatch, folder: Path, fresh_runners: None) -> None:
    attention_on_host(monkeypatch, folder)


def entries_of(csr: st.CSR) -> Entries:
    return Entries(flat_plan(csr), csr.row_ids())


def drawn(*shape: int, dtype: torch.dtype = F32, seed: int = 1) -> Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return made.to(dtype).requires_grad_()


def ends(csr: st.CSR, n: int, dtype: torch.dtype) -> dict[str, Tensor]:
    targets, sources = csr.shape
    return {"left": drawn(targets, n, dtype=dtype), "right": drawn(sources, n, dtype=dtype, seed=2)}


def wide_scores(csr: st.CSR, heads: int, given: dict[str, Tensor]) -> Tensor:
    """The scores of all entries in float64, everything in memory at once."""
    left, right = (given[name].double() for name in ("left", "right"))
    first, second = left[csr.row_ids()], right[csr.indices.long()]
    if "vector" not in given:
        return 0.5 * (first * second).unflatten(1, (heads, -1)).sum(-1)
    total = first + second
    if "features" in given:
        total = total + given["features"].double() @ given["weights"].double().t()
    bent = functional.leaky_relu(total.unflatten(1, (heads, -1)), SLOPE)
    return (bent * given["vector"].double()).sum(-1)


def compare(found: Any, wanted: Any, dtype: torch.dtype) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        finite = theirs.detach()[theirs.isfinite()]
        scale = max(float(finite.abs().max()), 1.0) if finite.numel() else 1.0
        atol = CLOSE[dtype] * scale
        torch.testing.assert_close(
            mine.double(), theirs.double(), rtol=CLOSE[dtype], atol=atol, equal_nan=True
        )


def check_scores(csr: st.CSR, heads: int, given: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Scores and all gradients are those of float64."""
    entries = entries_of(csr)
    if "vector" in given:
        out = bent_scores(
            entries, given["left"], given["right"], given["vector"], SLOPE, given.get("features"),
            given.get("weights"),
        )  # fmt: skip
    else:
        out = dot_scores(entries, given["left"], given["right"], heads, 0.5)
    wanted = wide_scores(csr, heads, given)
    assert out.dtype is F32 and out.shape == (csr.nnz, heads)
    leaves = list(given.values())
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
    found = torch.autograd.grad(out, leaves, grad)
    right = torch.autograd.grad(wanted, leaves, grad.double())
    compare([out, *found], [wanted, *right], dtype)


LAYOUTS = [(8, 32), (1, 128), (4, 8), (3, 5), (2, 6), (1, 1), (9, 4), (2, 40), (6, 32)]


@pytest.mark.parametrize("heads, width", LAYOUTS)
def test_dot_products_of_every_layout_of_heads(heads, width):
    csr = pattern(UNEVEN, 50)
    check_scores(csr, heads, ends(csr, heads * width, F32), F32)


@pytest.mark.parametrize("heads, width", LAYOUTS)
def test_bent_sums_of_every_layout_of_heads(heads, width):
    csr = pattern(UNEVEN, 50)
    given = ends(csr, heads * width, F32) | {"vector": drawn(heads, width, seed=3)}
    check_scores(csr, heads, given, F32)


@pytest.mark.parametrize("dims", [1, 3, 8, 11])
@pytest.mark.parametrize("heads, width", [(4, 8), (1, 20), (3, 5), (2, 40)])
def test_features_of_edges_and_their_weights(heads, width, dims):
    csr = pattern(UNEVEN, 50)
    given = ends(csr, heads * width, F32) | {
        "vector": drawn(heads, width, seed=3),
        "features": drawn(csr.nnz, dims, seed=4),
        "weights": drawn(heads * width, dims, seed=5),
    }
    check_scores(csr, heads, given, F32)


@pytest.mark.parametrize("heads, width, dtype", [(8, 32, F16), (2, 12, BF16), (3, 5, F16)])
def test_rows_of_16_bits_are_summed_in_float32(heads, width, dtype):
    csr = pattern(UNEVEN, 50)
    given = ends(csr, heads * width, dtype)
    check_scores(csr, heads, given, dtype)
    given |= {
        "vector": drawn(heads, width, seed=3),
        "features": drawn(csr.nnz, 3, seed=4),
        "weights": drawn(heads * width, 3, seed=5),
    }
    check_scores(csr, heads, given, dtype)


@pytest.mark.parametrize("heads, width, dtype", [(2, 32, F32), (8, 32, F32), (3, 8, BF16)])
def test_hubs_are_cut_and_joined(monkeypatch, heads, width, dtype):
    monkeypatch.setattr(rows, "segment_length", lambda units, row_bytes: 16)
    monkeypatch.setattr(rows, "SHARED_UNCUT", 16)
    uneven = pattern([300, 0, 3, 40, 17], 400)  # 19 pieces: a tree of two levels
    assert parsed(flat_plan(uneven)[1]).exact.plain.slots > 16  # type: ignore[attr-defined]
    for csr in (uneven, uneven.transposed()):
        given = ends(csr, heads * width, dtype)
        check_scores(csr, heads, given, dtype)
        check_scores(csr, heads, given | {"vector": drawn(heads, width, seed=3)}, dtype)
        check_attention(csr, heads, width, dtype)


def test_many_entries_are_summed_by_several_blocks():
    csr = pattern([40] * 60, 200)
    given = ends(csr, 8, F32) | {
        "vector": drawn(2, 4, seed=3),
        "features": drawn(csr.nnz, 2, seed=4),
        "weights": drawn(8, 2, seed=5),
    }
    check_scores(csr, 2, given, F32)


@pytest.mark.parametrize("wanted", ["left", "right", "vector", "features", "weights"])
def test_gradients_of_one_input_alone(wanted):
    csr = pattern(UNEVEN, 50)
    given = ends(csr, 8, F32) | {
        "vector": drawn(2, 4, seed=3),
        "features": drawn(csr.nnz, 5, seed=4),
        "weights": drawn(8, 5, seed=5),
    }
    given = {name: each.detach() for name, each in given.items()}
    given[wanted].requires_grad_()
    out = bent_scores(
        entries_of(csr), given["left"], given["right"], given["vector"], SLOPE, given["features"],
        given["weights"],
    )  # fmt: skip
    grad = torch.randn(out.shape)
    (found,) = torch.autograd.grad(out, [given[wanted]], grad)
    (right,) = torch.autograd.grad(wide_scores(csr, 2, given), [given[wanted]], grad.double())
    compare([found], [right], F32)


# -- attention with terms of entries -----------------------------------------------------------


def wide_attention(csr: st.CSR, given: dict[str, Any], heads: int, slope: float) -> Tensor:
    target, source = csr.row_ids(), csr.indices.long()
    raw = given["of_edge"].double()
    if given.get("of_source") is not None:
        raw = raw + given["of_source"].double()[source]
    if given.get("of_target") is not None:
        raw = raw + given["of_target"].double()[target]
    score = functional.leaky_relu(raw, slope)
    shape = (csr.shape[0], heads)
    highest = score.new_zeros(shape).scatter_reduce(
        0, target[:, None].expand_as(score), score.detach(), "amax", include_self=False
    )
    raised = (score - highest[target]).exp()
    counts, scales = given.get("counts"), given.get("scales")
    count = score.new_ones(csr.nnz, 1) if counts is None else counts.double()[:, None]
    total = score.new_zeros(shape).index_add(0, target, raised * count)
    attention = raised / total[target] * (count if scales is None else scales.double())
    terms = attention[..., None] * given["messages"].double().unflatten(1, (heads, -1))[source]
    zeros = terms.new_zeros(shape[0], *terms.shape[1:])
    out = zeros.index_add(0, target, terms).flatten(1)
    return out if given.get("bias") is None else out + given["bias"].double()


def check_attention(
    csr: st.CSR, heads: int, width: int, dtype: torch.dtype = F32, *, of_nodes: bool = False,
    slope: float = 1.0, bias: bool = True, **more: Tensor,
) -> None:  # fmt: skip
    targets, sources = csr.shape
    leaves = {
        "messages": drawn(sources, heads * width, dtype=dtype),
        "of_edge": drawn(csr.nnz, heads, seed=2),
    }
    if of_nodes:
        leaves |= {"of_source": drawn(sources, heads, seed=3)}
        leaves |= {"of_target": drawn(targets, heads, seed=4)}
    if bias:
        leaves |= {"bias": drawn(heads * width, seed=5)}
    others = {name: each for name, each in leaves.items() if name not in ("messages", "of_edge")}
    out = attend_entries(
        entries_of(csr), leaves["messages"], leaves["of_edge"], slope=slope, **others, **more
    )
    wanted = wide_attention(csr, leaves | more, heads, slope)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(dtype)
    found = torch.autograd.grad(out, list(leaves.values()), grad)
    right = torch.autograd.grad(wanted, list(leaves.values()), grad.double())
    compare([out, *found], [wanted, *right], dtype)


@pytest.mark.parametrize("heads, width", LAYOUTS)
def test_attention_with_scores_of_entries_alone(heads, width):
    check_attention(pattern(UNEVEN, 50), heads, width)


@pytest.mark.parametrize("heads", range(1, 9))
def test_attention_with_terms_of_nodes_and_edges(heads):
    check_attention(pattern(UNEVEN, 50), heads, 8, of_nodes=True, slope=SLOPE)


@pytest.mark.parametrize("heads, width, dtype", [(8, 32, F16), (2, 12, BF16), (3, 5, F16)])
def test_messages_of_16_bits(heads, width, dtype):
    check_attention(pattern(UNEVEN, 50), heads, width, dtype)
    check_attention(pattern(UNEVEN, 50), heads, width, dtype, of_nodes=True, slope=SLOPE)


def test_parallel_edges_and_dropout():
    csr = pattern(UNEVEN, 50)
    generator = torch.Generator().manual_seed(4)
    counts = torch.randint(1, 4, (csr.nnz,), generator=generator).float()
    scales = torch.randint(0, 3, (csr.nnz, 3), generator=generator).float() * 2
    for more in ({"counts": counts}, {"scales": scales}, {"counts": counts, "scales": scales}):
        check_attention(csr, 3, 8, bias=False, **more)
        check_attention(csr, 3, 8, of_nodes=True, slope=SLOPE, **more)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (5, 5)])
def test_graphs_without_edges(shape):
    csr = pattern([0] * shape[0], shape[1])
    check_attention(csr, 2, 4)
    given = ends(csr, 8, F32)
    check_scores(csr, 2, given, F32)
    given |= {
        "vector": drawn(2, 4, seed=3),
        "features": drawn(0, 3, seed=4),
        "weights": drawn(8, 3, seed=5),
    }
    check_scores(csr, 2, given, F32)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_in_its_rows(value):
    csr = pattern(UNEVEN, 50)
    given = {name: each.detach() for name, each in ends(csr, 8, F32).items()}
    given["right"][3] = value
    vector = drawn(2, 4, seed=3).detach()
    found = bent_scores(entries_of(csr), given["left"], given["right"], vector, SLOPE)
    compare([found], [wide_scores(csr, 2, given | {"vector": vector})], F32)
    scores, messages = drawn(csr.nnz, 2).detach(), drawn(50, 8).detach()
    scores[5], scores[40], messages[14] = value, value, value
    out = attend_entries(entries_of(csr), messages, scores)
    wanted = wide_attention(csr, {"messages": messages, "of_edge": scores}, 2, 1.0)
    compare([out], [wanted], F32)
    assert bool(out.isfinite().all(1).any()), "other rows are untouched"


def test_scores_beyond_the_range_of_exp():
    csr = pattern(UNEVEN, 50)
    scores, messages = 1e4 * drawn(csr.nnz, 2).detach(), drawn(50, 8).detach()
    out = attend_entries(entries_of(csr), messages, scores)
    wanted = wide_attention(csr, {"messages": messages, "of_edge": scores}, 2, 1.0)
    compare([out], [wanted], F32)


def test_repeated_columns_are_edges_of_their_own():
    csr = pattern([3, 0, 4], 9)
    csr.indices[1] = csr.indices[0]
    csr.indices[5] = csr.indices[4]
    given = ends(csr, 8, F32) | {
        "vector": drawn(2, 4, seed=3),
        "features": drawn(csr.nnz, 3, seed=4),
        "weights": drawn(8, 3, seed=5),
    }
    check_scores(csr, 2, given, F32)
    check_attention(csr, 2, 4)


def test_second_derivatives_are_refused():
    csr = pattern(UNEVEN, 50)
    given = ends(csr, 8, F32)
    out = dot_scores(entries_of(csr), given["left"], given["right"], 2, 1.0)
    (found,) = torch.autograd.grad(out.square().sum(), [given["left"]], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        found.sum().backward()


def test_features_are_split_into_launches():
    assert edge_attention._chunks(11) == [(0, 4), (4, 4), (8, 2), (10, 1)]
    assert edge_attention._chunks(0) == []

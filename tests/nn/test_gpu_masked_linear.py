"""Layers of single weights on a GPU: every method, CUDA graphs, training."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sparsetile as st
from sparsetile.formats.entry_streams import pack_entries
from sparsetile.kernels.linear_entries import ENTRY_PARTS
from sparsetile.layers.entry_layer import EntryLayer
from sparsetile.layers.masked_rows import MaskedRows, pack_masked, spread_masked
from sparsetile.nn import MaskedLinear, SparseConfig, masked_product, report, sparsify_
from sparsetile.nn.masks import pack_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0),
        reason="no GPU of sm_80 or newer here",
    ),
]


def layer_of(pattern: str, dtype: torch.dtype = torch.bfloat16, **options) -> MaskedLinear:
    torch.manual_seed(0)
    linear = nn.Linear(512, 1024, device="cuda", dtype=dtype)
    return MaskedLinear.from_linear(linear, sparsity=0.7, pattern=pattern, **options).eval()


def check(layer: MaskedLinear, tokens: int) -> None:
    x = torch.randn(tokens, 512, device="cuda", dtype=layer.weight.dtype)
    wide = torch.zeros(1024, 512, dtype=torch.float64, device="cuda")
    wide[layer.mask()] = layer.weight.detach().double()
    exact = functional.linear(x.double(), wide, layer.bias.detach().double())
    with torch.no_grad():
        found = layer(x)
    # Rounded once, or each part of a sum that cuBLAS splits; a wrong mask errs by 0.1 and more.
    bound = torch.finfo(layer.weight.dtype).eps * exact.abs() + 5e-3
    assert ((found.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("prefer", ["speed", "memory"])
@pytest.mark.parametrize("pattern", ["unstructured", "2:4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 7, 64, 300])
def test_results(dtype, pattern, prefer, tokens):
    check(layer_of(pattern, dtype, prefer=prefer), tokens)


@pytest.mark.parametrize("tokens", [1, 8, 64, 300])
def test_semi_structured_kernels_of_torch_give_the_same(tokens, monkeypatch):
    monkeypatch.setattr(masked_product, "_SEMI_STRUCTURED_FLOPS", 1)
    layer = layer_of("2:4")
    assert layer.method(tokens) == "2:4"
    check(layer, tokens)
    assert layer.memory()["other copies"] > 0 and layer.memory()["dense copy"] == 0
    with torch.no_grad():
        layer.weight.mul_(2)
    check(layer, tokens)
    assert report(layer, tokens=(tokens,)).layers[0].runs == {tokens: "2:4"}


def test_long_prompts_of_two_of_four_run_them():
    layer = MaskedLinear(18944, 3584, 0, pattern="2:4", device="cuda", dtype=torch.bfloat16)
    layer.weight = nn.Parameter(torch.ones(1, device="cuda", dtype=torch.bfloat16))
    assert layer.eval().method(8192) == "2:4" and layer.method(1024) == "dense"
    layer.prefer = "memory"
    assert layer.method(8192) == "dense"


@pytest.mark.parametrize("pattern", ["unstructured", "2:4"])
def test_a_cuda_graph_reads_the_copy_which_later_calls_refresh(pattern):
    layer, x = layer_of(pattern), torch.randn(4, 512, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        expected = layer(x).clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(x)
        out.zero_()
        graph.replay()
        torch.testing.assert_close(out, expected)
        layer.weight.mul_(2)
        layer.bias.mul_(2)
        layer(x)
        graph.replay()
        torch.testing.assert_close(out, 2 * expected)


def test_masks_are_kept_through_fused_steps():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).cuda()
    sparsify_(model, SparseConfig(0.7, pattern="unstructured"))
    masks = [model[0].mask(), model[2].mask()]
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    x, losses = torch.randn(64, 256, device="cuda"), []
    for _ in range(200):
        optimiser.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = (model(x) - x).square().mean()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    for layer, mask in zip((model[0], model[2]), masks, strict=True):
        assert torch.equal(layer.to_dense() != 0, mask & (layer.to_dense() != 0))
        assert not layer.to_dense()[~mask].any()


@pytest.mark.parametrize("tokens, copy", [(1, "other copies"), (64, "dense copy")])
def test_compiled_decoding_uses_what_is_kept(tokens, copy):
    torch._dynamo.reset()
    layer = layer_of("unstructured")
    x = torch.randn(tokens, 512, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for _ in range(4):
            torch.testing.assert_close(compiled(x), layer(x), rtol=1e-2, atol=1e-2)
        parts = layer.memory()
        assert [name for name in ("dense copy", "other copies") if parts[name]] == [copy]


# -- few tokens: entry by entry ------------------------------------------------------------------

SIZES = [(48, 384, 0.5), (1000, 4101, 0.3), (4096, 4096, 0.1), (33, 264, 0.0), (16, 128, 1.0),
         (3584, 18944, 0.5)]  # fmt: skip


def whole(rows: int, cols: int, share: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A weight of whole numbers, whose products are exact, and its mask."""
    generator = torch.Generator("cuda").manual_seed(rows + cols)
    mask = torch.rand(rows, cols, device="cuda", generator=generator) < share
    weight = torch.randint(-3, 4, (rows, cols), device="cuda", generator=generator)
    return (weight * mask).to(dtype), mask


def inputs(tokens: int, cols: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(tokens)
    made = torch.randint(-1, 2, (tokens, cols), device="cuda", generator=generator)
    return made.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows, cols, share", SIZES)
@pytest.mark.parametrize("parts", ENTRY_PARTS)
def test_few_tokens_are_multiplied_exactly(rows, cols, share, parts, dtype):
    weight, mask = whole(rows, cols, share, dtype)
    layer = EntryLayer(pack_entries(weight, mask, parts), dtype)
    bias = (torch.arange(rows, device="cuda") % 16 - 7).to(dtype)
    for tokens in (1, 2, 3, 4, 7, 8):
        if not layer.takes(tokens):
            assert cols == 18944 and tokens > 4
            continue
        x = inputs(tokens, cols, dtype)
        exact = x.double() @ weight.double().T
        for added in (None, bias, bias.float()):
            wanted = (exact if added is None else exact + added).to(dtype)
            assert torch.equal(layer(x, added), wanted)


@pytest.mark.parametrize("tokens", [1, 2, 4])
def test_few_tokens_give_the_same_bits_every_time(tokens):
    weight, mask = whole(4096, 14336, 0.5, torch.bfloat16)
    weight = torch.randn_like(weight).where(mask, 0)
    layer = EntryLayer(pack_entries(weight, mask, 16), torch.bfloat16)
    x = torch.randn(tokens, 14336, device="cuda").bfloat16()
    first = layer(x, None).clone()
    assert all(torch.equal(layer(x, None), first) for _ in range(20))
    exact = x.double() @ weight.double().T
    assert (first.double() - exact).abs().max() <= 0.01 * exact.abs().max()


def test_packing_on_the_gpu_gives_the_same_bytes():
    weight, mask = whole(300, 1032, 0.1, torch.float16)
    there, here = pack_entries(weight, mask, 8), pack_entries(weight.cpu(), mask.cpu(), 8)
    for name in ("stream", "offsets", "starts", "row_ids"):
        assert torch.equal(getattr(there, name).cpu(), getattr(here, name))


@pytest.mark.parametrize("rows, cols, share", [*SIZES, (70, 3000, 0.02), (64, 14336, 0.1)])
def test_stored_weights_are_spread_packed_and_multiplied(rows, cols, share):
    weight, mask = whole(rows, cols, share, torch.bfloat16)
    weight, bits = weight + mask.bfloat16() * 4, pack_bits(mask)  # none is 0
    if cols % 8:
        bits[:, -1] |= 256 - (1 << cols % 8)  # ignored
    assert torch.equal(spread_masked(weight[mask], bits, cols), weight)
    for parts in ENTRY_PARTS:
        found, wanted = (
            pack_masked(weight[mask], bits, cols, parts),
            pack_entries(weight, mask, parts),
        )
        assert found.steps == wanted.steps
        for name in ("stream", "offsets", "starts", "row_ids"):
            assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    product = MaskedRows(weight[mask], bits, cols)
    bias = (torch.arange(rows, device="cuda") % 16 - 7).bfloat16()
    for tokens in (1, 2, 3, 4):
        aside = torch.cat([inputs(tokens, cols, torch.bfloat16)] * 2, 1)
        aside[:, cols:] = torch.nan  # what lies behind x
        x = aside[:, :cols]
        exact = x.double() @ weight.double().T + bias
        assert torch.equal(product(x, bias), exact.bfloat16())


@pytest.mark.parametrize("prefer", ["speed", "memory"])
@pytest.mark.parametrize("rows, cols", [(18944, 3584), (1024, 4096)])
def test_a_layer_waits_for_its_input(rows, cols, prefer):
    """Its first loads come before the previous kernel ends, and its output after."""
    weight, mask = whole(rows, cols, 0.3, torch.bfloat16)
    layer = MaskedLinear.from_dense(weight, mask=mask, prefer=prefer).eval()
    xs = [inputs(1, cols, torch.bfloat16) * step for step in range(4)]
    with torch.no_grad():
        wanted = [layer(x).clone() for x in xs]
        assert torch.equal(wanted[2], (xs[2].double() @ weight.double().T).bfloat16()[:1])
        x, found = torch.empty_like(xs[0]), []
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for source in xs:
                x.copy_(source)
                y = layer(x)
                found.append(y.clone())
                y.fill_(torch.nan)
        for _ in range(5):
            graph.replay()
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_inf_and_nan_of_inputs_meet_dropped_weights_as_in_the_dense_product():
    layer = layer_of("unstructured")
    x = torch.randn(3, 512, device="cuda", dtype=torch.bfloat16)
    x[0, 5], x[1, 7] = torch.inf, torch.nan
    with torch.no_grad():
        wide = layer.to_dense()
        found = EntryLayer(pack_entries(wide, layer.mask(), 8), wide.dtype)(x, layer.bias)
        wanted = functional.linear(x.float(), wide.float(), layer.bias.float())
    assert torch.equal(found.isnan(), wanted.isnan()) and torch.equal(found.isinf(), wanted.isinf())
    assert found[2].isfinite().all() and found[1].isnan().all()


@pytest.mark.parametrize("change", ["in place", "data", "optimiser", "told"])
def test_a_changed_weight_is_packed_again(change):
    layer = layer_of("unstructured")
    assert layer.method(1) == "entries"
    check(layer, 1)
    if change == "in place":
        with torch.no_grad():
            layer.weight.mul_(2)
    elif change == "data":
        layer.weight.data = layer.weight.data * 2
    elif change == "optimiser":
        layer.weight.grad = -layer.weight.detach()
        torch.optim.SGD(layer.parameters(), lr=1.0, fused=True).step()
    else:
        torch.from_dlpack(layer.weight.detach()).mul_(2)
        st.changed()
    check(layer, 1)


@pytest.mark.parametrize("tokens", [1, 4])
def test_replays_read_what_later_calls_pack_and_prune(tokens):
    weight, mask = whole(4096, 14336, 0.3, torch.bfloat16)
    layer = MaskedLinear.from_dense(weight, mask=mask).eval()
    x = inputs(tokens, 14336, torch.bfloat16)
    with torch.no_grad():
        layer(x)
        assert layer.method(tokens) == "entries"
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(x)
        for step in (None, lambda: layer.weight.mul_(2), lambda: layer.prune_(0.9)):
            if step is not None:
                step()
                layer(x)
            out.fill_(torch.nan)
            for _ in range(3):
                graph.replay()
            wanted = (x.double() @ layer.to_dense().double().T).bfloat16()
            assert torch.equal(out, wanted)


def test_compiled_graphs_run_entries():
    torch._dynamo.reset()
    layer = layer_of("unstructured")
    compiled = torch.compile(layer, mode="reduce-overhead", fullgraph=True)
    x = torch.randn(1, 512, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        for _ in range(5):
            torch.compiler.cudagraph_mark_step_begin()
            torch.testing.assert_close(compiled(x).clone(), layer(x), rtol=1e-2, atol=1e-2)
        assert layer.memory()["dense copy"] == 0
        layer.weight.mul_(2)
        expected = layer(x)
        torch.compiler.cudagraph_mark_step_begin()
        torch.testing.assert_close(compiled(x).clone(), expected, rtol=1e-2, atol=1e-2)


def test_streams_at_once():
    layer = layer_of("unstructured")
    check(layer, 1)
    streams = [torch.cuda.Stream() for _ in range(3)]
    xs = [torch.randn(1, 512, device="cuda", dtype=torch.bfloat16) for _ in streams]
    with torch.no_grad():
        wanted = [layer(x) for x in xs]
        torch.cuda.synchronize()
        for _ in range(10):
            found = []
            for stream, x in zip(streams, xs, strict=True):
                with torch.cuda.stream(stream):
                    found.append(layer(x))
            torch.cuda.synchronize()
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))

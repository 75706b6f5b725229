"""The block system on matrices of full blocks, which the contract's scattered ones hardly have."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import Tensor, nn

import sparsetile as st
from sparsetile.core.device import capability
from sparsetile.kernels import bcsr as kernel
from sparsetile.kernels.linear_few import FEW_TOKENS
from sparsetile.layers import block_linear
from sparsetile.nn import SparseLinear, SparseSwiGLU
from sparsetile.plan.planner import build_plan
from sparsetile.plan.traced.flat import parsed
from sparsetile.systems import SYSTEMS, registry
from sparsetile.systems.bcsr import tf32_operand
from tests.contracts.cases import assert_close, csr_of, reference, tf32


def _hopper() -> bool:
    return torch.cuda.is_available() and capability(0) == (9, 0)


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not _hopper(), reason="no Hopper GPU here"),
]

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
FP8 = torch.float8_e4m3fn


def pruned(
    shape: tuple[int, int], kept: float, dtype: torch.dtype = F16, *, whole: bool = False
) -> st.CSR:
    """A share of the blocks of 64 of a matrix; small whole numbers if ``whole``."""
    random = np.random.default_rng(6)
    blocks = [-(-side // 64) for side in shape]
    dense = np.kron(random.random(blocks) < kept, np.ones((64, 64)))[: shape[0], : shape[1]]
    values = random.integers(1, 4, dense.shape) if whole else random.normal(size=dense.shape)
    return csr_of(sp.csr_array(dense * values), dtype=dtype).to("cuda")


def dense(rows: int, n: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, n, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("n", [1, 8, 100, 128, 136, 256, 264, 1000, 2048])
@pytest.mark.parametrize("shape", [(640, 512), (1000, 777), (64, 6400), (9024, 256)], ids=str)
def test_full_blocks_agree_with_float64_within_rounding(dtype, n, shape):
    csr = pruned(shape, 0.3, dtype)
    plan = st.plan(csr, n, system="bcsr")
    assert "repair" not in plan.info["choices"]
    B = dense(shape[1], n, dtype)
    assert_close(plan @ B, csr, B)


@pytest.mark.parametrize("kept", [0.0, 0.05])
@pytest.mark.parametrize("n", [128, 2048])
def test_many_block_rows_without_blocks_give_zeros_between_the_others(n, kept):
    csr = pruned((9024, 256), kept, BF16)
    plan, B = st.plan(csr, n, system="bcsr"), dense(256, n, BF16)
    C = plan @ B
    assert_close(C, csr, B)
    assert all(torch.equal(plan @ B, C) for _ in range(5))


@pytest.mark.parametrize("n", [72, 512])
def test_small_whole_numbers_match_bit_for_bit(n):
    csr = pruned((700, 900), 0.4, whole=True)
    B = torch.randint(0, 2, (900, n), device="cuda").to(F16)
    C = st.plan(csr, n, system="bcsr").run(B, out_dtype=F32)
    assert torch.equal(C.cpu().double(), reference(csr, B))


@pytest.mark.parametrize("n", [8, 120, 251, 500])
@pytest.mark.parametrize("rows", [64, 70, 450])
def test_nothing_beside_c_is_written(n, rows):
    csr, B = pruned((rows, 300), 0.5, whole=True), torch.ones(300, n, device="cuda", dtype=F16)
    around = torch.full((rows + 2, 512), 7.0, device="cuda", dtype=F16)
    st.plan(csr, n, system="bcsr").run(B, out=around[1:-1, :n])
    assert torch.equal(around[1:-1, :n].cpu().double(), reference(csr, B))
    around[1:-1, :n] = 7
    assert bool((around == 7).all())


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("out_dtype", [F16, F32], ids=str)
@pytest.mark.parametrize("n", [256, 251])
def test_the_epilogue_and_the_row_order_reach_every_element(out_dtype, n, ordered):
    csr = pruned((450, 300), 0.5, whole=True)
    # Within block rows, so that blocks stay full.
    order = torch.argsort(torch.arange(450) // 64 + torch.rand(450, dtype=torch.float64))
    plan = st.plan(csr, n, system="bcsr", reorder=order if ordered else "identity")
    assert "repair" not in plan.info["choices"]
    B = torch.randint(0, 2, (300, n), device="cuda").to(F16)
    bias, plain = torch.arange(n, device="cuda") / 4 - 9, reference(csr, B)
    C = plan.run(B, alpha=0.5, bias=bias, relu=True, out_dtype=out_dtype)
    expected = torch.relu(plain / 2 + bias.cpu().double())
    assert torch.equal(C.cpu(), expected.to(out_dtype))
    before = torch.randint(-3, 4, (450, n), device="cuda").to(F16)
    C = plan.run(B, out=before.clone(), alpha=0.5, beta=2.0)
    assert torch.equal(C.cpu(), (plain / 2 + 2 * before.cpu().double()).to(F16))


def test_many_operands_at_many_addresses_are_told_apart():
    csr = pruned((640, 512), 0.3)
    plan = st.plan(csr, 128, system="bcsr")
    operands = [dense(512, n, F16) for n in (128, 64, 256) for _ in range(120)]
    results = [plan @ B for B in operands]
    for B, C in zip(operands[::37], results[::37], strict=True):
        assert_close(C, csr, B)
    assert all(torch.equal(plan @ B, C) for B, C in zip(operands, results, strict=True))


def test_a_captured_graph_replays_with_new_input_and_new_values():
    csr = pruned((640, 512), 0.3)
    plan, B = st.plan(csr, 128, system="bcsr"), dense(512, 128, F16)
    plan @ B
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        C = plan @ B
    for _ in range(3):
        B.copy_(dense(512, 128, F16))
        fresh = torch.randn(csr.nnz, device="cuda").to(F16)
        plan.update_values(fresh)
        graph.replay()
        assert_close(C, csr.with_values(fresh), B)


def test_full_blocks_give_csr_arithmetic_where_B_is_not_finite():
    csr = pruned((300, 250), 0.4)
    B = dense(250, 64, F16)
    B[70, 3], B[249, 5] = float("nan"), float("inf")
    expected = reference(csr, B)
    C = (st.plan(csr, 64, system="bcsr") @ B).cpu()
    assert torch.equal(C.isnan(), expected.isnan()) and torch.equal(C.isinf(), expected.isinf())


# -- as a linear layer has its operands: X and Y row-major, B = Xᵀ, C = Yᵀ


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("n", [1, 8, 100, 128, 200, 256, 1000, 2048])
@pytest.mark.parametrize("shape", [(640, 512), (1000, 776), (64, 6400), (9024, 256)], ids=str)
def test_row_major_input_and_output_of_a_linear_layer_are_used_where_they_lie(dtype, n, shape):
    csr = pruned(shape, 0.3, dtype)
    plan, X = st.plan(csr, n, system="bcsr"), dense(n, shape[1], dtype)
    expected = plan @ X.T.contiguous()
    Y = torch.empty(n, shape[0], device="cuda", dtype=dtype)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    plan.run(X.T, out=Y.T)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before, "nothing is copied"
    for C in (Y.T, plan @ X.T, plan.run(X.T.contiguous(), out=torch.empty_like(Y).T)):
        assert_close(C, csr, X.T)
        # The kernel for few tokens adds in an order of its own.
        assert n <= FEW_TOKENS or torch.equal(C, expected)


@pytest.mark.parametrize("n", [72, 251, 512])
def test_small_whole_numbers_of_a_linear_layer_match_bit_for_bit(n):
    csr = pruned((700, 904), 0.4, whole=True)
    X = torch.randint(0, 2, (n, 904), device="cuda").to(F16)
    C = st.plan(csr, n, system="bcsr").run(X.T, out_dtype=F32)
    assert torch.equal(C.cpu().double(), reference(csr, X.T))


@pytest.mark.parametrize("n", [8, 120, 251, 500])
@pytest.mark.parametrize("rows", [64, 70, 450])
def test_nothing_beside_a_transposed_c_is_written(n, rows):
    csr, X = pruned((rows, 304), 0.5, whole=True), torch.ones(n, 304, device="cuda", dtype=F16)
    around = torch.full((n + 2, 512), 7.0, device="cuda", dtype=F16)
    st.plan(csr, n, system="bcsr").run(X.T, out=around[1:-1, :rows].T)
    assert torch.equal(around[1:-1, :rows].T.cpu().double(), reference(csr, X.T))
    around[1:-1, :rows] = 7
    assert bool((around == 7).all())


def test_batches_scales_and_odd_strides_of_a_linear_layer_are_right():
    csr = pruned((450, 304), 0.5, whole=True)
    plan, X = st.plan(csr, 40, system="bcsr"), torch.randint(0, 2, (3, 40, 304), device="cuda")
    X, Y = X.to(F16), torch.randint(-3, 4, (3, 40, 456), device="cuda").to(F16)[..., :450]
    plain, before = torch.stack([reference(csr, one.T) for one in X]), Y.cpu().double()
    plan.run(X.mT, out=Y.mT, alpha=0.5, beta=2.0)
    assert torch.equal(Y.cpu().double(), plain.mT / 2 + 2 * before)
    part = csr_of(sp.csr_array(np.ones((100, 303))), dtype=F16).to("cuda")
    X = X[..., :303]
    for odd in (X.contiguous(), X[:, ::2], X[:, :1].expand(3, 9, 303)):
        out = torch.empty(3, odd.shape[1], 103, device="cuda", dtype=F16)[..., 3:]
        st.plan(part, 40, system="bcsr").run(odd.mT, out=out.mT)
        expected = torch.stack([reference(part, one.T) for one in odd]).mT
        assert torch.equal(out.cpu().double(), expected)


def test_a_captured_graph_of_a_linear_layer_replays_with_new_input():
    csr = pruned((640, 512), 0.3)
    plan, X = st.plan(csr, 128, system="bcsr"), dense(128, 512, F16)
    Y = torch.empty(128, 640, device="cuda", dtype=F16)
    plan.run(X.T, out=Y.T)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.run(X.T, out=Y.T)
    for _ in range(3):
        X.copy_(dense(128, 512, F16))
        graph.replay()
        assert_close(Y.T, csr, X.T)


@pytest.mark.parametrize("dtype", [F16, BF16, F32, FP8], ids=str)
@pytest.mark.parametrize("n", [1, 72, 251, 1000])
def test_a_linear_layer_with_bias_and_relu_matches_bit_for_bit_in_one_kernel(n, dtype):
    csr = pruned((704, 912), 0.2, whole=True)
    bias = torch.randint(-200, 50, (704,), device="cuda") / 2
    X = torch.randint(0, 2, (n, 912), device="cuda").to(dtype)
    with tf32(True):
        plan = st.plan(csr, n, dtype=dtype, system="bcsr")
        assert plan.fuses_linear
        found = plan.linear(X, bias=bias, relu=True, alpha=0.5)
        wide = plan.linear(X.view(1, n, 912), bias=bias, out_dtype=F32)
    plain = reference(csr, X.T.float()).T
    expected = torch.relu(plain / 2 + bias.cpu().double())
    assert found.dtype is (BF16 if dtype is FP8 else dtype) and found.is_contiguous()
    assert torch.equal(found.cpu(), expected.to(found.dtype))
    assert torch.equal(wide[0].cpu().double(), plain + bias.cpu().double())


def test_a_linear_layer_allocates_nothing_but_its_result():
    for dtype in (F16, F32):
        csr, X = pruned((640, 512), 0.3, dtype), dense(128, 512, dtype)
        bias = torch.randn(640, device="cuda")
        with tf32(True):
            plan = st.plan(csr, 128, system="bcsr")
            plan.linear(X, bias=bias, relu=True)
            before = torch.cuda.memory_stats()["allocation.all.allocated"]
            Y = plan.linear(X, bias=bias, relu=True)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before + 1
        assert Y.shape == (128, 640)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("reorder", ["identity", "lsh"])
def test_bound_linear_layers_have_the_bits_of_others(dtype, reorder):
    """An out_dtype, even the usual one, takes the operators."""
    plan = st.plan(pruned((640, 512), 0.3, dtype), 128, system="bcsr", reorder=reorder)
    biases = (None, torch.randn(640, device="cuda"), torch.randn(640, device="cuda").to(dtype))
    for tokens in (1, 8, 16, 17, 128, 1000):
        for X in (dense(tokens, 512, dtype), dense(tokens, 520, dtype)[:, :512],
                  dense(tokens, 512, dtype)[None], dense(512, tokens, dtype).t()):  # fmt: skip
            for bias in biases:
                for relu in (False, True):
                    found = plan.linear(X, bias=bias, relu=relu)
                    wanted = plan.linear(X, bias=bias, relu=relu, out_dtype=dtype)
                    assert torch.equal(found, wanted) and found.is_contiguous()
    plan.update_values(plan.values * 2)
    X = dense(16, 512, dtype)
    assert torch.equal(plan.linear(X), plan.linear(X, out_dtype=dtype))
    with torch.cuda.stream(torch.cuda.Stream()):
        assert torch.equal(plan.linear(X), plan.linear(X, out_dtype=dtype))


def test_gradients_of_a_linear_layer_are_those_of_the_product():
    csr = pruned((640, 512), 0.3)
    plan, X = st.plan(csr, 64, system="bcsr"), dense(64, 512, F16).requires_grad_()
    bias, G = torch.zeros(640, device="cuda", requires_grad=True), dense(64, 640, F16)
    plan.linear(X, bias=bias).backward(G)
    assert_close(X.grad.T, csr.transposed(), G.T)
    assert torch.allclose(bias.grad, G.float().sum(0), atol=0.1)


def test_scattered_matrices_whose_c_is_repaired_take_transposed_operands_too():
    csr = csr_of(sp.random_array((300, 248), density=0.1, rng=3), dtype=F16).to("cuda")
    plan, X = st.plan(csr, 64, system="bcsr"), dense(64, 248, F16)
    assert "repair" in plan.info["choices"]
    Y = torch.empty(64, 300, device="cuda", dtype=F16)
    plan.run(X.T, out=Y.T)
    assert_close(Y.T, csr, X.T)


def with_holes(shape: tuple[int, int], dtype: torch.dtype) -> st.CSR:
    """A pruned weight of small whole numbers some of whose kept values are zero, and not stored."""
    csr = pruned(shape, 0.3, dtype, whole=True)
    matrix = sp.csr_array(
        (csr.values.cpu().float().numpy(), csr.indices.cpu().numpy(), csr.indptr.cpu().numpy()),
        shape=shape,
    )
    matrix.data[::97] = 0.0
    matrix.eliminate_zeros()
    return csr_of(matrix, dtype=dtype).to("cuda")


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("n", [1, 72, 251])
def test_a_linear_layer_with_holes_in_its_blocks_is_fused_and_exact(n, dtype):
    csr, bias = with_holes((704, 912), dtype), torch.randint(-9, 9, (704,), device="cuda") / 2
    X = torch.randint(0, 2, (n, 912), device="cuda").to(dtype)
    with tf32(True):
        plan = st.plan(csr, n, dtype=dtype, system="bcsr")
        assert plan.fuses_linear and "repair" in plan.info["choices"]
        for spoil in (False, True):
            if spoil:
                X[0, 17], X[-1, 300], X[n // 2, 911] = float("nan"), float("inf"), -float("inf")
            found = plan.linear(X, bias=bias, relu=True, alpha=0.5)
            wide = plan.linear(X.expand(2, n, 912), bias=bias, out_dtype=F32)
            plain = reference(csr, X.T.float()).T
            expected = torch.relu(plain / 2 + bias.cpu().double())
            assert torch.equal(
                found.cpu().double().nan_to_num(-1, 7e4, -7e4),
                expected.to(dtype).double().nan_to_num(-1, 7e4, -7e4),
            )
            expected = (plain + bias.cpu().double()).nan_to_num(-1, 7e4, -7e4)
            for one in wide:
                assert torch.equal(one.cpu().double().nan_to_num(-1, 7e4, -7e4), expected)


def in_a_new_thread(work):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


@pytest.mark.parametrize("full", [False, True], ids=["repaired", "full blocks"])
def test_a_thread_that_has_done_no_cuda_work_may_multiply_first(full):
    scattered = sp.random_array((300, 248), density=0.1, rng=3)
    csr = pruned((320, 256), 0.5) if full else csr_of(scattered, dtype=F16).to("cuda")
    plan = st.plan(csr, 64, system="bcsr")
    B, X = dense(csr.shape[1], 64, F16), dense(64, csr.shape[1], F16)
    torch.cuda.synchronize()
    assert_close(in_a_new_thread(lambda: plan @ B), csr, B)
    assert_close(in_a_new_thread(lambda: plan.run(B, alpha=2.0)) / 2, csr, B)
    assert_close(in_a_new_thread(lambda: plan.linear(X)).T, csr, X.T)


def test_a_product_after_one_that_was_not_finite_has_the_bits_of_before():
    csr = csr_of(sp.random_array((300, 248), density=0.1, rng=3), dtype=F16).to("cuda")
    plan, B = st.plan(csr, 64, system="bcsr"), dense(248, 64, F16)
    large = B.clone()
    large[:, 5] = 60_000  # sums are finite in float32, most of them not in float16
    before, before_large = plan @ B, plan @ large
    bad = B.clone()
    bad[3, 7] = torch.inf
    spoilt = plan @ bad
    assert not bool(spoilt.isfinite().all())
    assert torch.equal(plan @ B, before)
    assert torch.equal(plan @ large, before_large)


def test_threads_on_one_stream_each_have_their_products_repaired():
    csr = csr_of(sp.random_array((300, 248), density=0.1, rng=3), dtype=F16).to("cuda")
    B = dense(248, 64, F16)
    B[3, 7] = torch.inf
    exact = st.plan(csr, 64, system="csr") @ B
    for _ in range(10):
        plan = st.plan(csr, 64, system="bcsr")
        torch.cuda.synchronize()
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda _, plan=plan: plan @ B, range(16)))
        torch.cuda.synchronize()
        assert all(torch.equal(C.isnan(), exact.isnan()) for C in found)


# -- steps of the ladder


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("n", [100, 1000])
@pytest.mark.parametrize("step", SYSTEMS["bcsr"].ablations)
def test_every_step_of_the_ladder_gives_the_product(step, n, dtype):
    csr = pruned((1000, 777), 0.3, dtype, whole=True)
    B = torch.randint(0, 2, (777, n), device="cuda").to(dtype)
    plan, expected = build_plan(csr, n, system="bcsr", ablation=step), reference(csr, B)
    assert plan.info["choices"]["ablation"] == step
    assert torch.equal(plan.run(B, out_dtype=F32).cpu().double(), expected)
    assert torch.equal((plan @ B).cpu(), expected.to(dtype))
    X = B.T.contiguous()
    assert torch.equal((plan @ X.T).cpu(), expected.to(dtype))


def test_a_step_of_the_ladder_writes_nothing_beside_c():
    csr, B = pruned((70, 300), 0.5, whole=True), torch.ones(300, 251, device="cuda", dtype=F16)
    for step in SYSTEMS["bcsr"].ablations:
        around = torch.full((72, 512), 7.0, device="cuda", dtype=F16)
        build_plan(csr, 251, system="bcsr", ablation=step).run(B, out=around[1:-1, :251])
        assert torch.equal(around[1:-1, :251].cpu().double(), reference(csr, B))
        around[1:-1, :251] = 7
        assert bool((around == 7).all()), step


# -- FP8


def eight(n: int, k: int) -> Tensor:
    return (torch.randn(n, k, device="cuda") / 2).to(FP8)


@pytest.mark.parametrize("n", [1, 100, 128, 200, 4096])
@pytest.mark.parametrize("shape", [(640, 512), (1000, 784), (64, 6400)], ids=str)
def test_fp8_agrees_with_the_exact_product_of_its_operands(n, shape):
    csr = pruned(shape, 0.3, BF16)
    plan, X = st.plan(csr, n, dtype=FP8, system="bcsr"), eight(n, shape[1])
    rounded = csr.with_values(csr.values.to(FP8).float())
    expected = reference(rounded, X.T.float())
    magnitude = reference(rounded.with_values(rounded.values.abs()), X.T.float().abs())
    Y = torch.empty(n, shape[0], device="cuda", dtype=BF16)
    plan.run(X.T, out=Y.T, alpha=0.25)
    for C, bits in ((Y.T, 8), (plan.run(X.T, alpha=0.25, out_dtype=F32), 24)):
        error = (C.cpu().double() - expected / 4).abs()
        # Tensor Cores keep some 14 bits over 128 of k; then C is rounded once.
        bound = magnitude / 4 * 2.0**-10 + expected.abs() / 4 * 2.0**-bits + 1e-6
        assert bool((error <= bound).all()), float((error / bound).max())


@pytest.mark.parametrize("out_dtype", [None, BF16, F16, F32], ids=str)
@pytest.mark.parametrize("n", [72, 251, 512])
def test_small_whole_numbers_in_fp8_match_bit_for_bit(n, out_dtype):
    csr = pruned((700, 912), 0.2, whole=True)
    plan = st.plan(csr, n, dtype=FP8, system="bcsr")
    X = torch.randint(0, 2, (n, 912), device="cuda").to(FP8)
    expected = reference(csr, X.T.float())
    wanted = out_dtype or BF16
    for B in (X.T, X.float().T.contiguous().to(FP8)):
        C = plan.run(B, out_dtype=out_dtype)
        assert C.dtype is wanted and torch.equal(C.cpu(), expected.to(wanted))
    assert torch.equal((plan @ X.T).cpu(), expected.to(BF16))


def test_fp8_plans_take_new_values_and_say_what_they_cannot():
    csr = pruned((640, 512), 0.3)
    plan, X = st.plan(csr, 64, dtype=FP8, system="bcsr"), eight(64, 512)
    before = plan @ X.T
    plan.update_values(-csr.values)
    assert torch.equal(plan @ X.T, -before)
    with pytest.raises(
        ValueError, match="a float8 product must be a sum or mean without gradients"
    ):
        plan.run(X.T, reduce="max")
    scattered = csr_of(sp.random_array((300, 248), density=0.1, rng=3), dtype=F16).to("cuda")
    with pytest.raises(st.UnsupportedError, match="only where blocks of 64x64 are full"):
        st.plan(scattered, 64, dtype=FP8, system="bcsr")


# -- TF32


@pytest.mark.parametrize("n", [1, 100, 128, 251, 1000])
@pytest.mark.parametrize("shape", [(640, 512), (1000, 777), (64, 6400)], ids=str)
def test_tf32_agrees_with_float64_within_the_rounding_of_both_operands(n, shape):
    csr = pruned(shape, 0.3, F32)
    with tf32(True):
        plan = st.plan(csr, n, system="bcsr")
        assert "repair" not in plan.info["choices"]
        B = dense(shape[1], n, F32)
        C = plan @ B
        assert_close(C, csr, B)
        assert torch.equal(plan @ B.T.contiguous().T, C), "a K-major B has the same product"


@pytest.mark.parametrize("n", [72, 251, 512])
def test_small_whole_numbers_in_tf32_match_bit_for_bit(n):
    csr = pruned((700, 904), 0.4, F32, whole=True)
    X = torch.randint(0, 2, (n, 904), device="cuda").to(F32)
    expected = reference(csr, X.T)
    with tf32(True):
        plan = st.plan(csr, n, system="bcsr")
        around = torch.full((702, 520), 7.0, device="cuda")
        plan.run(X.T.contiguous(), out=around[1:-1, :n])
        Y = torch.full((n, 705), 7.0, device="cuda")
        plan.run(X.T, out=Y[:, 2:702].T)
    assert torch.equal(around[1:-1, :n].cpu().double(), expected)
    assert torch.equal(Y[:, 2:702].T.cpu().double(), expected)
    around[1:-1, :n], Y[:, 2:702] = 7, 7
    assert bool((around == 7).all()) and bool((Y == 7).all()), "nothing beside C is written"


def test_tf32_rounds_both_operands_to_nearest():
    csr = pruned((256, 256), 1.0, F32)
    between = 1 + 2.0**-11 + 2.0**-20  # cut off it would be 1
    with tf32(True):
        plan = st.plan(csr, 64, system="bcsr")
        for a, b in ((between, 1.0), (1.0, between)):
            plan.update_values(torch.full((csr.nnz,), a, device="cuda"))
            C = plan @ torch.full((256, 64), b, device="cuda")
            assert bool((C == 256 * (1 + 2.0**-10)).all())


def test_a_wide_b_in_tf32_goes_in_pieces(monkeypatch):
    monkeypatch.setattr(tf32_operand, "MOST_BYTES", 2**18)
    csr = pruned((700, 904), 0.4, F32, whole=True)
    B = torch.randint(0, 2, (2, 904, 1000), device="cuda").to(F32)
    bias = torch.arange(1000.0, device="cuda") - 700
    with tf32(True):
        C = st.plan(csr, 1000, system="bcsr").run(B, bias=bias, relu=True)
    expected = torch.stack([reference(csr, one) for one in B]) + bias.cpu().double()
    assert torch.equal(C.cpu().double(), torch.relu(expected))


def test_threads_that_share_a_stream_keep_their_copies_of_b_apart():
    csr = pruned((640, 512), 0.3, F32, whole=True)
    with tf32(True):
        plan = st.plan(csr, 128, system="bcsr")
        operands = [torch.full((512, 128), float(i), device="cuda") for i in range(4)]
        expected = [plan @ B for B in operands]
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda i: plan @ operands[i % 4], range(400)))
    assert all(torch.equal(C, expected[i % 4]) for i, C in enumerate(found))


def test_a_captured_graph_in_tf32_replays_with_new_input():
    csr = pruned((640, 512), 0.3, F32)
    with tf32(True):
        plan, B = st.plan(csr, 128, system="bcsr"), dense(512, 128, F32)
        plan @ B
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            C = plan @ B
        for _ in range(3):
            B.copy_(dense(512, 128, F32))
            graph.replay()
            assert_close(C, csr, B)


# -- items from a queue


def unqueued_then_queued(monkeypatch: pytest.MonkeyPatch, product) -> tuple[Tensor, Tensor]:
    """What thread blocks that take items in turn give, and those that take the next of all."""
    fixed = product()
    # Runners keep their launches, and are kept by what they were made from.
    parsed.cache_clear()
    block_linear.block_layer.cache_clear()
    gc.collect()
    registry._runners.clear()
    monkeypatch.setattr(kernel, "MANY_DRIFTS", 0)
    chosen: list[bool] = []
    real = kernel.BlockTile.queues

    def noted(tile, *sizes):
        chosen.append(real(tile, *sizes))
        return chosen[-1]

    monkeypatch.setattr(kernel.BlockTile, "queues", noted)
    taken = product()
    assert chosen and all(chosen), "what the case is about"
    return fixed, taken


@pytest.mark.parametrize("dtype", [F16, BF16, F32, FP8], ids=str)
@pytest.mark.parametrize("shape", [(640, 512), (64, 6400), (9024, 256), (5000, 64)], ids=str)
@pytest.mark.parametrize("n", [264, 4096])
def test_a_queue_changes_no_bits(monkeypatch, dtype, shape, n):
    torch.backends.cuda.matmul.allow_tf32 = True
    csr = pruned(shape, 0.2, BF16 if dtype is FP8 else dtype)
    X = dense(n, shape[1], BF16 if dtype is FP8 else dtype).to(dtype)

    def product() -> Tensor:
        plan = st.plan(csr, n, dtype=dtype, system="bcsr", reorder="identity")
        first = plan.linear(X)
        for _ in range(5):
            assert torch.equal(plan.linear(X), first)
        return first

    fixed, taken = unqueued_then_queued(monkeypatch, product)
    assert torch.equal(fixed, taken)


def test_a_queue_on_two_streams_and_in_a_graph(monkeypatch):
    csr, B = pruned((1984, 1024), 0.3), dense(1024, 2048, F16)

    def product() -> Tensor:
        plan = st.plan(csr, 2048, system="bcsr", reorder="identity")
        C = plan @ B
        streams = [torch.cuda.Stream() for _ in range(2)]
        torch.cuda.synchronize()
        found = []
        for _ in range(20):
            for stream in streams:
                with torch.cuda.stream(stream):
                    found.append(plan @ B)
        torch.cuda.synchronize()
        assert all(torch.equal(each, C) for each in found)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = plan @ B
        for _ in range(3):
            captured.zero_()
            graph.replay()
            assert torch.equal(captured, C)
        return C

    fixed, taken = unqueued_then_queued(monkeypatch, product)
    assert torch.equal(fixed, taken)


def test_a_queue_of_paired_items(monkeypatch):
    """Gate and up of a SwiGLU are the halves of an item."""
    X = dense(1000, 640, BF16)

    def product() -> Tensor:
        torch.manual_seed(3)
        gate, up, down = (
            SparseLinear.from_linear(nn.Linear(*sizes, bias=False).cuda().bfloat16(), sparsity=0.7)
            for sizes in ((640, 1472), (640, 1472), (1472, 640))
        )
        with torch.no_grad():
            return SparseSwiGLU(gate, up, down).requires_grad_(False)(X)

    fixed, taken = unqueued_then_queued(monkeypatch, product)
    assert torch.equal(fixed, taken)

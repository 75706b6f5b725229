"""Baselines: right on the host, and clear about what they do not take."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sparsetile.bench.baselines import BASELINES
from sparsetile.bench.operands import Operands
from sparsetile.bench.worker import judge
from sparsetile.data.generators import generate
from sparsetile.intake.csr import CSR


def _operands(
    dtype: torch.dtype = torch.float32,
    reduce: str = "sum",
    op: str = "spmm",
    weighted: bool = True,
    device: str = "cpu",
) -> Operands:
    csr = generate("power_law", rows=300, nnz=3000, weighted=weighted, seed=3).to(device)
    B = torch.randn(300, 9, device=device).to(dtype)
    G = torch.randn(300, 9, device=device).to(dtype) if op == "sddmm" else None
    return Operands(csr, B, G, op, reduce)


@pytest.mark.parametrize("name", ["torch-csr", "torch-dense", "scipy", "numba-loop"])
@pytest.mark.parametrize("weighted", [True, False])
def test_the_baselines_of_the_host_are_right(name: str, weighted: bool) -> None:
    operands = _operands(weighted=weighted)
    baseline = BASELINES[name]
    assert baseline.reason(operands) is None
    result = torch.as_tensor(baseline.prepare(operands).run())
    assert judge(operands, result).ok


def test_the_numba_loop_computes_in_the_type_of_its_operands() -> None:
    operands = _operands(dtype=torch.float64)
    result = torch.as_tensor(BASELINES["numba-loop"].prepare(operands).run())
    assert result.dtype is torch.float64 and judge(operands, result).ok
    said = BASELINES["numba-loop"].reason(_operands(dtype=torch.bfloat16))
    assert said == "knows float32 and float64 only"


def test_the_numba_loop_uses_the_threads_of_torch() -> None:
    numba = pytest.importorskip("numba")
    before = torch.get_num_threads(), numba.get_num_threads()
    try:
        torch.set_num_threads(1)
        BASELINES["numba-loop"].prepare(_operands())
        assert numba.get_num_threads() == 1
    finally:
        torch.set_num_threads(before[0])
        numba.set_num_threads(before[1])


def test_other_reductions_are_refused() -> None:
    assert BASELINES["scipy"].reason(_operands(reduce="max")) == "knows sum, not max"


def test_sddmm_is_right_entry_by_entry() -> None:
    operands = _operands(op="sddmm", weighted=False)
    result = BASELINES["torch-sddmm"].prepare(operands).run()
    assert judge(operands, result).ok
    wrong = result.clone()
    wrong[-1] += 1
    assert not judge(operands, wrong).ok


def test_a_dense_copy_that_would_not_fit_is_refused_with_its_size() -> None:
    csr = CSR(torch.zeros(10**6 + 1, dtype=torch.int64), torch.zeros(0, dtype=torch.int32), None,
              (10**6, 10**6))  # fmt: skip
    operands = Operands(csr, torch.zeros(1, 1), None, "spmm", "sum")
    assert BASELINES["torch-dense"].reason(operands) == "A written out takes more than 8 GiB"


@pytest.mark.parametrize("block, expected", [(64, "64"), (32, "32"), (1, "16")])
def test_torch_bsr_takes_the_blocks_in_which_weights_were_pruned(block: int, expected: str) -> None:
    pruned = {"out_features": 256, "in_features": 192, "sparsity": 0.5, "weighted": True}
    csr = generate("pruned_weights", **pruned, block=block)
    operands = Operands(csr, torch.randn(192, 9), None, "spmm", "sum")
    assert BASELINES["torch-bsr"].reason(operands) is None
    ready = BASELINES["torch-bsr"].prepare(operands)
    blocks = csr.nnz // block**2 if block > 1 else (256 // 16) * (192 // 16)
    assert ready.choices == {"block": expected}
    assert ready.format_bytes >= 4 * blocks * int(expected) ** 2


def test_torch_bsr_refuses_other_shapes() -> None:
    assert BASELINES["torch-bsr"].reason(_operands()) == "needs a shape divisible by 16"


def test_a_linear_layer_is_refused_by_baselines_of_row_major_operands() -> None:
    operands = replace(_operands(), layout="linear")
    said = "takes row-major operands, not layout linear"
    assert BASELINES["torch-csr"].reason(operands) == said
    assert BASELINES["torch-dense"].reason(operands) is None

"""Matrices on disk or in the host's memory: products panel by panel, and their gradient."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import sparsetile as st
from sparsetile.dist import StreamedPlan, stream_plan, write_folder
from tests.contracts.cases import assert_close, csr_of, random_matrix, with_dense_row

MATRICES = {
    "random": random_matrix(150, 150, 0.1),
    "dense row": with_dense_row(90, 700, 3),
    "empty rows": random_matrix(300, 60, 0.01),
    "no entries": random_matrix(20, 30, 0.0),
    "no rows": random_matrix(0, 5, 0.0),
}
SMALL = 1000  # bytes of a panel


def operand(rows: int, device: torch.device, dtype=torch.float32, n: int = 9) -> torch.Tensor:
    return torch.randn(rows, n, dtype=torch.float64).to(dtype).to(device)


@pytest.mark.parametrize("pattern", [False, True], ids=["weighted", "pattern"])
@pytest.mark.parametrize("name", MATRICES)
def test_a_matrix_in_memory_is_multiplied_in_panels(device, name, pattern):
    csr = csr_of(MATRICES[name], pattern=pattern)
    plan = stream_plan(csr, device=device, panel_bytes=SMALL)
    B = operand(csr.shape[1], device)
    for _ in range(2):  # the second finds both buffers used
        assert_close(plan @ B, csr.to(device), B)
    assert plan.nnz == csr.nnz and plan.in_memory
    rows = 8 * (plan.shape[0] + plan.panels) + 3 * 16 * plan.panels
    assert plan.bytes <= rows + csr.nnz * (4 if pattern else 8)
    if name == "random":
        assert plan.panels > csr.nnz * (4 if pattern else 8) // SMALL


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_every_reduction_and_type(device, reduce, dtype):
    csr = csr_of(MATRICES["random"], dtype=dtype)
    plan, B = stream_plan(csr, device=device, panel_bytes=SMALL), operand(150, device, dtype)
    found, expected = plan.run(B, reduce=reduce), st.spmm(csr.to(device), B, reduce)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("in_memory", [None, True], ids=["disk", "memory"])
@pytest.mark.parametrize("order", ["auto", "even", "rcm"])
@pytest.mark.parametrize("parts", [1, 4])
def test_a_folder_of_parts_is_read_as_one_matrix(device, tmp_path, parts, order, in_memory):
    csr = csr_of(MATRICES["random"])
    write_folder(csr, parts, tmp_path / "parts", partition=order)
    plan = stream_plan(tmp_path / "parts", device=device, panel_bytes=SMALL, in_memory=in_memory)
    assert plan.shape == csr.shape and plan.in_memory is bool(in_memory)
    B = operand(150, device)
    for _ in range(2):
        assert_close(plan @ B, csr.to(device), B)
    assert ("in memory" if in_memory else "on disk") in repr(plan)


def test_the_gradient_is_that_of_a_plan(device):
    csr = csr_of(MATRICES["dense row"], dtype=torch.float64)
    plan = stream_plan(csr, device=device, panel_bytes=SMALL)
    B = operand(csr.shape[1], device, torch.float64).requires_grad_()
    other = B.detach().clone().requires_grad_()
    G = operand(csr.shape[0], device, torch.float64)
    (plan @ B).backward(G)
    (st.plan(csr.to(device), n=9) @ other).backward(G)
    torch.testing.assert_close(B.grad, other.grad)
    assert plan.T is plan.T and plan.T.shape == (700, 90)
    assert torch.autograd.gradgradcheck(
        lambda x: (plan @ x) ** 2, B.detach()[:, :1].requires_grad_()
    )


def test_the_gradient_of_a_folder_reads_a_folder_of_the_transpose(device, tmp_path):
    csr = csr_of(MATRICES["random"], dtype=torch.float64)
    write_folder(csr, 2, tmp_path / "a")
    write_folder(csr.transposed(), 3, tmp_path / "t")
    plan = stream_plan(tmp_path / "a", transpose=tmp_path / "t", device=device, panel_bytes=SMALL)
    B = operand(150, device, torch.float64).requires_grad_()
    (plan @ B).sum().backward()
    assert_close(B.grad, csr.transposed().to(device), torch.ones_like(B))
    alone = stream_plan(tmp_path / "a", device=device, panel_bytes=SMALL)
    C = alone @ B
    with pytest.raises(ValueError, match="stream_plan: transpose must be a folder of Aᵀ for grad"):
        C.sum().backward()


def test_panels_may_hold_fewer_entries_than_a_launch_numbers(monkeypatch):
    monkeypatch.setenv("SPARSETILE_ENTRY_LIMIT", "60")
    csr = csr_of(MATRICES["random"])
    plan, B = stream_plan(csr, device="cpu"), operand(150, torch.device("cpu"))
    assert plan.panels >= csr.nnz // 60
    assert_close(plan @ B, csr, B)


def test_a_damaged_part_is_refused(tmp_path):
    write_folder(csr_of(MATRICES["random"]), 2, tmp_path)
    (tmp_path / "part-00001.npz").write_bytes(b"other")
    with pytest.raises(st.DataError, match=r"^stream_plan: "):
        stream_plan(tmp_path, device="cpu")


@pytest.mark.parametrize(
    "options, kind, message",
    [
        ({"panel_bytes": 10}, ValueError, "panel_bytes must be 64 or more, got 10. Omit it for 64"),
        ({"panel_bytes": 2.5}, ValueError, "panel_bytes must be a whole number, got 2.5. "),
        ({"dtype": torch.int32}, TypeError, "dtype must be one of .*, got torch.int32. "),
        ({"in_memory": False}, ValueError, "in_memory must be True or None for a matrix that is "),
    ],
)
def test_wrong_arguments_are_refused(options, kind, message):
    with pytest.raises(kind, match=f"^stream_plan: {message}"):
        stream_plan(csr_of(MATRICES["random"]), device="cpu", **options)


@pytest.mark.parametrize(
    "B, options, message",
    [
        (torch.zeros(7, 2), {}, r"B must be a tensor of shape \[150, N\], got \(7, 2\)\. Pass one"),
        (3, {}, r"B must be a tensor of shape \[150, N\], got int\. "),
        (torch.zeros(150, 2).double(), {}, "B must be torch.float32 on cpu, got torch.float64 on "),
        (torch.zeros(150, 2, requires_grad=True), {"reduce": "max"}, "reduce must be 'sum' if B "),
    ],
)
def test_wrong_operands_are_refused(B, options, message):
    plan = stream_plan(csr_of(MATRICES["random"]), device="cpu")
    assert isinstance(plan, StreamedPlan)
    with pytest.raises(ValueError, match=f"^run: {message}"):
        plan.run(B, **options)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
def test_products_on_two_streams_share_the_buffers():
    csr = csr_of(random_matrix(2000, 2000, 0.05))
    plan = stream_plan(csr, device="cuda", panel_bytes=2**14)
    operands = [operand(2000, torch.device("cuda")) for _ in range(6)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    found = []
    torch.cuda.synchronize()
    for number, B in enumerate(operands):
        with torch.cuda.stream(streams[number % 2]):
            found.append(plan @ B)
    torch.cuda.synchronize()
    for B, C in zip(operands, found, strict=True):
        assert_close(C, csr.to("cuda"), B)


def test_the_folder_s_path_is_not_taken_for_a_matrix_file(tmp_path: Path):
    with pytest.raises((ValueError, st.DataError, OSError, TypeError)):
        stream_plan(tmp_path, device="cpu")

"""What every system must do, on every device it runs on. A system joins by being registered."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

import sparsetile as st
from sparsetile.engines.request import Request
from sparsetile.reorder import Permutation
from tests.conftest import DEVICES
from tests.contracts.cases import (
    DTYPES,
    MATRICES,
    assert_close,
    csr_of,
    error_bound,
    random_matrix,
    reference,
    tf32,
    with_dense_row,
)
from tests.contracts.subjects import PIECE_ENTRIES, Subject, in_pieces, subjects

WIDTHS = (0, 1, 7, 32, 130)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every system on every device. A host takes up its own systems alone: others would be skipped.

    The GPU's cases are all there, whichever machine lists them: its record names them.
    """
    if "device" not in metafunc.fixturenames:
        return
    pairs, ids = [], []
    for subject, (kind, marks) in itertools.product([*subjects(), *in_pieces()], kinds()):
        if kind == "cuda" or kind in subject.system.devices:
            pairs.append(pytest.param(subject, kind, marks=marks))
            ids.append(f"{subject}-{kind}")
    metafunc.parametrize(("system", "device"), pairs, ids=ids, indirect=True)


def kinds() -> list[tuple[str, Sequence[pytest.MarkDecorator | pytest.Mark]]]:
    """Device types with the marks of their cases."""
    return [
        (each, ()) if isinstance(each, str) else (each.values[0], each.marks) for each in DEVICES
    ]


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")


@pytest.fixture
def system(
    request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Subject]:
    subject: Subject = request.param
    if subject.pieces:
        monkeypatch.setenv("SPARSETILE_ENTRY_LIMIT", str(PIECE_ENTRIES))
    if device.type not in subject.system.devices:
        pytest.skip(f"{subject} does not run on {device.type}")
    if device.type == "cuda":
        tiny = csr_of(random_matrix(2, 2, 1.0)).to(device)
        wanted = Request(tiny, 8, subject.element, Permutation("identity", None))
        for reason in subject.system.further_reasons(wanted):
            if reason.startswith("needs "):
                pytest.skip(f"{subject} {reason}")
    with tf32(subject.system.rounds_to_tf32):
        yield subject


@pytest.fixture
def element(system: Subject) -> torch.dtype:
    """What the tests that are not about types multiply in."""
    return system.element


def needs(system: Subject, dtype: torch.dtype) -> None:
    if dtype not in system.system.dtypes:
        pytest.skip(f"{system} does not take {dtype}")


def dense_like(rows: int, cols: int, device: torch.device, dtype=torch.float32) -> Tensor:
    return torch.randn(rows, cols, dtype=torch.float64).to(dtype).to(device)


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("pattern", [False, True], ids=["weighted", "pattern"])
def test_agrees_with_float64_within_rounding(system, element, device, name, pattern):
    csr = csr_of(MATRICES[name](), pattern=pattern, dtype=element).to(device)
    plan = system.plan(csr, 32, dtype=element)
    for n in WIDTHS:
        B = dense_like(csr.shape[1], n, device, element)
        assert_close(plan @ B, csr, B)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 7, 64, 1000])
def test_takes_every_dtype_and_width(system, device, dtype, n):
    needs(system, dtype)
    csr = csr_of(random_matrix(100, 300, 0.1), dtype=dtype).to(device)
    B = dense_like(300, n, device, dtype)
    C = system.plan(csr, n) @ B
    assert C.dtype is dtype
    assert_close(C, csr, B)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_small_integers_match_bit_for_bit(system, device, dtype):
    needs(system, dtype)
    matrix = with_dense_row(90, 600, 4)
    matrix.data[:] = torch.randint(-3, 4, (matrix.nnz,)).numpy()
    csr = csr_of(matrix, dtype=dtype).to(device)
    B = torch.randint(0, 2, (600, 33)).to(dtype).to(device)
    expected = reference(csr, B)
    exact = expected.abs() <= 256  # integers that bfloat16 holds
    C = (system.plan(csr, 33) @ B).cpu().double()
    assert torch.equal(C[exact], expected[exact])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_non_finite_values_of_B_reach_only_rows_that_reference_them(system, device, dtype):
    needs(system, dtype)
    csr = csr_of(random_matrix(150, 200, 0.05), dtype=dtype).to(device)
    B = dense_like(200, 40, device, dtype)
    B[0], B[17, 5], B[80, 39] = float("nan"), float("inf"), -float("inf")
    expected = reference(csr, B)
    C = (system.plan(csr, 40) @ B).cpu().double()
    assert torch.equal(C.isnan(), expected.isnan())
    assert torch.equal(C.isinf(), expected.isinf())
    assert torch.equal(C[C.isinf()], expected[expected.isinf()])
    finite = expected.isfinite()
    bound = error_bound(csr, B.nan_to_num(posinf=0, neginf=0), expected)
    assert bool(((C - expected).abs() <= bound)[finite].all())


def test_non_finite_values_of_A_act_as_in_csr_arithmetic(system, element, device):
    csr = csr_of(random_matrix(60, 50, 0.1), dtype=element).to(device)
    csr.values[3], csr.values[11], csr.values[40] = float("inf"), float("nan"), 0.0
    B = dense_like(50, 9, device, element)
    B[int(csr.indices[40]), 2] = float("inf")  # a stored zero times Inf is NaN
    expected = reference(csr, B)
    C = (system.plan(csr, 9) @ B).cpu().double()
    assert torch.equal(C.isnan(), expected.isnan())
    assert torch.equal(C.isinf(), expected.isinf())


def _strided(B: Tensor, how: str) -> Tensor:
    rows, cols = B.shape
    if how == "row stride":
        wide = torch.full((rows, cols + 5), float("nan"), dtype=B.dtype, device=B.device)
        wide[:, :cols] = B
        return wide[:, :cols]
    if how == "transposed":
        return B.t().contiguous().t()
    if how == "misaligned":
        flat = torch.full((rows * cols + 1,), float("nan"), dtype=B.dtype, device=B.device)
        flat[1:] = B.flatten()
        return flat[1:].view(rows, cols)
    if how == "every other column":
        wide = torch.full((rows, 2 * cols), float("nan"), dtype=B.dtype, device=B.device)
        wide[:, ::2] = B
        return wide[:, ::2]
    return B[:1].expand(rows, cols)  # "expanded"


@pytest.mark.parametrize(
    "how", ["row stride", "transposed", "misaligned", "every other column", "expanded"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_takes_any_stride_of_B(system, device, how, dtype):
    needs(system, dtype)
    csr = csr_of(random_matrix(70, 64, 0.1), dtype=dtype).to(device)
    B = _strided(dense_like(64, 40, device, dtype), how)
    assert_close(system.plan(csr, 40) @ B, csr, B)


def test_writes_into_out_with_alpha_and_beta(system, element, device):
    csr = csr_of(random_matrix(70, 64, 0.1), dtype=element).to(device)
    plan, B = system.plan(csr, 24), dense_like(64, 24, device, element)
    plain = plan @ B
    # Atomic additions have another order each time: sums that cancel differ by more.
    close = torch.allclose if system.repeats else system.same
    out = torch.full((70, 24), float("nan"), device=device, dtype=element)
    assert plan.run(B, out=out) is out
    assert close(out, plain)
    before = dense_like(70, 24, device, element)
    out = before.clone()
    plan.run(B, out=out, alpha=2.0, beta=-0.5)
    wanted = 2 * plain.double() - 0.5 * before.double()
    bound = torch.finfo(element).eps * (2 * plain.abs() + 0.5 * before.abs() + wanted.abs())
    if system.repeats:
        assert bool(((out.double() - wanted).abs() <= bound).all())
    else:
        assert system.same(out, wanted.to(element))
    wide = torch.full((70, 50), 7.0, device=device, dtype=element)
    plan.run(B, out=wide[:, :24])
    assert close(wide[:, :24], plain)
    assert bool((wide[:, 24:] == 7.0).all()), "columns beyond out were written"
    columns = torch.empty((24, 70), device=device, dtype=element).t()
    assert close(plan.run(B, out=columns), plain)


@pytest.mark.parametrize("lead", [(3,), (2, 3), (0,), (1, 1)], ids=str)
def test_leading_dimensions_are_batches(system, element, device, lead):
    csr = csr_of(with_dense_row(40, 900, 3), dtype=element).to(device)
    B = torch.randn(*lead, 900, 12, device=device).to(element)
    C = system.plan(csr, 12) @ B
    assert C.shape == (*lead, 40, 12)
    for index in range(B[..., 0, 0].numel()):
        at = torch.unravel_index(torch.tensor(index), lead)
        assert_close(C[at], csr, B[at])


@pytest.mark.parametrize("reduce", ["mean", "max", "min", "amax", "add"])
def test_reduces_rows_as_told_and_gives_zero_for_empty_ones(system, element, device, reduce):
    csr = csr_of(with_dense_row(60, 1500, 9), dtype=element).to(device)
    B = dense_like(1500, 20, device, element)
    C = system.plan(csr, 20).run(B, reduce=reduce).cpu().double()
    rows, columns = csr.row_ids().cpu(), csr.indices.cpu().long()
    products = csr.values.cpu().double().unsqueeze(1) * B.cpu().double()[columns]
    lengths = csr.row_lengths().cpu()
    bound = error_bound(csr, B, reference(csr, B))
    for row in range(60):
        mine = products[rows == row]
        if not lengths[row]:
            assert not bool(C[row].any())
            continue
        expected = {
            "mean": mine.mean(0), "max": mine.amax(0), "amax": mine.amax(0),
            "min": mine.amin(0), "add": mine.sum(0),
        }[reduce]  # fmt: skip
        allowed = bound[row] / lengths[row] if reduce == "mean" else bound[row]
        allowed = allowed + torch.finfo(element).eps * expected.abs()  # a single product, rounded
        assert bool(((C[row] - expected).abs() <= allowed).all())


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_gradients_of_B_and_of_the_values_are_right(system, device, reduce):
    needs(system, torch.float64)
    csr = csr_of(random_matrix(17, 23, 0.2), dtype=torch.float64).to(device)
    plan = system.plan(csr, 5)
    values = csr.values.clone().requires_grad_()
    B = torch.randn(23, 5, dtype=torch.float64, device=device, requires_grad=True)
    product = lambda v, b: plan.run(b, values=v, reduce=reduce, alpha=1.5)  # noqa: E731
    assert torch.autograd.gradcheck(product, (values, B))
    if reduce == "sum":
        assert torch.autograd.gradgradcheck(product, (values, B))


def test_gradients_are_those_of_the_entries_within_rounding(system, element, device):
    csr = csr_of(with_dense_row(90, 700, 4), dtype=element).to(device)
    plan = system.plan(csr, 24)
    values = csr.values.clone().requires_grad_()
    B, G = dense_like(700, 24, device, element), dense_like(90, 24, device, element)
    B.requires_grad_()
    plan.run(B, values=values).backward(G)
    assert_close(B.grad, csr.transposed(), G)
    rows, columns = csr.row_ids().cpu(), csr.indices.cpu().long()
    products = G.cpu().double()[rows] * B.detach().cpu().double()[columns]
    bound = 26 * torch.finfo(torch.float32).eps * products.abs().sum(1)
    bound += torch.finfo(element).eps * products.sum(1).abs()
    assert bool(((values.grad.cpu().double() - products.sum(1)).abs() <= bound).all())


def test_batched_gradients_add_up_over_the_batch(system, device):
    needs(system, torch.float64)
    csr = csr_of(random_matrix(9, 11, 0.3), dtype=torch.float64).to(device)
    plan = system.plan(csr, 4)
    values = csr.values.clone().requires_grad_()
    B = torch.randn(3, 11, 4, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v, b: plan.run(b, values=v), (values, B))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_runs_in_its_precision_and_gives_gradients_in_that_of_B(
    system, element, device, dtype
):
    needs(system, dtype)
    csr = csr_of(random_matrix(40, 60, 0.1), dtype=element).to(device)
    plan = system.plan(csr, 16)
    B = torch.randn(60, 16, device=device).to(element).requires_grad_()
    with torch.autocast(device.type, dtype=dtype):
        C = plan @ B
    assert C.dtype is dtype
    low = csr.with_values(csr.values.to(dtype))
    assert_close(C, low, B.detach().to(dtype))
    C.float().sum().backward()
    assert B.grad.dtype is element
    expected = reference(low.transposed(), torch.ones(40, 16))
    assert torch.allclose(B.grad.cpu().double(), expected, rtol=2e-2, atol=2e-2)


def test_a_hundred_runs_are_bit_identical_when_asked(system, element, device):
    if not system.repeats:
        pytest.skip(f"{system} does not promise reproducible bits")
    csr = csr_of(with_dense_row(300, 9000, 100), dtype=element).to(device)
    plan = system.plan(csr, 40, deterministic=True)
    B = dense_like(9000, 40, device, element)
    first = plan @ B
    for _ in range(99):
        assert torch.equal(plan @ B, first)


def test_updated_values_are_used_at_once_by_product_and_transpose(system, element, device):
    csr = csr_of(random_matrix(50, 40, 0.1), dtype=element).to(device)
    plan, B, G = (
        system.plan(csr, 8),
        dense_like(40, 8, device, element),
        dense_like(50, 8, device, element),
    )
    assert_close(plan.T @ G, csr.transposed(), G)
    fresh = torch.randn(csr.nnz, device=device).to(element)
    assert plan.update_values(fresh) is plan
    assert_close(plan @ B, csr.with_values(fresh), B)
    assert_close(plan.T @ G, csr.with_values(fresh).transposed(), G)
    fresh.zero_()
    assert float((plan @ B).abs().max()) > 0, "the plan must hold a copy"


def test_transpose_of_transpose_is_the_matrix(system, element, device):
    csr = csr_of(random_matrix(50, 40, 0.1), dtype=element).to(device)
    B = dense_like(40, 8, device, element)
    assert_close(system.plan(csr, 8).T.T @ B, csr, B)


def test_saved_plan_gives_the_same_bits(system, element, device, tmp_path):
    csr = csr_of(with_dense_row(80, 2000, 5), dtype=element).to(device)
    plan, B = system.plan(csr, 16), dense_like(2000, 16, device, element)
    plan.save(tmp_path / "a.safetensors")
    loaded = st.load_plan(tmp_path / "a.safetensors")
    assert loaded.system == system.name
    G = dense_like(80, 16, device, element)
    assert system.same(loaded @ B, plan @ B)
    assert system.same(loaded.T @ G, plan.T @ G)


def test_compiles_without_graph_breaks(system, element, device):
    torch._dynamo.reset()  # one function is compiled eight times at most
    csr = csr_of(random_matrix(50, 40, 0.1), dtype=element).to(device)
    plan = system.plan(csr, 8)
    layer = torch.compile(lambda b: torch.relu(plan @ b) * 2, fullgraph=True, backend="aot_eager")
    B = torch.randn(40, 8, device=device).to(element).requires_grad_()
    C = layer(B)
    assert torch.allclose(C, torch.relu(plan @ B) * 2)
    C.sum().backward()
    compiled, B.grad = B.grad, None
    (torch.relu(plan @ B) * 2).sum().backward()
    assert torch.allclose(compiled, B.grad)


def test_operators_pass_opcheck(system, element, device):
    dtype = torch.float64 if torch.float64 in system.system.dtypes else element
    csr = csr_of(random_matrix(20, 15, 0.2), dtype=dtype).to(device)
    plan = system.plan(csr, 4)
    plan.flat_with_transpose()
    values = csr.values.clone().requires_grad_()
    B = torch.randn(15, 4, dtype=dtype, device=device, requires_grad=True)
    G = torch.randn(20, 4, dtype=dtype, device=device, requires_grad=True)
    ops, tensors, recipe = torch.ops.sparsetile, plan.flat[0], plan.flat[1]
    bias = torch.randn(4, dtype=dtype, device=device, requires_grad=True)
    for relu in (False, True):
        arguments = (tensors, values, [], B, bias, recipe, "sum", 1.0, relu, None)
        torch.library.opcheck(ops.spmm.default, arguments)
    torch.library.opcheck(ops.sddmm.default, (tensors, G, B, recipe, 0.5))
    extremum = tensors, values, B, recipe, "max", True
    torch.library.opcheck(ops.spmm_extremum.default, extremum)
    _, places = ops.spmm_extremum(*extremum)
    torch.library.opcheck(ops.spmm_won.default, (tensors, values, G, places, recipe))
    plain = (tensors, values.detach(), [], B.detach(), G.detach(), recipe, "sum", 1.0, 0.5)
    torch.library.opcheck(ops.spmm_out.default, plain)


def test_runs_under_inference_mode(system, element, device):
    csr = csr_of(random_matrix(30, 25, 0.2), dtype=element).to(device)
    plan, B = system.plan(csr, 6), dense_like(25, 6, device, element)
    with torch.inference_mode():
        C = plan @ B.clone()
    assert_close(C, csr, B)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_adds_a_bias_and_clips_below_zero_in_the_same_product(system, device, dtype):
    needs(system, dtype)
    csr = csr_of(with_dense_row(50, 700, 6), dtype=dtype).to(device)
    plan, B = system.plan(csr, 20), dense_like(700, 20, device, dtype)
    bias = torch.randn(20, device=device)
    plain = reference(csr, B)
    expected = torch.relu(plain * 0.5 + bias.cpu().double())
    C = plan.run(B, alpha=0.5, bias=bias, relu=True)
    assert C.dtype is dtype
    unit = torch.finfo(dtype).eps
    bound = 0.5 * error_bound(csr, B, plain) + unit * (expected.abs() + bias.cpu().double().abs())
    assert bool(((C.cpu().double() - expected).abs() <= bound).all())
    assert bool((C >= 0).all())


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("relu", [False, True])
def test_gradients_flow_through_bias_and_relu(system, device, reduce, relu):
    needs(system, torch.float64)
    csr = csr_of(random_matrix(12, 14, 0.3), dtype=torch.float64).to(device)
    plan = system.plan(csr, 3)
    values = csr.values.clone().requires_grad_()
    B = torch.randn(2, 14, 3, dtype=torch.float64, device=device, requires_grad=True)
    bias = torch.randn(3, dtype=torch.float64, device=device, requires_grad=True)

    def product(v, b, c):
        return plan.run(b, values=v, bias=c, relu=relu, reduce=reduce)

    assert torch.autograd.gradcheck(product, (values, B, bias))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [7, 64, 200])
def test_sixteen_bit_input_may_come_out_as_float32(system, device, dtype, n):
    needs(system, dtype)
    csr = csr_of(with_dense_row(80, 900, 6), dtype=dtype).to(device)
    plan = system.plan(csr, n)
    B = dense_like(900, n, device, dtype).requires_grad_()
    C = plan.run(B, out_dtype=torch.float32)
    assert C.dtype is torch.float32
    expected = reference(csr, B.detach())
    magnitude = reference(csr.with_values(csr.values.abs()), B.detach().abs())
    lengths = csr.row_lengths().cpu().double().unsqueeze(1)
    bound = (lengths + 2) * torch.finfo(torch.float32).eps * magnitude + 1e-30
    assert bool(((C.detach().cpu().double() - expected).abs() <= bound).all())
    C.sum().backward()
    assert B.grad.dtype is dtype

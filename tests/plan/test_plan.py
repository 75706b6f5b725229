"""Products of a plan: what is refused and in which words, and what a plan says of itself."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import sparsetile as st
from sparsetile.reorder import REORDERERS
from sparsetile.systems.registry import SYSTEMS
from tests.contracts.cases import assert_close, csr_of, random_matrix
from tests.plans import MATRIX, dense, made, said, variant_of


@pytest.mark.parametrize("B", [None, 3, [[1.0]]], ids=lambda b: str(type(b)))
def test_an_operand_that_is_no_tensor_is_refused(B):
    assert said(TypeError, lambda: made().run(B)) == (
        f"run: B must be a torch tensor, got {type(B).__name__}. Convert it with torch.as_tensor."
    )


@pytest.mark.parametrize("shape", [(), (4, 20), (19, 4), (2, 4, 20)])
def test_an_operand_of_another_shape_is_refused(shape):
    assert said(ValueError, lambda: made() @ torch.ones(shape)) == (
        f"run: B must be of shape [..., 20, N], got {shape}. "
        "A is 30x20: B needs one row per column of A."
    )


def test_an_operand_on_another_device_is_refused():
    assert said(ValueError, lambda: made() @ dense(device="meta")) == (
        "run: B must be on cpu like the plan, got meta. "
        "Move it with B.to('cpu'), or plan with A on B's device."
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64, torch.bool], ids=str)
def test_an_operand_of_another_type_is_refused(dtype):
    remedy = "Cast it with B.to(torch.float32)"
    if dtype.is_floating_point:
        remedy += f", or make a plan with dtype={dtype}"
    assert said(TypeError, lambda: made() @ torch.ones(20, 4, dtype=dtype)) == (
        f"run: B must be torch.float32 like the plan, got {dtype}. {remedy}."
    )


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("convert", ["to_sparse", "to_sparse_csr"])
def test_a_sparse_operand_is_refused(convert):
    B = getattr(dense(), convert)()
    assert said(TypeError, lambda: made() @ B) == (
        f"run: B must be a dense tensor, got {B.layout}. Call B.to_dense()."
    )


def test_an_unknown_reduction_is_refused():
    assert said(ValueError, lambda: made().run(dense(), reduce="prod")) == (
        "run: reduce must be one of ['sum', 'mean', 'max', 'min'], got 'prod'. "
        "Choose a name from that list."
    )


def test_beta_without_out_is_refused():
    assert said(ValueError, lambda: made().run(dense(), beta=0.5)) == (
        "run: beta must be 0 when out is not given, got 0.5. Pass out=."
    )


def test_an_out_that_is_no_tensor_is_refused():
    assert said(TypeError, lambda: made().run(dense(), out=[0.0])) == (
        "run: out must be a torch tensor, got list. Pass a tensor."
    )


@pytest.mark.parametrize(
    "out", [torch.empty(20, 4), torch.empty(30, 4, dtype=torch.float64), torch.empty(1, 30, 4)]
)
def test_an_out_of_another_shape_or_type_is_refused(out):
    assert said(ValueError, lambda: made().run(dense(), out=out)) == (
        "run: out must be torch.float32 of shape (30, 4) on cpu, got "
        f"{out.dtype} of shape {tuple(out.shape)} on cpu. "
        "Allocate it with torch.empty, or omit out=."
    )


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_an_out_for_an_extremum_is_refused(reduce):
    assert said(ValueError, lambda: made().run(dense(), out=torch.empty(30, 4), reduce=reduce)) == (
        f"run: reduce must be sum or mean when out is given, got {reduce}. Omit out=."
    )


def test_an_out_in_the_way_of_gradients_is_refused():
    B, out = dense(requires_grad=True), torch.empty(30, 4)
    assert said(ValueError, lambda: made().run(B, out=out)) == (
        "run: out must be omitted when gradients are needed, got a tensor. "
        "Omit out=, or run under torch.no_grad()."
    )
    with torch.no_grad():
        assert made().run(B, out=out) is out


@pytest.mark.parametrize(
    "extra", [{"bias": torch.ones(4)}, {"relu": True}, {"out_dtype": torch.float32}]
)
@pytest.mark.parametrize(
    "why, given",
    [("out=", {"out": torch.empty(30, 4)}), ("reduce=max", {"reduce": "amax"})],
    ids=["out", "max"],
)
def test_what_is_fused_into_a_sum_is_refused_elsewhere(extra, why, given):
    assert said(ValueError, lambda: made().run(dense(), **given, **extra)) == (
        "run: bias, relu and out_dtype must be omitted with out=, max or min, "
        f"got {why}. Apply them to the result instead."
    )


@pytest.mark.parametrize("bias", [torch.ones(3), torch.ones(1, 4), torch.ones(4, device="meta")])
def test_a_bias_of_another_shape_or_device_is_refused(bias):
    assert said(ValueError, lambda: made().run(dense(), bias=bias)) == (
        f"run: bias must be of shape (4,) on cpu, got {tuple(bias.shape)} on {bias.device}. "
        "Give one number per column of B."
    )


@pytest.mark.parametrize(
    "dtype, out_dtype",
    [
        (torch.float32, torch.float16),
        (torch.float16, torch.bfloat16),
        (torch.float32, torch.int32),
    ],
)
def test_a_result_of_a_type_that_would_lose_digits_is_refused(dtype, out_dtype):
    plan, B = made(dtype=dtype), dense().to(dtype)
    assert said(TypeError, lambda: plan.run(B, out_dtype=out_dtype)) == (
        f"run: out_dtype must be {dtype} or torch.float32, got {out_dtype}. "
        "Cast the result instead."
    )


@pytest.mark.parametrize("lead", [(2, 3), (2, 0), (0, 3)], ids=str)
@pytest.mark.parametrize("n", [0, 4])
def test_batches_may_be_empty_and_so_may_their_matrices(lead, n):
    plan = made()
    B = torch.randn(*lead, 20, n)
    assert (plan @ B).shape == (*lead, 30, n)
    out = torch.empty(*lead, 30, n)
    assert plan.run(B, out=out) is out


def test_a_plan_on_the_right_of_a_product_is_a_mistake():
    for left in (dense(4, 30), 3):
        assert said(TypeError, lambda left=left: left @ made()) == (
            f"plan: operands must be plan @ B, got {type(left).__name__} @ plan. "
            "Write plan @ B, or plan.T for the transpose."
        )
    assert said(TypeError, lambda: torch.mm(made(), dense())) == (
        "plan: operands must be plan @ B, got mm of 2 arguments. "
        "Write plan @ B, or plan.T for the transpose."
    )


def test_a_plan_times_something_that_is_no_tensor_is_refused():
    with pytest.raises(TypeError, match=r"run: B must be a torch tensor, got str\."):
        made() @ "B"


def test_info_is_plain_data_about_everything_that_was_decided():
    plan = made(system="cpu")
    info = plan.info
    assert info["shape"] == [30, 20] and info["nnz"] == MATRIX.nnz and info["n"] == 4
    assert (info["dtype"], info["device"], info["system"]) == ("float32", "cpu", "cpu")
    assert info["weighted"] is True and info["reorder"] == "identity"
    assert info["format_bytes"] == sum(
        part.numel() * part.element_size() for part in plan._variant.built.tensors.values()
    )
    assert list(info["seconds"]) == ["intake", "reorder", "build", "compile"]
    assert all(seconds >= 0 for seconds in info["seconds"].values())
    assert list(info["build"]) == ["format", "schedule"]
    assert 0 < sum(info["build"].values()) <= info["seconds"]["build"]
    assert info["rejected"] == {}, "systems of other devices are not asked"
    assert json.loads(json.dumps(info)) == info


def test_a_plan_s_own_text_says_what_it_is():
    assert repr(made(system="cpu")) == (
        f"Plan(30x20, {MATRIX.nnz} entries, weighted, n=4, float32, cpu, system=cpu)"
    )
    pattern = st.plan(csr_of(MATRIX, pattern=True), 4, system="dense")
    assert "pattern, n=4, float32, cpu, system=dense)" in repr(pattern)


def test_the_transpose_is_planned_once_and_kept():
    plan = made()
    assert plan.T is plan.T
    assert plan.T.shape == (20, 30) and plan.T.T.shape == (30, 20)


@pytest.fixture
def ordered_cpu(monkeypatch):
    """The cpu system as one that visits rows in the plan's order."""
    monkeypatch.setattr(type(SYSTEMS["cpu"]), "ordered", True)


@pytest.mark.parametrize("order", ["rcm", "lsh", "affinity"])
def test_the_transpose_is_ordered_as_the_plan_is(ordered_cpu, order):
    csr = csr_of(MATRIX)
    transposed = made(system="cpu", reorder=order).T
    assert transposed.reorder == order
    expected = REORDERERS[order](csr.transposed())
    assert torch.equal(transposed._variant.permutation.perm, expected.perm)
    G = torch.randn(30, 4)
    assert_close(transposed @ G, csr.transposed(), G)


def test_a_symmetric_pattern_keeps_its_order_for_the_transpose(ordered_cpu, monkeypatch):
    half = random_matrix(25, 25, 0.1)
    csr = csr_of(half + half.T)
    plan = st.plan(csr, 4, system="cpu", reorder="rcm")
    monkeypatch.setitem(REORDERERS, "rcm", None)  # not called again
    assert plan.T._variant.permutation is plan._variant.permutation


def test_rows_given_by_number_order_the_plan_alone(ordered_cpu):
    plan = made(system="cpu", reorder=torch.randperm(30))
    assert plan.reorder == "given" and plan.T.reorder == "identity"


def test_a_system_that_takes_rows_as_they_come_orders_no_transpose():
    assert made(system="cpu", reorder="rcm").T.reorder == "identity"


def test_a_result_may_share_memory_with_B():
    csr = csr_of(random_matrix(40, 40, 0.2))
    plan, B = st.plan(csr, 8), torch.randn(40, 8)
    expected = plan @ B
    assert torch.equal(plan.run(B, out=B), expected)
    wide = torch.randn(40, 16)
    expected = plan @ wide[:, :8]
    assert torch.equal(plan.run(wide[:, :8], out=wide[:, 8:]), expected)


def test_a_result_of_several_batch_dimensions_may_have_any_strides():
    csr = csr_of(random_matrix(12, 10, 0.4))
    plan, B = st.plan(csr, 6), torch.randn(2, 3, 10, 6)
    out = torch.zeros(3, 2, 12, 6).transpose(0, 1)
    assert torch.equal(plan.run(B, out=out, beta=0.5), plan @ B)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_missing_gpu_is_named():
    csr = csr_of(random_matrix(4, 3, 0.5))
    text = r"plan: device must be a device of this machine, got cuda where there is no GPU\."
    with pytest.raises(ValueError, match=text):
        st.plan(csr, 2, device="cuda")


def test_a_nonsense_device_and_a_float_order_are_refused():
    csr = csr_of(random_matrix(4, 3, 0.5))
    with pytest.raises(ValueError, match=r"plan: device must be a device such as cpu or cuda:0"):
        st.plan(csr, 2, device="nonsense")
    with pytest.raises(
        TypeError, match=r"plan: reorder must be whole row numbers, got torch.float"
    ):
        st.plan(csr, 2, reorder=torch.tensor([0.0, 1.0, 2.0, 3.0]))


@pytest.mark.parametrize("name", ["alpha", "beta"])
@pytest.mark.parametrize("given", ["two", None, 1j, [1.0]], ids=str)
def test_a_scale_that_is_no_number_is_refused(name, given):
    options = {name: given, "out": torch.zeros(30, 4)}
    assert said(TypeError, lambda: made().run(dense(), **options)) == (
        f"run: {name} must be a number, got {given!r}. Pass a float."
    )


def test_a_scale_without_out_and_of_a_layer_is_checked_too():
    text = "alpha must be a number, got 'two'. Pass a float."
    assert said(TypeError, lambda: made().run(dense(), alpha="two")) == f"run: {text}"
    assert said(TypeError, lambda: made().linear(dense(3, 20), alpha="two")) == f"linear: {text}"


@pytest.mark.parametrize("alpha", [2, np.float32(2), torch.tensor(2.0), np.int64(2)], ids=repr)
def test_a_scale_of_any_kind_of_number_is_taken(alpha):
    B = dense()
    assert torch.equal(made().run(B, alpha=alpha), made().run(B, alpha=2.0))


def test_a_scale_that_requires_grad_is_refused():
    alpha = torch.tensor(2.0, requires_grad=True)
    assert said(TypeError, lambda: made().run(dense(), alpha=alpha)) == (
        "run: alpha must be a number without a gradient, got a tensor that requires grad. "
        "Multiply the result by it instead."
    )


@pytest.mark.parametrize(
    "bias, text",
    [
        ([1.0] * 4, "a torch tensor, got list. Convert it with torch.as_tensor."),
        (
            torch.ones(4, dtype=torch.complex64),
            "a dense tensor of real numbers, got torch.complex64, torch.strided. Convert it first.",
        ),
    ],
    ids=["list", "complex"],
)
def test_a_bias_that_is_no_tensor_of_real_numbers_is_refused(bias, text):
    assert said(TypeError, lambda: made().run(dense(), bias=bias)) == f"run: bias must be {text}"


def test_relu_is_true_or_false():
    assert said(TypeError, lambda: made().run(dense(), relu="yes")) == (
        "run: relu must be True or False, got 'yes'. Pass relu=True."
    )


class Noted:
    """A bound product that notes what it is called with."""

    def __init__(self, result: torch.Tensor) -> None:
        self.result = result
        self.plain: list[torch.Tensor] = []
        self.fusions: list[tuple] = []

    def __call__(self, B: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        self.plain.append(B)
        return self.result

    def fused(self, B, bias, alpha, mean, relu):
        self.fusions.append((B, bias, alpha, mean, relu))
        return self.result


def test_the_short_path_is_for_plain_scales_and_columns_side_by_side(monkeypatch):
    plan, B = made(system="cpu"), dense()
    expected = plan @ B
    bound = Noted(expected)
    variant_of(plan).bound = bound
    for taken in (B, dense(20, 9)[:, :4], dense(1, 20).T):
        plan @ taken
        assert bound.plain[-1] is taken
    assert torch.equal(plan.run(B, alpha=torch.tensor(1.0)), expected)
    assert len(bound.plain) == 3
    plan @ B.T.contiguous().T
    assert bound.plain[-1].is_contiguous() and torch.equal(bound.plain[-1], B), "a copy"
    monkeypatch.setattr(variant_of(plan).runner, "any_strides", True, raising=False)
    torch.testing.assert_close(plan @ B.T.contiguous().T, expected)
    assert len(bound.plain) == 4 and not bound.fusions
    one = torch.tensor(1.0, requires_grad=True)
    assert said(TypeError, lambda: plan.run(B, alpha=one)).startswith("run: alpha must be a number")


def test_scale_mean_bias_and_relu_take_the_short_path():
    plan, B, bias = made(system="cpu"), dense(), torch.randn(4)
    bound = Noted(plan @ B)
    variant_of(plan).bound = bound
    plan.run(B, alpha=2.0)
    plan.run(B, reduce="mean")
    plan.run(B, bias=bias, relu=True)
    assert [given[1:] for given in bound.fusions] == [
        (None, 2.0, False, False), (None, 1.0, True, False), (bias, 1.0, False, True),
    ]  # fmt: skip
    assert not bound.plain and all(given[0] is B for given in bound.fusions)


@pytest.mark.parametrize("system", ["cpu", "dense"])
@pytest.mark.parametrize("kind", ["plain", "strided", "shared with B", "inference", "shifted"])
def test_a_product_into_any_memory(system: str, kind: str):
    A = torch.rand(12, 12).round().to_sparse_csr()
    plan, B = st.plan(A, 4, system=system), torch.randn(12, 4)
    expected = A.to_dense() @ B
    out = torch.full((12, 4), torch.nan)
    if kind == "strided":
        out = torch.full((12, 9), torch.nan)[:, ::2][:, :4]
    elif kind == "shared with B":
        out = B
    elif kind == "shifted":
        out = torch.full((49,), torch.nan)[1:].view(12, 4)
    before = out._version
    with torch.inference_mode(kind == "inference"):
        if kind == "inference":
            out = out.clone()
        assert plan.run(B, out=out) is out
    torch.testing.assert_close(out, expected)
    assert kind == "inference" or out._version > before, "torch does not see what a kernel writes"


def test_values_that_a_product_wrote_are_read_again():
    edges, values = torch.tensor([[0, 1], [1, 0]]), torch.ones(2, 1)
    plan, B = st.plan(torch.eye(2).to_sparse_csr(), 1), torch.ones(2, 1)
    weight = values.view(2)
    assert st.spmm((edges, weight, (2, 2)), B).tolist() == [[1.0], [1.0]]
    plan.run(torch.full((2, 1), 5.0), out=values)
    assert st.spmm((edges, weight, (2, 2)), B).tolist() == [[5.0], [5.0]]

"""Plans in modules: they follow ``to()``, are copied, pickled, exported and traced with them."""

from __future__ import annotations

import copy
import functools
import io
import pickle

import pytest
import torch

import sparsetile as st
from sparsetile.plan import family, saved

ROWS, COLS, N = 6, 5, 4


@pytest.fixture
def dense():
    values = torch.arange(1.0, ROWS * COLS + 1).reshape(ROWS, COLS)
    return values * (torch.arange(ROWS * COLS).reshape(ROWS, COLS) % 3 == 0)


@pytest.fixture
def x():
    return torch.randn(COLS, N, generator=torch.Generator().manual_seed(0))


class Layer(torch.nn.Module):
    def __init__(self, plan):
        super().__init__()
        self.plan = plan
        self.linear = torch.nn.Linear(N, N)

    def forward(self, x):
        return self.linear(self.plan(x))


def test_a_plan_can_be_called_with_the_options_of_run(dense, x):
    plan = st.plan(dense.to_sparse_csr(), N)
    assert torch.equal(plan(x), plan @ x)
    assert torch.equal(plan(x, reduce="mean", alpha=2.0), plan.run(x, reduce="mean", alpha=2.0))


@pytest.mark.parametrize("how", ["double", "to", "to tensor"])
def test_a_plan_follows_the_module_that_holds_it(dense, x, how):
    layer = Layer(plan := st.plan(dense.to_sparse_csr(), N, reorder="rcm"))
    transposed, order = plan.T, plan._variant.permutation.perm.clone()
    moves = {"double": layer.double, "to": lambda: layer.to(torch.float64)}
    moves["to tensor"] = lambda: layer.to(torch.empty(0, dtype=torch.float64))
    moves[how]()
    assert layer.plan is plan and plan.dtype is torch.float64 and plan.reorder == "rcm"
    assert torch.equal(plan._variant.permutation.perm, order)
    torch.testing.assert_close(plan @ x.double(), dense.double() @ x.double())
    assert plan.T is transposed and transposed.T is plan
    torch.testing.assert_close(transposed @ (dense.double() @ x.double()),
                               dense.T.double() @ (dense.double() @ x.double()))  # fmt: skip
    given = x.double().requires_grad_()
    layer(given).sum().backward()
    assert given.grad.dtype is torch.float64


def test_moving_the_transpose_moves_the_plan(dense):
    plan = st.plan(dense.to_sparse_csr(), N)
    transposed = plan.T.to(torch.float64)
    assert transposed is plan.T and plan.dtype is torch.float64
    plan.update_values(torch.ones(plan.nnz))
    assert torch.equal(transposed.values, torch.ones(plan.nnz).double())


def test_a_plan_adds_nothing_to_a_state_dict(dense):
    layer = Layer(st.plan(dense.to_sparse_csr(), N))
    assert list(layer.state_dict()) == ["linear.weight", "linear.bias"]
    assert len(list(layer.parameters())) == 2


def test_followed_values_are_followed_after_a_move(dense, x):
    plan = st.plan(dense.to_sparse_csr(), N)
    weight = torch.nn.Parameter(plan.values.clone())
    plan.update_values(weight).to(torch.float64)
    with torch.no_grad():
        weight.mul_(2)
    C = plan @ x.double()
    torch.testing.assert_close(C, 2 * dense.double() @ x.double())
    C.sum().backward()
    assert weight.grad is not None and weight.grad.dtype is torch.float32


def test_a_gradient_of_a_product_before_a_move_is_refused(dense, x):
    plan = st.plan(dense.to_sparse_csr(), N)
    C = plan @ x.requires_grad_()
    plan.to(torch.float64).to(torch.float32)
    with pytest.raises(RuntimeError, match=r"^run: A's values must stay as they are between"):
        C.sum().backward()
    (plan @ x).sum().backward()
    torch.testing.assert_close(x.grad, dense.T @ torch.ones(ROWS, N))


def test_hooks_survive_a_move(dense, x):
    plan = st.plan(dense.to_sparse_csr(), N)
    seen = []
    plan.register_forward_hook(lambda *_: seen.append(1))
    plan.to(torch.float64)(x.double())
    assert seen == [1]


def test_a_type_without_systems_is_refused(dense):
    plan = st.plan(dense.to_sparse_csr(), N)
    with pytest.raises(st.UnsupportedError):
        plan.to(torch.float8_e4m3fn)
    with pytest.raises(TypeError, match=r"^to: dtype must be one of torch.float16"):
        plan.to(torch.int32)
    assert plan.dtype is torch.float32


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("how", ["pickle", "torch", "deepcopy"])
def test_a_plan_comes_back_the_same(dense, x, how, columns):
    plan = st.plan(dense.to_sparse_csr(), N, reorder="rcm", reorder_columns=columns)
    if how == "pickle":
        again = pickle.loads(pickle.dumps(plan))
    elif how == "deepcopy":
        again = copy.deepcopy(plan)
    else:
        torch.save({"plan": plan}, buffer := io.BytesIO())
        buffer.seek(0)
        again = torch.load(buffer, weights_only=True)["plan"]
    assert torch.equal(again @ again.permute(x), plan @ plan.permute(x))
    assert (again.system, again.reorder, again.n) == (plan.system, plan.reorder, plan.n)
    again.update_values(torch.zeros(again.nnz))
    torch.testing.assert_close(plan @ plan.permute(x), dense @ x)


@pytest.mark.parametrize("how", ["torch", "deepcopy"])
def test_a_copied_layer_follows_its_own_parameter(dense, x, how):
    layer = Layer(st.plan(dense.to_sparse_csr(), N))
    layer.weight = torch.nn.Parameter(layer.plan.values.clone())
    layer.plan.update_values(layer.weight)
    if how == "deepcopy":
        again = copy.deepcopy(layer)
    else:
        torch.save(layer, buffer := io.BytesIO())
        buffer.seek(0)
        again = torch.load(buffer, weights_only=False)
    with torch.no_grad():
        again.weight.mul_(3)
    torch.testing.assert_close(again.plan @ x, 3 * dense @ x)
    torch.testing.assert_close(layer.plan @ x, dense @ x)


def test_a_plan_that_follows_its_matrix_is_not_pickled_in_silence(dense):
    plan = st.plan(dense.to_sparse_csr().requires_grad_(), N)
    with pytest.raises(TypeError, match=r"^pickle: plan must be one that holds its own values"):
        pickle.dumps(plan)


@pytest.mark.parametrize("fault", ["column", "entry", "order"])
def test_a_pickle_with_numbers_out_of_range_is_refused(dense, fault):
    plan = st.plan(dense.to_sparse_csr(), N)
    header, tensors = saved._parts(plan._family, plan._variant)
    changed = {
        "column": {"indices": tensors["indices"] + COLS},
        "entry": {"entry_map": torch.arange(plan.nnz) + 1},
        "order": {"perm": torch.zeros(ROWS, dtype=torch.int64)},
    }[fault]
    with pytest.raises(ValueError):
        saved.restored(header, {**tensors, **changed})


def test_a_plan_of_another_device_s_system_takes_one_that_runs(dense, x):
    plan = st.plan(dense.to_sparse_csr(), N)
    header, tensors = saved._parts(plan._family, plan._variant)
    again = st.Plan(saved.restored(header.replace('"cpu"', '"wcsr"'), tensors))
    assert again.system == "cpu"
    torch.testing.assert_close(again @ x, dense @ x)
    assert "cpu       chosen: predicted" in again.explain()


@pytest.mark.parametrize("strict", [False, True])
def test_a_layer_is_exported_and_comes_back(tmp_path, dense, x, strict):
    layer = Layer(st.plan(dense.to_sparse_csr(), N))
    torch.export.save(torch.export.export(layer, (x,), strict=strict), tmp_path / "layer.pt2")
    again = torch.export.load(tmp_path / "layer.pt2").module()
    torch.testing.assert_close(again(2 * x), layer(2 * x))


@pytest.mark.filterwarnings("ignore")
def test_a_layer_is_traced_by_torch_jit(tmp_path, dense, x):
    layer = Layer(st.plan(dense.to_sparse_csr(), N))
    traced = torch.jit.trace(layer, (x,))
    traced.save(str(tmp_path / "layer.pt"))
    again = torch.jit.load(str(tmp_path / "layer.pt"))
    torch.testing.assert_close(again(2 * x), layer(2 * x))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("called", ["spmm", "plan"])
def test_planning_inside_of_torch_jit_is_refused_with_the_way_out(dense, x, called):
    A = dense.to_sparse_csr()
    function = {"spmm": lambda b: st.spmm(A, b), "plan": lambda b: st.plan(A, N) @ b}[called]
    text = rf"^{called}: the call must be outside of torch\.jit\.trace, got a call inside of it\. "
    with pytest.raises(ValueError, match=text):
        torch.jit.trace(function, (x,))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_saved_plan_loads_on_another_device(tmp_path, dense, x, kind):
    made = st.plan(dense.to_sparse_csr(), N, reorder="rcm").to(kind)
    made.save(tmp_path / "a.safetensors")
    other = "cuda" if kind == "cpu" else "cpu"
    again = st.load_plan(tmp_path / "a.safetensors", device=other)
    assert (again.device.type, again.reorder) == (other, "rcm")
    torch.testing.assert_close((again @ x.to(other)).cpu(), dense @ x)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_plan_moves_to_a_gpu_and_back(dense, x):
    layer = Layer(plan := st.plan(dense.to_sparse_csr(), N))
    layer.cuda()
    assert plan.device.type == "cuda" and plan.system != "cpu"
    torch.testing.assert_close((plan @ x.cuda()).cpu(), dense @ x)
    layer.cpu()
    assert torch.equal(plan @ x, st.plan(dense.to_sparse_csr(), N) @ x)


def test_what_trained_values_pass_through_moves_with_the_plan(calls_of):
    """The values themselves stay; where each entry goes is read on the new device."""
    plan = st.plan(torch.eye(2).to_sparse_csr(), 1)
    weight = torch.ones(2, requires_grad=True)
    plan.update_values(weight)
    places = torch.arange(2)
    moved = family.follow_on(functools.partial(max, weight, places), torch.device("meta"))
    assert moved.func is max and moved.args[0] is weight and moved.args[1].is_meta
    asked = calls_of(family, "follow_on")
    follow = plan._family.follow
    plan.to(torch.float64)
    (call,) = asked
    assert call.given == (follow, torch.device("cpu")) and plan._family.follow is call.result


def test_what_is_followed_is_named_by_functions_that_move():
    assert isinstance(
        st.plan(torch.eye(2).to_sparse_csr(), 1)
        .update_values(torch.ones(2, requires_grad=True))
        ._family.follow,
        functools.partial,
    )

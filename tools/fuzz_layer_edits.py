"""The edits of ``tools.fuzz`` between two calls of a layer: one function per edit.

An edit changes the subject's content, or only its state. Writes that torch does not count are
followed by ``st.changed()``.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import sparsetile as st
from sparsetile.nn import SparseLinear, clear_graph_cache
from tools.fuzz_layer_models import MLP
from tools.fuzz_layer_subjects import Subject


def apply_edit(subject: Subject, what: str, how: str) -> None:
    """Change what the case says."""
    kind = how.split(" ", 1)
    if kind[-1] in ("SGD", "AdamW", "Adam"):
        _step(subject, what, kind[0], kind[1])
    else:
        _DO[what, how](subject)


# -- edges ---------------------------------------------------------------------------------------


def _write_edges(s: Subject) -> None:
    edges = s.edges
    if edges.shape[1] and s.case.parallel and s.rng.random() < 0.5:  # one edge
        place = int(s.rng.integers(edges.shape[1]))
        edges[:, place] = torch.from_numpy(s.rng.integers(0, s.case.nodes, 2)).to(edges)
    elif s.rng.random() < 0.3:  # weights belong to other edges now
        edges.copy_(edges.flip(1))
    else:
        edges[...] = s.new_edges()


def _edges_data(s: Subject, times: int = 1) -> None:
    for _ in range(times):
        s.edges.data = s.new_edges()


def _renew_edges(s: Subject) -> None:
    """Other edges in a new tensor, perhaps at the address of the old one."""
    content = s.new_edges().tolist()
    dtype, device = s.edges.dtype, s.edges.device
    del s.edges
    s.edges = torch.tensor(content, dtype=dtype, device=device).view(2, -1)


# -- edge weights --------------------------------------------------------------------------------


def _weight(s: Subject) -> Tensor:
    assert s.weight is not None
    return s.weight


def _fresh(s: Subject) -> Tensor:
    return s.new_weight(_weight(s).numel())


@torch.no_grad()
def _write_weight(s: Subject) -> None:
    weight, kind = _weight(s), int(s.rng.integers(4))
    if kind == 0:  # not one factor: a normalised layer would not show it
        weight.mul_(_fresh(s))
    elif kind == 1:
        weight.add_(0.75)
    elif kind == 2:
        weight.copy_(_fresh(s))
    else:
        weight[:] = _fresh(s)


@torch.no_grad()
def _write_element(s: Subject) -> None:
    if _weight(s).numel():
        _weight(s)[int(s.rng.integers(_weight(s).numel()))] = 3.0


def _weight_data(s: Subject, times: int = 1) -> None:
    for _ in range(times):
        _weight(s).data = _fresh(s)


def _renew_weight(s: Subject) -> None:
    content = _fresh(s).tolist()
    dtype, device = s.dtype, s.case.device
    s.weight = s.base = None
    s.weight = s.as_weight(torch.tensor(content, dtype=dtype, device=device))


def _set_weight(s: Subject) -> None:
    with torch.no_grad():
        _weight(s).set_(_fresh(s))  # type: ignore[call-overload]


def _weight_unseen(s: Subject) -> None:
    _weight(s).data.mul_(_fresh(s))
    st.changed()


def _toggle_grad(s: Subject) -> None:
    weight = _weight(s)
    weight.requires_grad_(not weight.requires_grad)
    _write_weight(s)


def _write_base(s: Subject) -> None:
    assert s.base is not None
    if s.base.data_ptr() != _weight(s).data_ptr():
        s.weight = s.base[:, 1]
    else:
        s.base.mul_(_fresh(s)[:, None])


def _weight_vector(s: Subject) -> None:
    torch.nn.utils.vector_to_parameters(_fresh(s), [_weight(s)])


# -- a module's parameters -----------------------------------------------------------------------


def _module(s: Subject) -> nn.Module:
    assert s.module is not None
    return s.module


def _others(s: Subject) -> dict[str, Tensor]:
    named = _module(s).named_parameters()
    return {name: s.normal(*each.shape).to(each.dtype) for name, each in named}


@torch.no_grad()
def _write_parameters(s: Subject) -> None:
    for name, parameter in _module(s).named_parameters():
        parameter.copy_(s.normal(*parameter.shape)) if len(name) % 2 else parameter.mul_(-1.5)


def _parameters_data(s: Subject) -> None:
    fresh = _others(s)
    for name, parameter in _module(s).named_parameters():
        parameter.data = fresh[name]


def _renew_parameters(s: Subject) -> None:
    """Other Parameter objects under the same names; one under two names stays one."""
    fresh: dict[int, nn.Parameter] = {}
    for module in _module(s).modules():
        for name, old in list(module.named_parameters(recurse=False)):
            made = nn.Parameter(s.normal(*old.shape), requires_grad=old.requires_grad)
            setattr(module, name, fresh.setdefault(id(old), made))


def _parameters_unseen(s: Subject) -> None:
    for parameter in _module(s).parameters():
        parameter.data.mul_(-0.75)
    st.changed()


def _parameter_vector(s: Subject) -> None:
    parameters = list(_module(s).parameters())
    length = sum(each.numel() for each in parameters)
    torch.nn.utils.vector_to_parameters(s.normal(length), parameters)


def _load(s: Subject, assign: bool) -> None:
    state = {name: each.clone() for name, each in _module(s).state_dict().items()}
    for name, parameter in _module(s).named_parameters(remove_duplicate=False):
        state[name] = s.normal(*parameter.shape)
    _module(s).load_state_dict(state, assign=assign)


def _step(s: Subject, what: str, how: str, name: str) -> None:
    """One step of an optimiser with random gradients; those of weights make them larger."""
    owned = [_weight(s)] if what == "weight" else list(_module(s).parameters())
    for parameter in owned:
        gradient = s.normal(*parameter.shape).to(parameter.dtype)
        parameter.grad = -gradient.abs() if what == "weight" else gradient
    # torch's fused steps on a GPU take neither tensors without elements nor strided ones.
    plain = how == "plain" or not all(each.numel() and each.is_contiguous() for each in owned)
    options: dict[str, Any] = {} if plain else {how: True}
    if name != "SGD":
        options["eps"] = 1e-3  # the usual one is 0 in float16
    made: Callable[..., torch.optim.Optimizer] = getattr(torch.optim, name)
    optimiser = made(owned, lr=0.25, **options)
    optimiser.step()
    optimiser.zero_grad()


# -- the module as a whole -----------------------------------------------------------------------


def _cast(s: Subject, dtype: torch.dtype) -> None:
    _module(s).to(dtype)
    s.dtype, s.x = dtype, s.x.to(dtype)
    if s.weight is not None:
        s.weight = s.as_weight(s.weight.detach().to(dtype))


def _other_dtype(s: Subject) -> torch.dtype:
    if s.dtype is torch.float32:
        wide = s.case.layer == "GATConv" or s.case.pick % 2 == 0
        return torch.float64 if wide else torch.float16
    return torch.float32


def _cast_and_back(s: Subject) -> None:
    dtype, other = s.dtype, _other_dtype(s)
    _cast(s, other)
    _cast(s, dtype)


def _copy(s: Subject) -> None:
    """Continue with a copy; changes of the original must not affect it."""
    original = _module(s)
    s.module = copy.deepcopy(original)
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.fill_(torch.nan)


def _train(s: Subject, mode: bool) -> None:
    _module(s).train(mode)


def _toggle(s: Subject) -> None:
    assert isinstance(s, MLP)
    s.toggle()


def _prune(s: Subject) -> None:
    layer = _module(s)
    assert isinstance(layer, SparseLinear)
    layer.prune_(0.7)


def _pattern_data(s: Subject) -> None:
    """The same pattern, or another one of as many blocks, in new memory; perhaps twice."""
    layer = _module(s)
    assert isinstance(layer, SparseLinear)
    device, blocks = layer.block_col_idx.device, layer.block_col_idx.numel()
    rows, cols = layer.pattern.grid
    for _ in range(int(s.rng.integers(1, 3))):
        row_ptr, col_idx = layer.block_row_ptr.clone(), layer.block_col_idx.clone()
        if s.rng.random() < 0.7:
            kept = torch.zeros(rows, cols, dtype=torch.bool, device=device)
            kept.view(-1)[torch.from_numpy(s.rng.permutation(rows * cols)[:blocks]).to(device)] = 1
            row_ptr[1:] = kept.sum(1).cumsum(0)
            col_idx = kept.nonzero()[:, 1].int()
        layer.block_row_ptr.data, layer.block_col_idx.data = row_ptr, col_idx


# -- around the call -----------------------------------------------------------------------------


def _other_call(s: Subject) -> None:
    """The same layer with other edges, weights and features."""
    kept = s.edges, s.weight, s.base, s.x
    s.edges = s.new_edges()
    s.weight = s.as_weight(s.new_weight(s.edges.shape[1]))
    s.x = s.new_x()
    with torch.no_grad():
        s.call(s.x)
    s.edges, s.weight, s.base, s.x = kept


def _clear(s: Subject) -> None:
    clear_graph_cache()
    st.clear_plan_cache()


def _elsewhere(edit: Callable[[Subject], None]) -> Callable[[Subject], None]:
    """The same on another thread."""

    def run(s: Subject) -> None:
        errors: list[BaseException] = []

        def body() -> None:
            try:
                edit(s)
                if s.case.device == "cuda":
                    torch.cuda.synchronize()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=body)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]

    return run


_DO: dict[tuple[str, str], Callable[[Subject], None]] = {
    ("nothing", "nothing"): lambda s: None,
    ("nothing", "another call"): _other_call,
    ("nothing", "clear"): _clear,
    ("edges", "in place"): _write_edges,
    ("edges", "data"): _edges_data,
    ("edges", "data twice"): lambda s: _edges_data(s, 2),
    ("edges", "new"): _renew_edges,
    ("edges", "thread"): _elsewhere(_write_edges),
    ("weight", "in place"): _write_weight,
    ("weight", "element"): _write_element,
    ("weight", "data"): _weight_data,
    ("weight", "data twice"): lambda s: _weight_data(s, 2),
    ("weight", "new"): _renew_weight,
    ("weight", "set_"): _set_weight,
    ("weight", "thread"): _elsewhere(_write_weight),
    ("weight", "changed"): _weight_unseen,
    ("weight", "requires_grad"): _toggle_grad,
    ("weight", "base"): _write_base,
    ("weight", "vector"): _weight_vector,
    ("parameters", "in place"): _write_parameters,
    ("parameters", "data"): _parameters_data,
    ("parameters", "thread"): _elsewhere(_write_parameters),
    ("parameters", "changed"): _parameters_unseen,
    ("parameters", "vector"): _parameter_vector,
    ("parameters", "state dict"): lambda s: _load(s, False),
    ("parameters", "state dict, assign"): lambda s: _load(s, True),
    ("parameters", "new"): _renew_parameters,
    ("module", "train"): lambda s: _train(s, True),
    ("module", "eval"): lambda s: _train(s, False),
    ("module", "cast and back"): _cast_and_back,
    ("module", "cast"): lambda s: _cast(s, _other_dtype(s)),
    ("module", "deepcopy"): _copy,
    ("module", "toggle"): _toggle,
    ("module", "prune"): _prune,
    ("module", "pattern data"): _pattern_data,
}

"""Layer cases of the fuzzer: they can be replayed, notice stale results, and some run here."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from tools.digest import code_digest
from tools.fuzz import check_fuzz, fuzz, main, try_case
from tools.fuzz_layer_checks import own_pyg
from tools.fuzz_layer_models import SUBJECTS
from tools.fuzz_layers import EDITS, KINDS, LAYERS, LayerCase, draw_case, draw_layer

import sparsetile as st
from sparsetile import pyg
from tests.tools.test_fuzz import a_record
from tools import fuzz_layer_checks, fuzz_layer_models, fuzz_layers

CASES = 24


def a_case(layer: str, *edits: tuple[str, str], **wanted: Any) -> LayerCase:
    """A case of float32 with edges and weights, plain but for what is wanted."""
    plain: dict[str, Any] = {
        "dtype": "float32", "nodes": 12, "edges": 24, "parallel": False, "index": "int64",
        "width": 5, "out": 2, "weight": "plain" if layer in fuzz_layers.WEIGHTED else "none",
        "reduce": "sum", "relu": False, "inference": False, "training": False,
        "short_lived": False, "bias": True, "block": 16, "pick": 1,
        "modes": ("no grad",) * (len(edits) + 1),
    }  # fmt: skip
    return replace(draw_layer(0, 0, "cpu"), layer=layer, edits=edits, **{**plain, **wanted})


@pytest.fixture(autouse=True)
def _own_pyg():
    with own_pyg():
        yield


def test_drawn_layers_on_the_cpu_are_right():
    """Others whenever the code is another."""
    found = fuzz("cpu", int(code_digest()[:7], 16), CASES, "layers")
    assert not found["failures"], "\n".join(found["failures"])
    assert found["kinds"] == {"layers": CASES}
    assert not pyg.is_patched()


def test_a_seed_and_a_number_give_the_same_case_each_time():
    assert [draw_layer(3, k, "cpu") for k in range(50)] == [
        draw_layer(3, k, "cpu") for k in range(50)
    ]
    assert draw_layer(3, 0, "cpu") != draw_layer(4, 0, "cpu")


def test_cases_reach_every_layer_and_every_edit():
    cases = [draw_layer(1, k, "cpu") for k in range(6000)]
    assert {case.layer for case in cases} == set(LAYERS)
    every = {(what, how) for what, hows in EDITS.items() for how in hows}
    assert {edit for case in cases for edit in case.edits} == every
    assert {mode for case in cases for mode in case.modes} == {"no grad", "grad", "inference"}


def test_the_kind_of_a_number_is_drawn_unless_it_is_asked_for():
    kinds = {kind: {draw_case(1, k, "cpu", kind).kind for k in range(50)} for kind in KINDS}
    assert kinds == {"all": {"products", "layers"}, "products": {"products"}, "layers": {"layers"}}
    for number in range(50):
        case = draw_case(1, number, "cpu", "all")
        assert case == draw_case(1, number, "cpu", case.kind), "the replay draws the same"


def test_without_pyg_other_layers_are_drawn(monkeypatch):
    monkeypatch.setattr(fuzz_layers, "has_pyg", lambda: False)
    assert not [k for k in range(500) if draw_layer(1, k, "cpu").layer.startswith("pyg")]


@pytest.mark.parametrize(
    "edit",
    [
        ("weight", "in place"), ("weight", "element"), ("weight", "data"), ("weight", "new"),
        ("weight", "thread"), ("weight", "foreach AdamW"), ("edges", "in place"),
        ("edges", "new"),
    ],
    ids=": ".join,
)  # fmt: skip
@pytest.mark.parametrize("layer", ["GCNConv", "aggregate", "spmm", "pyg GraphConv"])
def test_a_result_of_before_an_edit_is_caught(tmp_path, layer, edit, fault):
    case = a_case(layer, edit)
    assert not try_case(case, tmp_path).wrong
    subject = SUBJECTS[layer]
    kept = {}

    def stale(real: Any, self: Any, x: torch.Tensor) -> torch.Tensor:
        """Computes with the first edges and weights for ever."""
        first = kept.setdefault("given", (self.edges.clone(), _copied(self.weight)))
        now = self.edges, self.weight
        self.edges, self.weight = first
        try:
            return real(self, x)
        finally:
            self.edges, self.weight = now

    fault(subject, "call", stale)
    outcome = try_case(case, tmp_path)
    assert "elements wrong" in outcome.wrong and ": ".join(edit) in outcome.wrong
    assert outcome.line.startswith("python -m tools.fuzz --device cpu --kind layers --replay 0 |")


def _copied(weight: torch.Tensor | None) -> torch.Tensor | None:
    return None if weight is None else weight.detach().clone()


@pytest.mark.parametrize("edit", ["fused AdamW", "state dict", "data", "vector", "changed", "new"])
@pytest.mark.parametrize("layer", ["SparseLinear", "SAGEConv", "pyg GINConv"])
def test_parameters_of_before_an_edit_are_caught(tmp_path, layer, edit, fault):
    case = a_case(layer, ("parameters", edit))
    assert not try_case(case, tmp_path).wrong
    subject = SUBJECTS[layer]
    kept = {}

    def stale(real: Any, self: Any, x: torch.Tensor) -> torch.Tensor:
        """Computes with the first parameters for ever."""
        now, self.module = self.module, kept.setdefault("module", copy.deepcopy(self.module))
        try:
            return real(self, x)
        finally:
            self.module = now

    fault(subject, "call", stale)
    assert "elements wrong" in try_case(case, tmp_path).wrong


def test_a_wrong_gradient_is_caught(tmp_path, fault):
    case = a_case("aggregate", modes=("grad",), weight="parameter")
    assert not try_case(case, tmp_path).wrong

    def call(real: Any, self: Any, x: torch.Tensor) -> torch.Tensor:
        out = real(self, x)
        out.register_hook(lambda grad: grad * 1.001)
        return out

    fault(SUBJECTS["aggregate"], "call", call)
    wrong = try_case(case, tmp_path).wrong
    assert "gradient of x" in wrong


def test_another_dtype_and_a_missing_gradient_are_caught(tmp_path, fault):
    subject = SUBJECTS["aggregate"]
    fault(subject, "call", lambda real, self, x: real(self, x).double())
    assert "float64 instead of torch.float32" in try_case(a_case("aggregate"), tmp_path).wrong
    fault(subject, "call", lambda real, self, x: real(self, x).detach().float())
    case = a_case("aggregate", modes=("grad",))
    assert "has no gradient" in try_case(case, tmp_path).wrong


def test_an_error_in_a_layer_is_caught(tmp_path, fault):
    def call(real: Any, self: Any, x: torch.Tensor) -> torch.Tensor:
        raise KeyError("bounds")

    fault(SUBJECTS["GCNConv"], "call", call)
    assert try_case(a_case("GCNConv"), tmp_path).wrong.startswith("KeyError at test_fuzz_layers.py")


def test_pruning_that_changes_weights_is_caught(tmp_path, fault):
    def other_weights(real: Any, model: Any, config: Any) -> Any:
        real(model, config)
        with torch.no_grad():
            model[0].weight.add_(1.0)
        return model

    fault(fuzz_layer_models, "sparsify_", other_weights)
    assert "sparsify_: 0" in try_case(a_case("MLP"), tmp_path).wrong


def test_a_refusal_of_a_plain_model_is_caught(tmp_path, fault):
    def refused(real: Any, model: Any, config: Any) -> Any:
        raise ValueError("sparsify_: model must be small, got a large one. Use less.")

    fault(fuzz_layer_models, "sparsify_", refused)
    assert "ValueError" in try_case(a_case("MLP"), tmp_path).wrong


def test_a_dense_model_with_other_weights_is_caught(tmp_path, fault):
    case = a_case("MLP", ("module", "toggle"), ("module", "toggle"))
    assert not try_case(case, tmp_path).wrong
    fault(fuzz_layer_models, "densify_", lambda real, model: real(model)[0].weight.data.mul_(2))
    assert "densify_: 0 has other weights" in try_case(case, tmp_path).wrong


def test_a_layer_case_is_replayed_and_printed(capsys):
    for number in range(50):
        if draw_layer(5, number, "cpu").layer == "GCNConv":
            break
    case = draw_layer(5, number, "cpu")
    assert main(case.replay.split()[3:]) == 0
    said = capsys.readouterr().out
    assert "layer = 'GCNConv'" in said and "outcome: right" in said


def test_a_case_finds_empty_caches_and_does_the_same_alone_as_behind_others(tmp_path, calls_of):
    graphs = calls_of(fuzz_layer_checks, "clear_graph_cache")
    plans = calls_of(st, "clear_plan_cache")
    assert not try_case(a_case("SparseLinear"), tmp_path).wrong
    assert len(graphs) == len(plans) == 1


def test_a_record_of_the_cpu_needs_as_many_layers_as_products(tmp_path):
    systems = {"cpu": 1, "dense": 1}
    whole = a_record(device="cpu", systems=systems, kinds={"products": 20_000, "layers": 20_000})
    path = tmp_path / "fuzz.json"
    path.write_text(json.dumps(whole))
    assert check_fuzz(path) == []
    path.write_text(json.dumps({**whole, "kinds": {"products": 20_000, "layers": 19_999}}))
    (found,) = check_fuzz(path)
    assert "19999 cases of layers, fewer than 20000" in found

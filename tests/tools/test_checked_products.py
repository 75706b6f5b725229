"""The products that checkers watch: what they cover, and that a wrong one is seen."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tools.attention import attended
from tools.checked_products import main

import sparsetile as st
from sparsetile.core.errors import UnsupportedError
from sparsetile.nn import SparseLinear
from sparsetile.systems import SYSTEMS
from tests.contracts.cases import MATRICES, csr_of
from tools import checked_products as module


def run(tmp_path: Path, *words: str) -> tuple[int, dict]:  # type: ignore[type-arg]
    report = tmp_path / "report.json"
    code = main([str(report), "--device", "cpu", *words])
    return code, json.loads(report.read_text())


@pytest.fixture
def seen(monkeypatch) -> list[tuple[str, str]]:
    """Where each product ran and what it was."""
    found: list[tuple[str, str]] = []
    real = module.Watched.product

    def product(self, what, C, expected):
        found.append((self.where, what))
        real(self, what, C, expected)

    monkeypatch.setattr(module.Watched, "product", product)
    return found


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """Give torch its settings back."""
    matmul = torch.backends.cuda.matmul
    names = (
        "allow_tf32",
        "allow_fp16_reduced_precision_reduction",
        "allow_bf16_reduced_precision_reduction",
    )
    before = {name: getattr(matmul, name) for name in names}
    yield
    for name, value in before.items():
        setattr(matmul, name, value)


def test_every_kind_of_product_runs_in_every_type_and_order(tmp_path: Path, seen, monkeypatch):
    monkeypatch.setattr(type(SYSTEMS["cpu"]), "ordered", True)
    # Small ones whose places in the list take all turns of types and orders.
    matrices = ["one row", "one column", "odd sizes", "empty rows"]
    code, report = run(tmp_path, "--systems", "cpu,dense", "--matrices", ",".join(matrices))
    assert code == 0 and report["failure"] == ""
    assert report["matrices"] == matrices and report["products"] == len(seen)
    kinds = {what.partition(",")[0] for _, what in seen}
    assert kinds == {
        "sum", "sum into out", "batch", "transpose", "Inf in B", "mean", "max", "min",
        "gradient of the values",
    }  # fmt: skip
    places = {where.partition(", ")[2] for where, _ in seen}
    for dtype in module.DTYPES:
        for kind in ("weighted", "pattern"):
            for system in ("cpu", "dense"):
                assert f"{kind}, {dtype}, {system}, given order" in places
            assert f"{kind}, {dtype}, cpu, reversed rows" in places
    met = {where.split(", ")[0]: set() for where, _ in seen}
    for where, _ in seen:
        met[where.split(", ")[0]].add(where.split(", ")[2])
    assert all(len(types) == len(module.DTYPES) for types in met.values()), "in one form each"
    assert not any("dense, reversed" in where for where in places), "it takes rows as they come"
    widths = {what.partition("N=")[2] for _, what in seen if "N=" in what}
    assert widths == {str(n) for n in module.WIDTHS}


def test_all_ablations_meet_all_types(tmp_path: Path, monkeypatch):
    """Each part of the matrices runs in a process of its own: places must not depend on it."""
    met = set()

    def note(csr, n, dtype, system, ablation, reverse):
        met.add((csr.values is not None, dtype, ablation))

    monkeypatch.setattr(module, "plan_for", note)
    monkeypatch.setattr(type(SYSTEMS["cpu"]), "contract_ablations", ("a", "b", "c", "d"))
    names = module.matrix_names()[:-1]
    for part in range(4):
        run(tmp_path, "--systems", "cpu", "--matrices", ",".join(names[part::4]))
    assert len(met) == 2 * len(module.DTYPES) * 4


def test_an_element_that_nobody_writes_is_seen(tmp_path: Path, capsys, fault):
    def forgetful(real, self, B, out=None, **changes):
        C = real(self, B, out=out, **changes)
        if out is not None and C.numel():
            C.view(-1)[-1] = torch.nan
        return C

    fault(st.Plan, "run", forgetful)
    code, report = run(tmp_path, "--systems", "dense", "--matrices", "odd sizes")
    assert code == 1 and report["matrices"] == []
    assert report["failure"].startswith(
        "RuntimeError: checked_products: every product must be exact, got 1 wrong elements of "
    )
    assert (
        "odd sizes, weighted, torch.float32, dense, given order, sum into out"
        in (report["failure"])
    )
    assert "Traceback" in capsys.readouterr().err


def test_a_system_that_runs_elsewhere_runs_nothing(tmp_path: Path):
    code, report = run(tmp_path, "--systems", "acc", "--matrices", "one by one")
    assert code == 0 and report["products"] == 0


def test_settings_of_torch_are_those_that_exact_sums_need(tmp_path: Path):
    matmul = torch.backends.cuda.matmul
    run(tmp_path, "--systems", "acc", "--matrices", "no rows")
    assert matmul.allow_tf32
    assert not matmul.allow_fp16_reduced_precision_reduction


def test_linear_layers_run_in_every_type_and_two_sizes(tmp_path: Path, seen):
    code, report = run(tmp_path, "--systems", "cpu,dense", "--matrices", module.LAYER)
    assert code == 0 and report["matrices"] == [module.LAYER]
    for system in ("cpu", "dense"):
        for dtype in SYSTEMS[system].dtypes:
            where = f"{module.LAYER}, weighted, {dtype}, {system}, given order"
            sizes = [what for place, what in seen if place == where]
            assert sizes == [f"linear, N={tokens}" for tokens in module.LAYER_TOKENS]


def test_layers_of_blocks_run_in_each_side_and_type(tmp_path: Path, seen, monkeypatch):
    """Their kernels belong to one system, which no plan of a CPU takes."""
    near = []
    real = module.Watched.near

    def noted(self, what, *given):
        near.append((self.where, what))
        real(self, what, *given)

    monkeypatch.setattr(module.Watched, "near", noted)
    code, report = run(tmp_path, "--systems", module.BLOCK_SYSTEM, "--matrices", module.LAYER)
    assert code == 0 and report["failure"] == ""
    for side in module.BLOCK_SIDES:
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            where = f"{module.LAYER}, blocks of {side}, {dtype}, {module.BLOCK_SYSTEM}"
            for activation, found in (("relu", seen), ("swiglu", near)):
                sizes = [what for place, what in found if place == f"{where}, {activation}"]
                assert sizes == [f"layer, N={tokens}" for tokens in module.LAYER_TOKENS]


def test_a_wrong_layer_of_blocks_is_noticed(tmp_path: Path, fault):
    fault(SparseLinear, "forward", lambda real, self, x: real(self, x) + 0.5)
    words = ("--systems", module.BLOCK_SYSTEM, "--matrices", module.LAYER, "--types", "bfloat16")
    code, report = run(tmp_path, *words)
    assert code == 1 and "blocks of 16, torch.bfloat16, bcsr, relu, layer, N=7" in report["failure"]


def test_a_wrong_layer_is_noticed(tmp_path: Path, fault):
    fault(st.Plan, "linear", lambda real, self, X, **given: real(self, X, **given) + 1)
    code, report = run(tmp_path, "--systems", "cpu", "--matrices", module.LAYER)
    assert code == 1 and "linear, N=7" in report["failure"]


def test_a_system_runs_as_each_of_its_contract_ablations(tmp_path: Path, monkeypatch):
    asked = []

    def build(csr, n, **options):
        asked.append((options["system"], options["ablation"]))
        raise UnsupportedError("only asked")

    monkeypatch.setattr(module, "build_plan", build)
    monkeypatch.setattr(type(SYSTEMS["dense"]), "contract_ablations", (None, "part"))
    code, report = run(
        tmp_path, "--systems", "cpu,dense", "--matrices", f"odd sizes,{module.LAYER}"
    )
    assert code == 0 and report["products"] == 0
    assert set(asked) == {("cpu", None), ("dense", None), ("dense", "part")}


def test_without_a_selection_all_matrices_and_the_layer_run(tmp_path: Path):
    _, report = run(tmp_path, "--systems", "acc")  # a system of GPUs: nothing is multiplied
    assert report["matrices"] == [*MATRICES, module.LAYER]


def gradients_of_scores(csr: st.CSR, heads: int, width: int, slope: float) -> tuple[list, tuple]:  # type: ignore[type-arg]
    """Return the gradients of both terms of the scores in float64, and sizes of their terms."""
    targets, sources = csr.shape
    draw = torch.Generator().manual_seed(3)
    given = [
        torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_()
        for shape in ((sources, heads, width), (sources, heads), (targets, heads))
    ]
    G = torch.randn(targets, heads * width, generator=draw, dtype=torch.float64)
    out = attended(csr, *given, slope)
    found = torch.autograd.grad(out, given[1:], G, allow_unused=True)
    return list(found), module._score_terms(csr, given, G, slope, None)


@pytest.mark.parametrize("name", ["odd sizes", "one dense column", "empty rows", "tall"])
def test_sizes_of_a_score_s_terms_bound_its_gradient(name):
    csr = csr_of(MATRICES[name]())
    found, sizes = gradients_of_scores(csr, 2, 5, 0.25)
    for gradient, terms in zip(found, sizes, strict=True):
        assert gradient is not None and gradient.shape == terms.shape
        assert bool((gradient.abs() <= terms + 1e-12).all())
        assert float(terms.max()) < 1e4 * max(float(gradient.abs().max()), 1e-3)


@pytest.mark.parametrize("name", ["no rows", "no columns", "no entries"])
def test_an_empty_matrix_has_terms_of_no_size(name):
    csr = csr_of(MATRICES[name]())
    _, sizes = gradients_of_scores(csr, 2, 5, 0.25)
    targets, sources = csr.shape
    assert [each.shape for each in sizes] == [(sources, 2), (targets, 2)]
    assert not any(bool(each.any()) for each in sizes)


def test_a_gradient_is_near_by_the_size_of_its_terms():
    seen = module.Watched()
    small, terms = torch.full((1,), 3e-4), torch.full((1,), 1000.0, dtype=torch.float64)
    seen.near("cancelled", small, torch.zeros(1, dtype=torch.float64), terms)
    with pytest.raises(RuntimeError, match="1 wrong"):
        seen.near("not so", small, torch.zeros(1, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="1 wrong"):
        seen.near("too far", 10 * small, torch.zeros(1, dtype=torch.float64), terms)

"""``Plan.explain``: every stage with its cost, every system with its fate, and the floor."""

from __future__ import annotations

import re

import pytest
import torch

import sparsetile as st
from sparsetile.plan.explain import explain
from sparsetile.systems import SYSTEMS
from tests.contracts.cases import MATRICES, csr_of, random_matrix


def lines_of(plan: st.Plan) -> dict[str, str]:
    """First word of each line after the first -> the rest of the line."""
    first, *rest = plan.explain().splitlines()
    assert first == repr(plan)
    return {line.split()[0]: line.strip().partition(" ")[2].strip() for line in rest}


def sample(**kwargs) -> st.Plan:
    return st.plan(csr_of(random_matrix(300, 200, 0.05)), 16, **kwargs)


@pytest.mark.parametrize("tune, word", [("model", "predicted"), ("measure", "measured")])
def test_every_system_is_chosen_slower_or_rejected_with_its_reason(tune, word):
    plan = sample(tune=tune)
    lines = lines_of(plan)
    assert SYSTEMS.on("cpu") == [name for name in SYSTEMS if name in lines]
    assert re.fullmatch(rf"chosen: {word} \d+\.\d+ ms a product", lines[plan.system])
    assert sum(line.startswith("chosen") for line in lines.values()) == 1
    other = {"cpu": "dense", "dense": "cpu"}[plan.system]
    assert re.fullmatch(rf"slower: {word} \d+\.\d+ ms a product", lines[other])


def test_a_system_that_was_not_timed_is_not_called_slower():
    """As one whose kernels are not compiled, where a close call took longer than predicted."""
    plan = sample()
    info = plan.info | {
        "system": "csr",
        "considered": {"csr": 3e-3, "wcsr": 2e-3, "acc": 4e-3, "half": 3.5e-3},
        "considered_by": "model",
        "measured": ["csr", "half"],
        "rejected": {},
    }
    lines = dict(re.findall(r"^  (\S+) +(.+)$", explain("title", info, (1e-3, "launch")), re.M))
    assert lines["csr"] == "chosen: measured 3.000 ms a product"
    assert lines["wcsr"] == "not timed: predicted 2.000 ms a product"
    assert lines["half"] == "slower: measured 3.500 ms a product"
    assert lines["acc"] == "slower: predicted 4.000 ms a product"


def test_all_reasons_of_a_rejected_system_are_given(monkeypatch):
    away = ["is away", "is late"]
    monkeypatch.setattr(type(SYSTEMS["dense"]), "further_reasons", lambda self, request: away)
    assert lines_of(sample())["dense"] == "rejected: is away; is late"


def test_systems_are_listed_from_the_fastest():
    plan = sample()
    considered = plan.info["considered"]
    names = [line.split()[0] for line in plan.explain().splitlines() if "a product" in line]
    assert names[:-1] == sorted(considered, key=considered.__getitem__)


def test_a_system_asked_for_by_name_is_said_to_be():
    assert lines_of(sample(system="dense"))["dense"] == "asked for by name"


def test_every_stage_has_its_choice_and_its_time():
    plan = sample(system="cpu")
    lines = lines_of(plan)
    assert re.fullmatch(rf"{plan.nnz} entries in canonical CSR, \d+\.\d+ ms", lines["intake"])
    assert re.fullmatch(r"identity, \d+\.\d+ ms", lines["reorder"])
    for name, choice in plan.info["choices"].items():
        assert lines[name] == choice
    assert re.fullmatch(
        r"\d+\.\d+ ms \(format \d+\.\d+ ms, schedule \d+\.\d+ ms\), "
        r"\d+ bytes beside the values",
        lines["build"],
    )
    assert f", {plan.info['format_bytes']} bytes beside" in lines["build"]
    assert re.fullmatch(r"\d+\.\d+ ms", lines["compile"])


def test_the_order_of_the_rows_is_named():
    order = torch.randperm(300)
    assert lines_of(sample(reorder=order))["reorder"].startswith("given, ")


def test_on_a_cpu_the_least_time_is_called_an_estimate():
    plan = sample()
    seconds, term = plan.floor()
    lines = lines_of(plan)
    assert lines["estimate"] == f"{seconds * 1e3:.3f} ms a product at best ({term})"
    assert "floor" not in lines and "share" not in lines


@pytest.mark.parametrize("measured, word", [(False, "predicted, not measured"), (True, "measured")])
def test_the_floor_of_a_gpu_is_given_with_a_share_that_says_what_it_is(measured, word):
    plan = sample()
    info = plan.info | {"device": "cuda:0", "considered": {"cpu": 4e-3}, "considered_by": "model"}
    text = explain("title", info | {"measured": ["cpu"] if measured else []}, (1e-3, "launch"))
    assert "  floor     1.000 ms a product (launch)\n" in text
    assert text.endswith(f"  share     25 % of the floor's speed, {word}")


def test_the_only_system_comes_with_its_time():
    info = sample().info | {"considered": {"cpu": 4e-3}, "considered_by": "only"}
    text = explain("title", info, (1e-3, "launch"))
    assert "only system that can serve this product: predicted 4.000 ms a product" in text


@pytest.mark.parametrize("name", MATRICES)
def test_every_matrix_can_be_explained_and_so_can_its_transpose(name):
    plan = st.plan(csr_of(MATRICES[name]()), 3)
    assert "estimate" in lines_of(plan)
    assert "estimate" in lines_of(plan.T)

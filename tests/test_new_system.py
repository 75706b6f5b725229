"""A system that is registered joins everything without another edit (``toy_system.py``)."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tools.checkers import TOOLS, checker
from typer.testing import CliRunner

import sparsetile as st
from sparsetile.bench.expansion import expand
from sparsetile.bench.suites import load_suite
from sparsetile.cli.app import app
from sparsetile.systems import SYSTEMS
from sparsetile.systems.registry import register, unregister
from tests.bench.files import write_matrix
from tests.contracts.cases import assert_close, csr_of, random_matrix
from tests.contracts.subjects import subjects
from tests.plans import said

ROOT = Path(__file__).resolve().parents[1]
CSR = csr_of(random_matrix(60, 50, 0.2))


@pytest.fixture
def toy() -> Iterator[str]:
    """The toy system, registered for one test."""
    from tests.toy_system import TOY

    unregister(TOY.name)  # the import registers it once a process
    register(TOY)
    yield TOY.name
    unregister(TOY.name)


def test_auto_takes_it_where_it_is_predicted_fastest(toy):
    plan = st.plan(CSR, 8)
    assert plan.system == toy
    assert plan.info["considered"][toy] == 1e-9
    on_host = {name for name, system in SYSTEMS.items() if "cpu" in system.devices}
    assert toy in on_host and plan.info["considered"].keys() == on_host
    B = torch.randn(50, 8)
    assert_close(plan @ B, CSR, B)


def test_explain_says_what_was_predicted_for_it(toy):
    text = st.plan(CSR, 8).explain()
    assert re.search(r"^  toy +chosen: predicted 0\.000 ms a product$", text, re.M)
    assert re.search(r"^  cpu +slower: predicted ", text, re.M)
    named = st.plan(CSR, 8, system="cpu")
    assert named.info["considered"] == {}, "nothing is predicted where nothing is chosen"
    assert "cpu       asked for by name" in named.explain()


def test_it_is_measured_with_the_others(toy):
    considered = st.plan(CSR, 8, tune="measure").info["considered"]
    assert toy in considered and all(seconds > 0 for seconds in considered.values())


def test_it_has_a_row_in_the_table_and_on_the_command_line(toy):
    assert toy in {row["name"] for row in st.systems()}
    shown = CliRunner().invoke(app, ["systems"])
    assert shown.exit_code == 0 and "toy" in shown.output


def test_its_plans_are_saved_and_loaded(toy, tmp_path):
    plan = st.plan(CSR, 8, system=toy)
    plan.save(tmp_path / "toy.safetensors")
    B = torch.randn(50, 8)
    assert torch.equal(st.load_plan(tmp_path / "toy.safetensors") @ B, plan @ B)


def test_gradients_flow_through_it(toy):
    csr = csr_of(random_matrix(9, 7, 0.4), dtype=torch.float64)
    plan = st.plan(csr, 3, system=toy)
    B = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda b: plan @ b, (B,))


def test_benchmarks_measure_it_where_all_systems_are_measured(toy, tmp_path):
    write_matrix(tmp_path, "small")
    suite = tmp_path / "every.toml"
    suite.write_text('matrices = ["small"]\nn = [8]\ndevice = "cpu"\n')
    expanded = expand(load_suite(str(suite)), data=tmp_path, device="cpu")
    assert toy in {entry.system for entry in expanded.entries}


def test_checkers_watch_the_kernels_that_it_launches(toy, monkeypatch):
    monkeypatch.setattr(type(SYSTEMS[toy]), "kernels", ("spmm_bittcf",))
    assert all(toy in checker(tool).systems for tool in TOOLS)


def test_contract_suites_run_it(toy):
    assert toy in [str(subject) for subject in subjects()]


def test_it_passes_the_contract_of_every_system():
    """In a process of its own, where it is registered before the suite is collected."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.toy_system", "-k", "toy and cpu"]
    command += ["-p", "no:cacheprovider", "-n", "0", "tests/contracts/test_systems.py"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    found = re.search(r"(\d+) passed", ran.stdout)
    assert ran.returncode == 0 and found is not None, ran.stdout[-3000:]
    assert int(found.group(1)) >= 80


def test_a_name_is_registered_once():
    text = said(ValueError, lambda: register(SYSTEMS["cpu"]))
    assert text == (
        "register: system.name must be a name that no system has, got 'cpu'. "
        "Choose another name, or call unregister first."
    )

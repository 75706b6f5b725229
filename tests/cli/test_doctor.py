"""``sparsetile doctor``: findings, advice and exit code."""

from __future__ import annotations

import importlib.metadata
from types import SimpleNamespace

import pytest
import torch

from sparsetile.cli import doctor as module
from sparsetile.core.errors import CompileError
from tests.cli.conftest import Cli


@pytest.fixture(autouse=True)
def machine(monkeypatch, no_gpu) -> SimpleNamespace:
    """A machine without a GPU: its driver, and what is wrong with its compiler."""
    found = SimpleNamespace(driver=None, compiler=module.compiler_available())
    monkeypatch.setattr(module, "driver_version", lambda: found.driver)
    monkeypatch.setattr(module, "compiler_available", lambda: found.compiler)
    return found


def findings(outcome) -> dict[str, dict[str, str]]:
    return {finding["name"]: finding for finding in outcome.json["findings"]}


@pytest.mark.usefixtures("quick")
def test_without_a_gpu_everything_possible_works_and_the_rest_is_explained(cli: Cli):
    outcome = cli("doctor")
    assert outcome.code == 0
    for name in ("Python", "torch", "numba", "scipy", "cuda-core", "NVRTC", "SPARSETILE_CACHE_DIR"):
        assert name in outcome.out
    assert "NVIDIA driver missing: no GPU can be used; kernels still compile" in outcome.out
    assert "GPU missing: plan, spmm and every command but `verify` work on the CPU" in outcome.out
    assert outcome.err.endswith("sparsetile: everything that is possible here works\n")


def test_it_really_compiles_and_multiplies(cli: Cli):
    outcome = cli("doctor", "--json")
    found = findings(outcome)
    assert outcome.code == 0 and outcome.json["ok"] is True
    assert found["test compile"]["status"] == "ok" and "sm_90a" in found["test compile"]["detail"]
    assert "registers" in found["test compile"]["detail"]
    assert "of the error bound" in found["product on the CPU"]["detail"]
    assert found["GPU"]["status"] == "missing" and found["GPU"]["advice"]


@pytest.fixture
def quick(compiler) -> None:
    """Compile nothing, which is the slow part."""
    made = SimpleNamespace(seconds=0.1, resources=SimpleNamespace(registers=40))
    compiler(module, lambda *source, **options: made)


def installed_without(monkeypatch, *packages: str) -> None:
    """These packages are not there."""
    version = importlib.metadata.version

    def found(name: str) -> str:
        if name in packages:
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", found)


def test_a_compile_that_fails_is_exit_code_1(cli: Cli, compiler):
    def broken(*args: object, **options: object) -> None:
        raise CompileError("compile: spmm_csr must compile,\n got an NVRTC error.")

    compiler(module, broken)
    outcome = cli("doctor", "--json")
    assert outcome.code == 1 and outcome.json["ok"] is False
    detail = findings(outcome)["test compile"]["detail"]
    assert detail == "CompileError: compile: spmm_csr must compile, got an NVRTC error."


@pytest.mark.usefixtures("quick")
def test_a_wrong_product_is_exit_code_1(cli: Cli, monkeypatch):
    monkeypatch.setattr(module.sparsetile.Plan, "__matmul__", lambda plan, B: plan.run(B) + 1e-3)
    outcome = cli("doctor")
    assert outcome.code == 1
    assert "error bounds" in outcome.out
    assert "1 of" in outcome.err and "checks failed" in outcome.err


def test_no_compiler_installed_is_no_failure_and_says_what_works(cli: Cli, monkeypatch, machine):
    machine.compiler = "ImportError: no module cuda"
    installed_without(monkeypatch, "cuda-core", "cuda-bindings")
    outcome = cli("doctor", "--json")
    found = findings(outcome)
    assert outcome.code == 0
    assert found["cuda-core"]["status"] == found["NVRTC"]["status"] == "missing"
    assert "products on the CPU" in found["NVRTC"]["advice"]


def test_a_compiler_that_is_installed_but_does_not_load_is_a_failure(cli: Cli, machine):
    machine.compiler = "OSError: libnvrtc.so"
    outcome = cli("doctor", "--json")
    assert outcome.code == 1
    assert findings(outcome)["NVRTC"]["detail"] == "does not load: OSError: libnvrtc.so"


@pytest.mark.usefixtures("quick")
def test_a_missing_dependency_is_a_failure(cli: Cli, monkeypatch):
    installed_without(monkeypatch, "numba")
    outcome = cli("doctor", "--json")
    assert outcome.code == 1
    assert findings(outcome)["numba"]["advice"].startswith("reinstall sparsetile")


@pytest.mark.usefixtures("quick")
def test_a_driver_with_a_torch_that_cannot_use_it_is_explained(cli: Cli, monkeypatch, machine):
    machine.driver = "570.1"
    monkeypatch.setattr(torch.version, "cuda", None)
    found = findings(cli("doctor", "--json"))
    assert found["NVIDIA driver"]["detail"] == "570.1"
    assert found["GPU"]["detail"] == "there is a driver, but torch was built without CUDA"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    found = findings(cli("doctor", "--json"))
    assert found["GPU"]["detail"] == "there is a driver, but torch finds no GPU it can use"


@pytest.mark.usefixtures("quick")
def test_a_cache_that_cannot_be_written_is_no_failure(cli: Cli, tmp_path, environment):
    (tmp_path / "file").write_text("")
    environment(SPARSETILE_CACHE_DIR=tmp_path / "file" / "kernels")
    outcome = cli("doctor", "--json")
    assert outcome.code == 0
    assert findings(outcome)["kernel cache"]["status"] == "missing"
    assert "SPARSETILE_CACHE_DIR" in findings(outcome)["kernel cache"]["advice"]


@pytest.mark.usefixtures("quick")
def test_a_setting_that_makes_no_sense_is_a_failure(cli: Cli, environment):
    environment(SPARSETILE_CACHE_MEGABYTES="-3")
    outcome = cli("doctor", "--json")
    assert outcome.code == 1
    assert "positive whole number" in findings(outcome)["settings"]["detail"]

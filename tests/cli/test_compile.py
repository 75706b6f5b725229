"""``sparsetile compile``: the real compiler on a few configurations, without a GPU."""

from __future__ import annotations

import dataclasses
from itertools import islice
from typing import Any

import pytest

from sparsetile.cli import compile as module
from sparsetile.jit import Compiled, Resources, compile_source, nvrtc_version
from sparsetile.kernels import KERNELS, KernelSpec
from tests.cli.conftest import Cli, assert_refused


def few(name: str, count: int, **changes: Any) -> KernelSpec:
    """The kernel ``name`` with its first ``count`` configurations only."""
    configs = KERNELS[name].configs
    return dataclasses.replace(KERNELS[name], configs=lambda: islice(configs(), count), **changes)


@pytest.fixture
def kernels(constants) -> dict[str, KernelSpec]:
    some = {"spmm_csr": few("spmm_csr", 2), "sddmm_csr": few("sddmm_csr", 1)}
    constants(module, KERNELS=some)
    return some


def test_it_compiles_every_kernel_then_finds_them_in_the_cache(cli: Cli, kernels):
    words = ("compile", "--arch", "sm_90a", "--jobs", 2, "--json")
    first, again = cli(*words), cli(*words)
    assert first.code == again.code == 0
    assert first.err == again.err == ""
    assert [row["kernel"] for row in first.json] == ["spmm_csr", "spmm_csr", "sddmm_csr"]
    for cold, warm in zip(first.json, again.json, strict=True):
        assert cold["ok"] and not cold["from_cache"] and cold["seconds"] > 0
        assert cold["registers"] > 0 and cold["spill_store_bytes"] == 0 and cold["cubin_bytes"] > 0
        assert warm["from_cache"] and warm["registers"] == cold["registers"]


def test_the_table_has_a_row_per_kernel_or_per_configuration(cli: Cli, kernels):
    words = ("compile", "--arch", "sm_80", "--arch", "sm_89", "--kernel", "spmm_csr")
    summary, each = cli(*words), cli(*words, "--each")
    assert summary.code == each.code == 0
    rows = [line.split() for line in summary.out.splitlines()[2:]]
    assert [row[:3] for row in rows] == [["spmm_csr", "sm_80", "2"], ["spmm_csr", "sm_89", "2"]]
    assert len(each.out.splitlines()[2:]) == 4 and "kWeighted=true" in each.out


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_every_architecture_is_the_default(cli: Cli, kernels, compiler):
    compiler(module, pretend(Resources(40, 0, 0, 0, 0)))
    rows = cli("compile", "--kernel", "sddmm_csr", "--json").json
    assert [row["arch"] for row in rows] == ["sm_80", "sm_89", "sm_90a"]


def test_a_kernel_that_does_not_compile_is_exit_code_1_with_the_log(cli: Cli, constants):
    broken = dataclasses.replace(few("spmm_csr", 1), configs=lambda: iter([{"kVec": 4}]))
    constants(module, KERNELS={"spmm_csr": broken, "sddmm_csr": few("sddmm_csr", 1)})
    outcome = cli("compile", "--arch", "sm_90a")
    assert outcome.code == 1
    rows = [line.split() for line in outcome.out.splitlines()[2:]]
    assert (rows[0][-1], rows[1][-1]) == ("FAILED", "ok")  # the others are still compiled
    assert "sparsetile: error: compile: spmm_csr[" in outcome.err and "error:" in outcome.err


def pretend(resources: Resources):
    def compiler(source, arch: str) -> Compiled:
        return Compiled(source, arch, b"cubin", resources, 0.1, False)

    return compiler


@pytest.mark.parametrize(("allowed", "told"), [(0, True), (15, True), (16, False)])
@pytest.mark.parametrize("form", ["table", "--each", "--json"])
def test_spills_are_reported_and_no_failure(
    cli: Cli, allowed: int, told, form: str, constants, compiler
):
    """An older NVRTC spills where the project's own does not; its record is what is checked."""
    spec = few("sddmm_csr", 1, allowed_spills=allowed)
    constants(module, KERNELS={"sddmm_csr": spec})
    compiler(module, pretend(Resources(255, 16, 8, 0, 0)))
    outcome = cli("compile", "--arch", "sm_90a", *([] if form == "table" else [form]))
    assert outcome.code == 0
    line = (
        f"sparsetile: registers spill in 1 of 1 configurations with NVRTC {nvrtc_version()}: slower"
    )
    assert outcome.err.startswith(line) if told else outcome.err == ""
    assert ("--each lists them" in outcome.err) is (told and form == "table")
    if form == "--json":
        assert outcome.json[0]["ok"] and outcome.json[0]["spill_store_bytes"] == 16
    else:
        assert outcome.out.splitlines()[2].endswith("ok") and "FAILED" not in outcome.out


def test_a_kernel_that_fails_is_exit_code_1_beside_others_that_spill(cli: Cli, constants, compiler):
    broken = dataclasses.replace(few("spmm_csr", 1), configs=lambda: iter([{"kVec": 4}]))
    constants(module, KERNELS={"spmm_csr": broken, "sddmm_csr": few("sddmm_csr", 1)})
    spills, real = pretend(Resources(255, 16, 8, 0, 0)), module.compile_source

    def both(source: Any, arch: str) -> Compiled:
        return (real if source.label.startswith("spmm_csr") else spills)(source, arch)

    compiler(module, both)
    outcome = cli("compile", "--arch", "sm_90a")
    assert outcome.code == 1
    assert (
        "registers spill in 1 of 2 configurations" in outcome.err
        and "error: compile: spmm_csr[" in outcome.err
    )


def test_bad_usage_is_one_line(cli: Cli, kernels):
    assert_refused(cli("compile", "--kernel", "magic"), "compile: --kernel must be one of")
    assert_refused(cli("compile", "--arch", "volta"), "compile: arch must be a name such as sm_80")


def test_an_architecture_that_the_compiler_does_not_know_is_one_line(cli: Cli):
    assert_refused(
        cli("compile", "--arch", "sm_90a", "--arch", "sm_12", "--kernel", "spmm_csr"),
        "compile: --arch must be one that NVRTC knows, such as sm_80", "got sm_12.",
    )  # fmt: skip


def test_an_architecture_that_no_kernel_is_written_for_is_refused(cli: Cli, constants):
    only = few("spmm_csr", 1, architectures=("sm_90a",))
    constants(module, KERNELS={"spmm_csr": only})
    assert_refused(
        cli("compile", "--arch", "sm_80"),
        "compile: --arch must be one that the kernel is written for",
    )


@pytest.mark.usefixtures("no_gpu")
def test_a_kernel_of_one_architecture_is_compiled_for_that_one_alone(cli: Cli, constants, compiler):
    compiler(module, pretend(Resources(40, 0, 0, 0, 0)))
    both = {"spmm_bcsr": few("spmm_bcsr", 1), "sddmm_csr": few("sddmm_csr", 1)}
    constants(module, KERNELS=both)
    rows = [(row["kernel"], row["arch"]) for row in cli("compile", "--json").json]
    assert rows == [
        ("spmm_bcsr", "sm_90a"),
        ("sddmm_csr", "sm_80"), ("sddmm_csr", "sm_89"), ("sddmm_csr", "sm_90a"),
    ]  # fmt: skip
    assert_refused(
        cli("compile", "--kernel", "spmm_bcsr", "--arch", "sm_80"),
        "compile: --arch must be one that the kernel is written for, got ['sm_80'].",
    )


def test_a_machine_without_the_compiler_says_so(cli: Cli, kernels, monkeypatch):
    monkeypatch.setattr(module, "compiler_available", lambda: "ImportError: no nvrtc")
    assert_refused(
        cli("compile"), "compile: the NVRTC compiler must load, got ImportError: no nvrtc."
    )


def test_the_compiler_used_here_is_the_library_s_own():
    assert module.compile_source is compile_source

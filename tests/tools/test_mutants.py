"""The device mutations: each applies to today's sources, and mutants compile to other code."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from tools.mutants import apply, compile_mutant, kernels_with, mutated
from tools.mutate import LEAST, main
from tools.mutations import MUTATIONS, SUITES, Mutation, Suite
from tools.record import ROOT

from sparsetile.jit.source import DEVICE_TREE
from sparsetile.kernels import KERNELS
from tools import mutants, mutate

FILE = "ptx/ptx.cuh"
DEFINED = Mutation(FILE, "#pragma once", "#pragma once\n#define FAIL", "nothing", "csr")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"before": "no such fragment"}, "exactly once, got 0 times"),
        ({"before": "int"}, "exactly once, got"),
        ({"file": "ptx/nothing.cuh"}, "in ptx/nothing.cuh exactly once, got 0 times"),
        ({"after": "#pragma once  // a comment"}, "must be code, got a comment or white space"),
    ],
)
def test_a_fragment_that_is_not_there_once_or_no_code_is_refused(tmp_path, changes, text):
    with pytest.raises(ValueError) as caught:
        apply(replace(DEFINED, **changes), tmp_path / "tree")
    assert text in str(caught.value) and "tools/mutations.py" in str(caught.value)


def files_of(tree: Path) -> set[str]:
    """Files of a device tree by their paths in it."""
    return {path.relative_to(tree).as_posix() for path in tree.rglob("*.cu*")}


def test_only_the_named_file_of_the_copy_differs(tmp_path: Path):
    tree = apply(DEFINED, tmp_path / "tree")
    names = files_of(DEVICE_TREE)
    assert files_of(tree) == names
    differing = {
        name for name in names if (tree / name).read_bytes() != (DEVICE_TREE / name).read_bytes()
    }
    assert differing == {FILE}


def test_kernels_are_found_through_their_includes():
    assert kernels_with("rows/spmm_csr.cu") == ["spmm_csr"]
    assert set(kernels_with("rows/row_items.cuh")) == {
        "spmm_csr", "spmm_direct", "spmm_rstile", "spmm_brp", "spmm_half",
    }  # fmt: skip
    assert set(kernels_with(FILE)) == set(KERNELS)
    assert set(kernels_with("mma/wgmma.cuh")) < set(KERNELS)


# -- The mutations themselves


def test_there_are_enough_mutations_and_each_is_another():
    assert len(MUTATIONS) >= LEAST
    assert min(Counter(each.suite for each in MUTATIONS).values()) >= 3
    assert len({(each.file, each.before, each.after) for each in MUTATIONS}) == len(MUTATIONS)


def test_every_file_of_device_code_has_a_mutation():
    assert {each.file for each in MUTATIONS} == files_of(DEVICE_TREE)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda each: each.name)
def test_each_mutation_applies_to_today_s_sources(mutation: Mutation):
    mutated(mutation)
    assert mutation.suite in SUITES and mutation.breaks
    assert "\n" not in mutation.before, "short and local"


@pytest.mark.parametrize("suite", SUITES.values(), ids=SUITES)
def test_the_files_of_each_suite_exist(suite: Suite):
    assert suite.tests
    for name in suite.tests:
        assert (ROOT / name).is_file(), name
    file, _, test = suite.first.partition("::")
    assert not file or (file in suite.tests and f"def {test}(" in (ROOT / file).read_text())


def configurations(mutation: Mutation) -> int:
    """How many are compiled at most to see what the mutation changes."""
    return sum(len(list(KERNELS[name].configs())) for name in kernels_with(mutation.file))


def test_a_sample_of_the_mutants_compiles_and_differs():
    """Another one each time, of kernels with few configurations; ``python -m tools.mutate
    --compile`` does so for all. Of a kernel with hundreds it would take minutes."""
    quick = [each for each in MUTATIONS if configurations(each) <= 12]
    for mutation in random.SystemRandom().sample(quick, 1):
        assert compile_mutant(mutation), mutation.name


def test_a_mutant_that_changes_nothing_is_found():
    include = '#include "mma/mma.cuh"'
    unused = f"{include}\nstruct Unused {{}};"
    mutation = Mutation("pack/tf32_operand.cu", include, unused, "nothing", "bcsr")
    assert compile_mutant(mutation) == ""


def test_all_mutants_can_be_compiled_without_a_gpu(monkeypatch, capsys, constants):
    labels = iter(["a[]", ""])
    constants(mutate, MUTATIONS=MUTATIONS[:2])
    monkeypatch.setattr(mutants, "compile_mutant", lambda mutation: next(labels))
    assert main(["--compile", "--parallel", "1"]) == 1
    shown = capsys.readouterr().err
    assert "compiles" in shown and "changes no code of the kernels compiled" in shown

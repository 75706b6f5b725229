"""Which part of the code a GPU test belongs to: by its folder, its parameters, its file."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.digest import PACKAGE
from tools.gpu_tests import GpuTests

from tests.today import gpu_tests_of_today


@pytest.mark.parametrize(
    "test, parts",
    [
        ("tests/a.py::test_a[brp-1x4-cuda]", "brp"),
        ("tests/a.py::test_a[gradient-acc]", "acc"),
        ("tests/a.py::test_a[acc-half]", "acc half"),
        ("tests/systems/wcsr/test_a.py::test_a", "wcsr"),
        ("tests/systems/wcsr/test_a.py::TestOnGpu::test_a[acc]", "acc wcsr"),
        # Words in a parameter, and names that no system of a GPU has, do not count.
        ("tests/a.py::test_a[one dense row]", ""),
        ("tests/a.py::test_a[cpu-cuda]", ""),
        ("tests/a.py::test_a", ""),
        ("tests/engines/test_library.py::test_a[False]", "cusparse dense layers"),
        # Files of this checkout, by what they import or name.
        ("tests/contracts/test_gpu_blocks.py::test_a[32]", "bcsr csr layers"),
        ("tests/contracts/test_gpu_bmat.py::test_a[32]", "csr voltrix"),
        ("tests/contracts/test_gpu_dense.py::test_a", "dense"),
        ("tests/systems/test_brp_windows.py::test_a[half full]", "brp"),
        ("tests/layers/test_normalise.py::test_a", "layers"),
    ],
)
def test_a_test_belongs_to_what_it_names(test: str, parts: str):
    assert gpu_tests_of_today().parts(test) == set(parts.split())


@pytest.mark.parametrize(
    "text, parts",
    [
        ("", ""),
        ("import sparsetile as st\n", ""),
        ("plan(A, system='rsh')\n", "rsh"),
        ("'rsh is no name alone'\n", ""),
        ("from sparsetile.kernels.wcsr import SPMM_WCSR\n", "wcsr"),
        ("from sparsetile.kernels import bittcf\n", "acc wcsr"),
        ("from sparsetile.systems.acc import runner\n", "acc"),
        ("from sparsetile.engines.rows.runner import RowRunner\n", ""),
        ("from sparsetile.nn import SparseLinear\n", "layers"),
        ("from tests.helper import A\n", "half"),
        ("primitive('around')\n", "voltrix"),
    ],
)
def test_a_file_belongs_to_the_systems_that_it_uses(tmp_path: Path, text: str, parts: str):
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "helper.py").write_text("from sparsetile.kernels.half import COPY_DTYPE\n")
    (folder / "around.cu").write_text('#include "mma/bmat.cuh"\n')
    (folder / "test_a.py").write_text(text)
    assert GpuTests(tmp_path, PACKAGE).parts("tests/test_a.py::test_b[1]") == set(parts.split())


def test_tests_of_systems_of_the_cpu_need_no_gpu():
    today = gpu_tests_of_today()
    assert not today.needs_gpu("tests/a.py::test_a[cpu-cuda]")
    assert today.needs_gpu("tests/a.py::test_a[csr-cuda]") and today.needs_gpu("tests/a.py::b")

"""Kernels without WGMMA compile for Blackwell, and for sm_86: nothing of it was run there.

Spills are allowed: they cost time on GPUs that nobody measured, not results.
"""

from __future__ import annotations

import pytest

from sparsetile.jit import compile_source
from sparsetile.kernels import KERNELS
from tests.kernels.ptxas import drawn

WGMMA = {"spmm_bcsr", "spmm_wcsr", "join_wcsr", "redo_wcsr", "redo_windows", "tf32_operand"}


@pytest.mark.parametrize("arch", ["sm_86", "sm_100a", "sm_120a"])
def test_kernels_compile_for_gpus_that_were_not_at_hand(arch):
    able = [spec for spec in KERNELS.values() if spec.runs_on(arch)]
    for spec in drawn(able, 3):
        (config,) = drawn(list(spec.configs()), 1)
        found = compile_source(spec.source(config), arch)
        assert found.resources.registers > 0, found.source.label
        # The hardware's limit; a kernel that needs more does not launch.
        assert found.resources.registers <= 255


def test_only_kernels_of_wgmma_and_older_gpus_are_left_out():
    for arch in ("sm_100a", "sm_120a"):
        left_out = {name for name, spec in KERNELS.items() if not spec.runs_on(arch)}
        assert left_out <= WGMMA and "spmm_bcsr" in left_out
    assert "spmm_bmat" in {n for n, spec in KERNELS.items() if not spec.runs_on("sm_86")}

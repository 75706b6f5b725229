"""Every kernel around a header compiles; no GPU is needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparsetile.jit import compile_source
from tests.kernels.device.epilogue import sources as epilogue
from tests.kernels.device.mma import sources as mma
from tests.kernels.device.pipeline import sources as pipeline
from tests.kernels.device.rows import sources as rows
from tests.kernels.device.windows import sources as windows
from tests.kernels.ptxas import drawn

SOURCES = tuple(
    source for each in (mma, pipeline, epilogue, rows, windows) for source in each.SOURCES
)


@pytest.mark.parametrize("file", sorted({source.file for source in SOURCES}))
def test_compiles_without_spills(file):
    for source in drawn([each for each in SOURCES if each.file == file], 1):
        assert not compile_source(source, "sm_90a").resources.spills, source.label


def test_every_kernel_beside_these_tests_is_compiled():
    files = set(Path(__file__).parent.rglob("*.cu"))
    assert files == {source.path for source in SOURCES}

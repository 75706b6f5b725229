"""Every configuration of every kernel compiles for every architecture, within its registers.

No GPU is needed: a kernel that would not compile or that spills on a user's machine fails here.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sparsetile.jit import ARCHITECTURES, Compiled, compile_source
from sparsetile.kernels import KERNELS, KernelSpec

JOBS = [(name, arch) for name in KERNELS for arch in ARCHITECTURES if KERNELS[name].runs_on(arch)]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cold cache for all of these tests, so that nothing is vouched for by an earlier run."""
    folder = tmp_path_factory.mktemp("kernels")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SPARSETILE_CACHE_DIR", str(folder))
        yield folder


def spilled_bytes(compiled: Compiled) -> int:
    return max(compiled.resources.spill_store_bytes, compiled.resources.spill_load_bytes)


def compile_all(spec: KernelSpec, arch: str) -> list[Compiled]:
    with ThreadPoolExecutor(2) as pool:
        return list(
            pool.map(lambda config: compile_source(spec.source(config), arch), spec.configs())
        )


@pytest.mark.parametrize("name, arch", JOBS)
def test_every_configuration_compiles_without_unlisted_spills(name: str, arch: str):
    spec = KERNELS[name]
    found = compile_all(spec, arch)
    assert found, "a kernel has configurations"
    assert all(compiled.resources.registers > 0 for compiled in found)
    spilling = {
        compiled.source.label: spilled_bytes(compiled)
        for compiled in found
        if spilled_bytes(compiled) > spec.allowed_spills.get(compiled.source.label, 0)
    }
    assert spilling == {}


@pytest.mark.parametrize("name", KERNELS)
def test_listed_spills_belong_to_configurations_that_exist(name: str):
    spec = KERNELS[name]
    labels = {spec.source(config).label for config in spec.configs()}
    assert spec.allowed_spills.keys() <= labels

"""What tile systems do with more columns than the slabs of one grid hold."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sparsetile.engines.tiles import tile_runner as module
from sparsetile.launch.interface import Epilogue
from sparsetile.systems import SYSTEMS, runner
from tests.contracts.cases import csr_of, random_matrix
from tests.host import answer_on_host
from tests.systems.requests import request_for

F16 = torch.float16


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, fresh_runners: None, gpu_facts) -> list[tuple]:
    """Grids and parameters of launches on a GPU that is pretended."""
    gpu_facts()
    found: list[tuple] = []
    kernel = SimpleNamespace(
        launch=lambda grid, threads, stream, params, **_: found.append((grid, dict(params)))
    )
    answer_on_host(monkeypatch, module, stream=7, load=lambda spec, config, *rest: kernel)
    return found


@pytest.mark.parametrize("name", ["acc", "wcsr"])
def test_columns_beyond_a_grid_s_slabs_are_multiplied_in_parts(name, launched, constants):
    constants(module, MAX_SLABS=4)
    csr, n = csr_of(random_matrix(40, 30, 0.2), dtype=F16), 4096 + 24
    built = SYSTEMS[name].build(request_for(F16, csr=csr, n=n))
    work = runner(built.recipe)
    B, out = torch.ones(30, n, dtype=F16), torch.empty(40, n, dtype=F16)
    bias = torch.arange(float(n))
    work.spmm(built.tensors, csr.values, None, B, out, Epilogue(bias=bias))
    assert len(launched) > 1 and all(grid[1] <= 4 for grid, _ in launched)
    at = 0
    for _, params in launched:
        assert params["b"] == B.data_ptr() + 2 * at and params["c"] == out.data_ptr() + 2 * at
        assert params["bias"] == bias.data_ptr() + 4 * at
        assert params["c_row_stride"] == n and params["b_row_bytes"] == 2 * n
        at += params["n"]
    assert at == n
    assert work.prepare_launches(built.tensors, csr.values, None, B) is None

"""Pictures of a matrix: what is in the grids and the figure."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sparsetile.check import pictures
from sparsetile.check.pictures import density_grid, draw
from sparsetile.check.tiling import TILES
from sparsetile.cli.profile import profile
from sparsetile.data.generators import banded, random


@pytest.mark.parametrize("shape", [(1000, 1000), (7, 3000), (3000, 7), (20, 30), (1, 1)])
def test_every_entry_is_counted_in_the_cell_it_lies_in(shape: tuple[int, int]):
    csr = random(*shape, nnz=min(500, shape[0] * shape[1]), seed=2)
    grid = density_grid(csr, 100, flattest=0.25)
    assert max(grid.shape) <= 100 and int(grid.sum()) == csr.nnz
    assert min(grid.shape) == min(100 if shape[0] == shape[1] else 25, *shape)
    expected = torch.zeros_like(grid)
    for row, column in zip(csr.row_ids().tolist(), csr.indices.tolist(), strict=True):
        expected[row * grid.shape[0] // shape[0], column * grid.shape[1] // shape[1]] += 1
    assert torch.equal(grid, expected)


def test_a_small_matrix_is_drawn_entry_by_entry():
    grid = density_grid(banded(12, 1), 400)
    assert grid.shape == (12, 12) and int(grid.max()) == 1


@pytest.mark.parametrize("shape", [(300, 200), (30, 900), (0, 0)])
def test_the_figure_shows_the_matrix_and_the_tiles_of_every_format(
    shape: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []
    monkeypatch.setattr(pictures, "_draw_tiles", lambda _, tiled: drawn.extend(tiled))
    csr = random(*shape, nnz=min(900, shape[0] * shape[1]), seed=1)
    draw(csr, profile(csr), "a matrix", tmp_path / "a.svg")
    assert [stats.name for stats in drawn] == [name for name, *_ in TILES]
    monkeypatch.undo()
    draw(csr, profile(csr), "a matrix", tmp_path / "b.svg")
    without, whole = ((tmp_path / name).stat().st_size for name in ("a.svg", "b.svg"))
    assert whole > without + 2000

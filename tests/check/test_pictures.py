"""Pictures of a matrix: what is in the grids, the masks and the figure."""

from __future__ import annotations

import base64
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from sparsetile.check import pictures
from sparsetile.check.pictures import density_grid, draw, png_mask, spy_mask, tile_mask
from sparsetile.check.tiling import TILES, sample_rows, tile_stats
from sparsetile.cli.profile import profile
from sparsetile.data.generators import banded, random
from sparsetile.intake.csr import CSR
from tests.check.matrices import pattern_of


def _mask(uri: str) -> np.ndarray:
    """Read back the opacity of a mask."""
    raw = base64.b64decode(uri.partition(",")[2])
    width, height = struct.unpack(">II", raw[16:24])
    start = raw.index(b"IDAT")
    size = struct.unpack(">I", raw[start - 4 : start])[0]
    pixels = np.frombuffer(zlib.decompress(raw[start + 4 : start + 4 + size]), np.uint8)
    return pixels.reshape(height, 1 + 2 * width)[:, 2::2]


def test_a_spy_picture_keeps_a_single_entry_of_a_large_matrix_visible() -> None:
    indptr = torch.zeros(1_000_001, dtype=torch.int64)
    indptr[500_001:] = 1
    csr = CSR(indptr, torch.tensor([250_000], dtype=torch.int32), None, (1_000_000, 1_000_000))
    mask = _mask(spy_mask(csr, 100))
    assert mask.shape == (100, 100)
    assert np.argwhere(mask).tolist() == [[50, 25]]


def test_a_spy_picture_keeps_the_shape_of_a_rectangle() -> None:
    assert _mask(spy_mask(pattern_of(np.ones((10, 40))), 20)).shape == (5, 20)


def test_a_mask_holds_its_shade() -> None:
    assert _mask(png_mask(np.array([[0.0, 1.0], [0.5, 0.0]]))).tolist() == [[0, 255], [127, 0]]


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


def test_a_row_order_moves_the_rows_of_a_picture() -> None:
    rng = np.random.default_rng(3)
    dense = (rng.random((200, 70)) < 0.1).astype(np.float64)
    perm = torch.from_numpy(rng.permutation(200))
    moved = spy_mask(pattern_of(dense[perm.numpy()]), 50)
    assert moved == spy_mask(pattern_of(dense), 50, perm=perm)
    assert moved != spy_mask(pattern_of(dense), 50)


def test_a_picture_of_tiles_is_dark_where_they_are_full_and_empty_where_there_is_none() -> None:
    dense = np.zeros((32, 24))
    dense[:16] = 1  # three full tiles
    dense[20, 7] = 1  # one tile of a single entry
    mask = _mask(tile_mask(tile_stats(sample_rows(pattern_of(dense)), "16x8", 16, 8, True)))
    assert mask.shape == (2, 3)
    assert mask[0].tolist() == [255] * 3 and mask[1, 1:].tolist() == [0, 0] and 30 < mask[1, 0] < 90


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

"""Tiles and bytes by row order: counts against the packed format."""

from __future__ import annotations

import json

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from tools.tile_counts import STORAGES, Counts, count_tiles, main

from sparsetile.formats import BitTCF
from sparsetile.formats.column_pairs import distinct_pairs
from tests.contracts.cases import MATRICES, csr_of


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("shuffled", [False, True])
def test_tiles_and_bytes_are_those_of_the_packed_format(name, shuffled):
    csr = csr_of(MATRICES[name]())
    order = torch.randperm(csr.shape[0]) if shuffled else None
    packed, counts = BitTCF.pack(csr, order), count_tiles(csr, order)
    assert counts.tiles[8] == packed.tile_count
    assert STORAGES["BitTCF"](counts) == packed.bytes
    if csr.nnz:
        assert counts.nnz_per_tile == pytest.approx(packed.mean_tile_entries)
    for window, pairs in counts.pairs.items():
        assert pairs == distinct_pairs(csr, window, order)


def test_the_counts_of_a_full_matrix_are_known():
    counts = count_tiles(csr_of(sp.csr_array(np.ones((20, 20)))))
    assert counts == Counts(20, 400, {8: 60, 16: 40, 64: 20}, {8: 9, 16: 6, 64: 3})
    assert counts.nnz_per_tile == pytest.approx(400 / 9)


def test_the_bytes_of_every_format_are_those_of_its_arrays():
    """20 rows are 3 windows of 8 and 2 of 16; indices of 4 bytes."""
    counts = Counts(20, 400, {8: 60, 16: 40, 64: 20}, {8: 9, 16: 6, 64: 3})
    tiled = {"window offsets": 4 * 4, "tile offsets": 10 * 4, "columns": 9 * 8 * 4}
    wide = {"window offsets": 3 * 4, "tile offsets": 7 * 4, "columns": 6 * 8 * 4}
    expected = {
        "BitTCF": sum(tiled.values()) + 9 * 8,
        "CSR": 21 * 4 + 400 * 4,
        "COO": 400 * 4 * 2,
        "ME-TCF": sum(wide.values()) + 400,
        "ME-TCF 8x8": sum(tiled.values()) + 400,
        "TCF": 21 * 4 + 2 * 4 + 3 * 400 * 4,
    }
    assert {name: size(counts) for name, size in STORAGES.items()} == expected


def test_the_tool_prints_a_line_a_matrix_and_order(capsys):
    assert main(["gen:banded?rows=40&bandwidth=2", "--orders", "identity,rcm"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["order"] for line in lines] == ["identity", "rcm"]
    assert lines[0]["nnz"] == 194 and lines[0]["bytes"]["COO"] == 8 * 194
    with pytest.raises(ValueError, match="--orders must be one of"):
        main(["gen:banded?rows=40&bandwidth=2", "--orders", "spiral"])

"""Counts of very large matrices, made part by part: the same as at once."""

from __future__ import annotations

import importlib

import pytest
import torch

from sparsetile.formats.bcsr import count_row_blocks
from sparsetile.formats.bundles import RowBundles
from sparsetile.formats.column_pairs import distinct_pairs
from sparsetile.formats.window_split import count_columns
from sparsetile.intake.csr import CSR
from tests.contracts.cases import MATRICES, csr_of

module = importlib.import_module("sparsetile.formats.row_parts")


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("entries, ordered", [(1, True), (7, False), (100, True)])
def test_counts_are_those_of_the_whole(name: str, entries: int, ordered: bool, constants):
    csr: CSR = csr_of(MATRICES[name]())
    order = None
    if ordered:
        order = torch.randperm(csr.shape[0], generator=torch.Generator().manual_seed(1))
    whole = [count_columns(csr, order, height) for height in (8, 16)]
    pairs = [distinct_pairs(csr, height, order) for height in (1, 8, 16, 64)]
    blocks = count_row_blocks(csr, 32, order)
    constants(module, PART_ENTRIES=entries)
    for height, expected in zip((8, 16), whole, strict=True):
        found = count_columns(csr, order, height)
        for part in ("entries", "delta", "pairs"):
            assert torch.equal(getattr(found, part), getattr(expected, part)), part
    assert [distinct_pairs(csr, height, order) for height in (1, 8, 16, 64)] == pairs
    assert count_row_blocks(csr, 32, order) == blocks


def test_parts_are_whole_windows_and_cover_every_row(constants):
    csr = csr_of(MATRICES["odd sizes"]())
    constants(module, PART_ENTRIES=10)
    found = list(module.row_parts(csr, None, 8, overlap=8))
    assert len(found) > 2 and sum(own for own, _ in found) == csr.shape[0]
    assert all(own % 8 == 0 for own, _ in found[:-1])
    for own, part in found[:-1]:
        assert own <= part.shape[0] <= own + 8 and part.nnz == int(part.indptr[-1])


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("answer", [False, True])
def test_bundles_are_asked_about_the_same_counts(name: str, answer: bool, constants):
    csr: CSR = csr_of(MATRICES[name]())
    asked: list[tuple[int, ...]] = []

    def pays(*counts: int) -> bool:
        asked.append(counts)
        return answer

    whole = RowBundles.pack_if(csr, None, pays, 1.3)
    constants(module, PART_ENTRIES=10)
    parts = RowBundles.pack_if(csr, None, pays, 1.3)
    assert len(set(asked)) == 1 and (whole is None) == (parts is None) == (not answer)
    if whole is not None and parts is not None:
        assert torch.equal(whole.tagged, parts.tagged)

"""Kernels that pack and spread kept weights, on the host thread by thread."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from sparsetile.formats.entry_streams import pack_entries
from sparsetile.kernels.linear_entries import ENTRY_PARTS
from sparsetile.layers import masked_rows
from sparsetile.layers.masked_rows import pack_masked, spread_masked
from sparsetile.nn.masks import pack_bits
from tests.emulator.build import host_compiler
from tests.emulator.products import load_on_host

pytestmark = pytest.mark.skipif(host_compiler() is None, reason="no g++ here")

# Rows, columns, and the share of kept weights: many, few, all, none; odd widths; far columns.
CASES = [
    (70, 384, 0.5), (33, 137, 0.1), (5, 3000, 0.02), (40, 64, 1.0), (9, 50, 0.0), (1, 7, 0.6),
    (3, 1057, 0.3),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    load_on_host(monkeypatch, folder, masked_rows)


def drawn(rows: int, cols: int, share: float) -> tuple[Tensor, Tensor, Tensor]:
    """A dense weight, its mask and the mask's bits; row 0 keeps only the last column."""
    generator = torch.Generator().manual_seed(rows + cols)
    mask = torch.rand(rows, cols, generator=generator) < share
    if share < 1.0 and rows > 2:
        mask[0], mask[0, -1], mask[1] = False, True, False
    weight = torch.randn(rows, cols, generator=generator).bfloat16().where(mask, 0)
    return weight, mask, pack_bits(mask)


@pytest.mark.parametrize("rows, cols, share", CASES)
def test_weights_are_spread(rows, cols, share):
    weight, mask, bits = drawn(rows, cols, share)
    assert torch.equal(spread_masked(weight[mask], bits, cols), weight)


@pytest.mark.parametrize("parts", ENTRY_PARTS)
@pytest.mark.parametrize("rows, cols, share", CASES)
def test_packed_entries_are_those_of_torch_operations(rows, cols, share, parts):
    weight, mask, bits = drawn(rows, cols, share)
    found, wanted = pack_masked(weight[mask], bits, cols, parts), pack_entries(weight, mask, parts)
    assert found.steps == wanted.steps
    for name in ("stream", "offsets", "starts", "row_ids"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name


def test_bits_past_the_last_column_are_ignored():
    weight, mask, bits = drawn(20, 13, 0.5)
    bits[:, -1] |= 0xE0
    assert torch.equal(spread_masked(weight[mask], bits, 13), weight)
    assert torch.equal(pack_masked(weight[mask], bits, 13, 8).unpack(), weight.view(torch.int16))

"""Kernels that pack and spread kept weights, on the host thread by thread."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from sparsetile.formats.entry_streams import pack_entries
from sparsetile.kernels.linear_entries import ENTRY_PARTS
from sparsetile.layers import masked_rows
from sparsetile.layers.masked_rows import MaskedRows, pack_masked, spread_masked
from sparsetile.nn.masks import pack_bits
from tests.emulator.build import host_compiler
from tests.emulator.products import load_on_host
from tests.host import h200

pytestmark = pytest.mark.skipif(host_compiler() is None, reason="no g++ here")

# Rows, columns, and the share of kept weights: many, few, all, none; odd widths; far columns.
CASES = [
    (70, 384, 0.5), (33, 137, 0.1), (5, 3000, 0.02), (40, 64, 1.0), (9, 50, 0.0), (1, 7, 0.6),
    (3, 1057, 0.3),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    load_on_host(monkeypatch, folder, masked_rows, machine=h200)


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows, cols, share", CASES)
def test_whole_numbers_are_multiplied_exactly(rows, cols, share, dtype):
    _, mask, bits = drawn(rows, cols, share)
    bits[:, -1] |= 256 - (1 << (cols % 8)) if cols % 8 else 0  # ignored
    generator = torch.Generator().manual_seed(1)
    values = torch.randint(-7, 8, (rows, cols), generator=generator).where(mask, 0).to(dtype)
    product = MaskedRows(values[mask], bits, cols)
    for tokens in (1, 2, 3, 4):
        X = torch.randint(-2, 3, (tokens, cols), generator=generator).to(dtype)
        bias = None if tokens == 1 else torch.arange(rows).to(dtype)
        wanted = X.double() @ values.double().T + (0 if bias is None else bias)
        assert torch.equal(product(X, bias), wanted.to(dtype))


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_dropped_weights_are_zeros_that_are_multiplied(bad):
    mask = torch.rand(12, 264, generator=torch.Generator().manual_seed(0)) < 0.5
    mask[:2] = True
    weight = torch.ones(12, 264).bfloat16().where(mask, 0)
    X = torch.ones(2, 264).bfloat16()
    X[0, 7] = bad
    found = MaskedRows(weight[mask], pack_bits(mask), 264)(X, None)
    wanted = torch.nn.functional.linear(X.float(), weight.float()).bfloat16()
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num(nan=1.0), wanted.nan_to_num(nan=1.0))

"""Layers of single weights with a token or a few, entry by entry, on the host thread by thread."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from sparsetile.core.device import H200
from sparsetile.formats.entry_streams import pack_entries
from sparsetile.kernels.linear_entries import ENTRY_PARTS
from sparsetile.layers import entry_layer
from sparsetile.layers.entry_layer import EntryLayer
from tests.emulator.build import host_compiler
from tests.emulator.products import load_on_host

pytestmark = pytest.mark.skipif(host_compiler() is None, reason="no g++ here")


F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    load_on_host(monkeypatch, folder, entry_layer, machine=lambda device: H200)


def weight(rows: int, cols: int, density: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A weight of whole numbers and its mask."""
    generator = torch.Generator().manual_seed(rows + cols)
    mask = torch.rand(rows, cols, generator=generator) < density
    values = torch.randint(1, 8, (rows, cols), generator=generator)
    values *= torch.randint(0, 2, (rows, cols), generator=generator) * 2 - 1
    return (values * mask).to(dtype), mask


@pytest.mark.parametrize("parts", ENTRY_PARTS)
@pytest.mark.parametrize(
    "rows, cols, density, dtype",
    [(200, 384, 0.5, BF16), (17, 137, 0.9, F16), (70, 4096, 0.05, BF16), (33, 264, 0.0, F16)],
)
def test_whole_numbers_are_multiplied_exactly(rows, cols, density, dtype, parts):
    dense, mask = weight(rows, cols, density, dtype)
    layer = EntryLayer(pack_entries(dense, mask, parts), dtype)
    bias = torch.arange(rows) % 16 - 7.0
    for tokens, given in (
        (1, None),
        (1, dtype),
        (2, F32),
        (3, dtype),
        (4, None),
        (7, dtype),
        (8, None),
    ):
        X = torch.randint(-2, 3, (tokens, cols)).to(dtype)
        added = None if given is None else bias.to(given)
        wanted = X.double() @ dense.double().T + (0 if given is None else bias)
        assert torch.equal(layer(X, added), wanted.to(dtype))
        aside = torch.cat([X, X], 1)[:, 1 : cols + 1]  # not aligned to pairs
        wanted = aside.double() @ dense.double().T + (0 if given is None else bias)
        assert torch.equal(layer(aside, added), wanted.to(dtype))


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_inf_and_nan_meet_dropped_weights_as_in_the_dense_product(bad):
    dense, mask = weight(40, 264, 0.5, BF16)
    mask[:3], mask[5, 7] = True, True
    dense[:3] = 1.0
    dense[5, 7] = 0.0  # kept all the same
    layer = EntryLayer(pack_entries(dense, mask, 8), BF16)
    X = torch.ones(3, 264).to(BF16)
    X[0, 7], X[2, 7], X[2, 100] = bad, bad, 5.0
    wanted = torch.nn.functional.linear(X.float(), dense.float()).to(BF16)
    found = layer(X, None)
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num(nan=1.0), wanted.nan_to_num(nan=1.0))
    assert wanted[1].isfinite().all() and not wanted[0].isfinite().any()

"""Single weights as values and gaps: what is packed is found again, also some rows at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparsetile.formats import entry_streams
from sparsetile.formats.entry_streams import choose_parts, pack_entries
from sparsetile.kernels.linear_entries import ENTRY_PARTS


def drawn(rows: int, cols: int, density: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows + cols)
    mask = torch.rand(rows, cols, generator=generator) < density
    weight = torch.randn(rows, cols, generator=generator).bfloat16()
    return weight.where(mask, 0), mask


@pytest.mark.parametrize("parts", ENTRY_PARTS)
@pytest.mark.parametrize(
    "rows, cols, density",
    [(48, 384, 0.5), (17, 137, 0.9), (33, 264, 0.0), (16, 128, 1.0), (1, 8, 0.5), (70, 2304, 0.02),
     (0, 128, 0.5), (40, 1000, 0.1)],
)  # fmt: skip
def test_unpacking_returns_the_weight(rows, cols, density, parts, monkeypatch):
    weight, mask = drawn(rows, cols, density)
    whole = pack_entries(weight, mask, parts)
    assert torch.equal(whole.unpack(), weight.view(torch.int16))
    monkeypatch.setattr(entry_streams, "_AT_ONCE", 1)  # a row at a time
    pieces = pack_entries(weight, mask, parts)
    for name in ("stream", "offsets", "starts", "row_ids"):
        assert torch.equal(getattr(whole, name), getattr(pieces, name))


def test_far_weights_have_zeros_between():
    mask = torch.zeros(2, 64, dtype=torch.bool)
    mask[0, 0] = mask[0, 16] = mask[0, 33] = mask[1, 63] = True
    weight = torch.ones(2, 64).bfloat16().where(mask, 0)
    packed = pack_entries(weight, mask, 8)
    assert packed.row_ids[0, :3].tolist() == [0, 1, -1], "longer rows first"
    words = [int(word) & 0xFFFF for word in packed.stream[0, 256:260]]
    # Gaps 1, 16, 16 and 1; 16 three times, and 16; the rest fills up.
    assert words == [0x0FF0, 0x0000, 0xFFFF, 0x0000]
    values = packed.stream[0, :16].view(torch.bfloat16).tolist()
    assert values == [1, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0]
    assert packed.starts[0, 0, :3].tolist() == [-1, -1, 63]
    assert (packed.starts[0, 1:] == 63).all(), "parts without entries begin past the last column"


def test_fewer_weights_fit_into_the_same_memory():
    weight, mask = drawn(100, 520, 0.3)
    for parts in ENTRY_PARTS:
        packed = pack_entries(weight, mask, parts)
        address = packed.stream.data_ptr()
        for share in (1.0, 0.5, 0.1, 0.0):
            fewer = mask & (torch.rand(mask.shape) < share)
            other = (3 * weight).where(fewer, 0)
            assert packed.rewrite(pack_entries(other, fewer, parts))
            assert packed.stream.data_ptr() == address
            assert torch.equal(packed.unpack(), other.view(torch.int16))
        assert not packed.rewrite(pack_entries(weight, torch.ones_like(mask), parts))
        assert not packed.rewrite(pack_entries(weight[:50], mask[:50], parts))


def test_bytes():
    for density, most in ((0.5, 0.645), (0.3, 0.395), (0.1, 0.170)):
        weight, mask = drawn(512, 4096, density)
        assert pack_entries(weight, mask, 8).nbytes / weight.nbytes < most


def test_parts_of_a_row():
    assert choose_parts(14336, 132) == choose_parts(18944, 132) == 8
    assert choose_parts(4096, 132) == choose_parts(1, 132) == 16

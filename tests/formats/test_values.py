"""Rounding of values, case by case."""

from __future__ import annotations

import torch

from sparsetile.formats.values import round_tf32


def test_tf32_keeps_ten_bits_and_rounds_ties_to_even():
    step = 2.0**-10
    values = torch.tensor([1 + 0.51 * step, 1 + 0.5 * step, -1 - 1.5 * step, 3e38, -0.0])
    rounded = round_tf32(values)
    assert rounded[:3].tolist() == [1 + step, 1.0, -1 - 2 * step]
    assert abs(float(rounded[3]) / 3e38 - 1) <= 2.0**-11
    assert torch.equal(rounded.view(torch.int32) & 0x1FFF, torch.zeros(5, dtype=torch.int32))
    assert torch.signbit(rounded[4])
    special = torch.tensor([float("inf"), -float("inf"), float("nan")])
    assert torch.equal(round_tf32(special)[:2], special[:2])
    assert bool(round_tf32(special)[2].isnan())
    low = torch.tensor([0x7F800001], dtype=torch.int32).view(torch.float32)  # NaN by its last bit
    kept = round_tf32(low).view(torch.int32) & ~0x1FFF
    assert bool(kept.view(torch.float32).isnan())

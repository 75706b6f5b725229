"""``wcsr``: windows of 64 rows with strip offsets and margins, and their shares, decoded.

This proves the format (formats/wcsr.py, systems/wcsr) and its schedule (balance/windows.py), not
the kernel: see decoding.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparsetile.core import device
from tests.contracts.cases import MATRICES, random_matrix
from tests.kernels.decoding import Built, Pieces, bits, build, damaged, row_order, whole_numbers

HEIGHT, STRIPS = 64, 4  # rows of a window, and strips of sixteen rows in it
# Where tile column 0, 1, ... is stored among a tile's ids: even columns first.
STORED_AT = [0, 4, 1, 5, 2, 6, 3, 7]
MARGIN = 17  # tiles past the last that the kernel may read


def dense_tiles(built: Built, tiles: int) -> np.ndarray:
    """[tiles, 64, 8]: strip by strip, values in the order of its 128 bits."""
    first_value, values = built["strip_value_ptr"], built.packed
    strips = bits(built["bitmaps"][:tiles]).reshape(-1, 16, 8)
    dense = np.zeros(strips.shape)
    for strip, held in enumerate(strips):
        mine = slice(first_value[strip], first_value[strip + 1])
        assert mine.stop - mine.start == held.sum()
        dense[strip][held] = 1.0 if built.csr.values is None else values[mine]
    return dense.reshape(tiles, HEIGHT, 8)


def check_margin(built: Built, tiles: int) -> None:
    """Tiles past the last can be read: no bits, no values, column ids inside B."""
    assert built["columns"].shape == built["bitmaps"].shape == (tiles + MARGIN, 8)
    assert not built["columns"][tiles:].any() and not built["bitmaps"][tiles:].any()
    assert len(built["strip_value_ptr"]) == STRIPS * (tiles + MARGIN) + 1
    assert (built["strip_value_ptr"][STRIPS * tiles :] == built.csr.nnz).all()
    if built.csr.values is not None:
        assert built.packed.size >= built.csr.nnz and built.packed.size % 8 == 0


def decode(built: Built) -> None:
    offsets, tiles = built["window_row_ptr"], int(built["window_row_ptr"][-1])
    check_margin(built, tiles)
    columns = built["columns"][:tiles, STORED_AT]
    products = dense_tiles(built, tiles) @ built.B[columns]
    C = np.full((len(offsets) - 1, HEIGHT, built.B.shape[1]), np.nan)
    pieces = Pieces()

    def store(window: int, total: np.ndarray) -> None:
        assert np.isnan(C[window]).all(), "a window of C is stored once"
        C[window] = total

    firsts = built["first_items"].ravel()[: built.meta["workers"] + 1].tolist()
    assert (firsts[0], firsts[-1]) == (0, built.meta["items"]) and firsts == sorted(firsts)
    for window, first, end, slot in built["items"][: firsts[-1]].tolist():
        if slot >= 0:
            assert offsets[window] <= first < end <= offsets[window + 1]
            pieces.put(slot, window, products[first:end].sum(0))
        else:
            assert (slot, first, end) == (-1, offsets[window], offsets[window + 1])
            store(window, products[first:end].sum(0))
    for window, first, slots, _ in built["cuts"].tolist():
        store(window, sum(pieces.take(slot, window) for slot in range(first, first + slots)))
    pieces.done()
    for w in range(len(offsets) - 1):
        mine = columns[offsets[w] : offsets[w + 1]].ravel()
        distinct = np.unique(mine)
        padding = np.full(mine.size - distinct.size, mine.max(initial=0))
        assert np.array_equal(mine, [*distinct, *padding]), "the last column is repeated"
    assert np.array_equal(built["indptr"], built.csr.indptr)
    built.check(C.reshape(-1, C.shape[-1]), built["order"])


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("name", MATRICES)
def test_windows_decode_to_the_product(name, permuted):
    csr = whole_numbers(MATRICES[name](), pattern=permuted)
    decode(build("wcsr", csr, order=row_order(csr, permuted), ablation="tall"))


@pytest.mark.parametrize("l2_bytes", [2**26, 2**10], ids=["neighbours together", "dealt out"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_cut_windows_decode_to_the_product(dtype, l2_bytes, constants):
    small = device.Machine(**{**vars(device.H200), "processors": 7, "l2_bytes": l2_bytes})
    constants(device, H200=small)
    csr = whole_numbers(random_matrix(2000, 300, 0.03))
    built = build("wcsr", csr, n=128, dtype=dtype, ablation="tall")
    assert built.meta["workers"] == 7 and len(built["cuts"]) > 0
    decode(built)


def test_any_changed_element_is_noticed():
    csr = whole_numbers(random_matrix(300, 900, 0.05))
    built = build("wcsr", csr, order=row_order(csr, True), ablation="tall")
    assert len(built["cuts"]) > 1
    # A worker may as well take the first item of the next.
    for wrong in damaged(built, harmless=("first_items",)):
        with pytest.raises((AssertionError, IndexError, KeyError)):
            decode(wrong)

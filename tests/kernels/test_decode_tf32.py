"""The block kernel in TF32 replayed, with the copy of B that it multiplies."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from sparsetile.formats.bittcf import round_tf32
from sparsetile.kernels.bcsr import BLOCK, TF32_TILES, bcsr_config
from sparsetile.kernels.tf32_operand import TF32_OPERAND
from sparsetile.systems.shared import tf32_operand as tf32_operand
from sparsetile.systems.shared.tf32_operand import OperandCopies, columns_at_once, copy_stride
from tests.contracts.cases import MATRICES
from tests.kernels.replay import Machine, device_fields, host_letters
from tests.kernels.replay_bcsr import A_STEPS, BOX_BYTES, K_MAJOR_STEPS
from tests.kernels.replay_cases import BlockCase
from tests.kernels.replay_wgmma import Descriptor, box_places, descriptor
from tests.kernels.test_decode_bcsr import CORNERS, full_blocks
from tests.kernels.whole_numbers import operand, reference, whole_numbers

F32 = torch.float32
# Rounded up to 1 + 2^-10; the lower bits alone would be lost.
BETWEEN = 1 + 2.0**-11 + 2.0**-20


@pytest.fixture
def machine(block_machine: Machine) -> Machine:
    return block_machine


# -- the copy of B


def test_host_and_device_agree_on_the_copys_parameters():
    fields = device_fields(TF32_OPERAND)
    assert [letter for _, letter in fields] == host_letters(TF32_OPERAND)
    names = ["b", "to", "k_stride", "n_stride", "to_stride", "k", "n"]
    assert [name for name, _ in fields] == names


def copied(machine: Machine, B: Tensor) -> Tensor:
    machine.hold(B)
    address = OperandCopies().copy(B, 0, 0)
    k, n = B.shape
    stride = copy_stride(k)
    words = machine.array(address, np.uint32).data[: n * stride].reshape(n, stride)[:, :k]
    return torch.from_numpy(words.view(np.float32).copy()).T


LAYOUTS = {
    "row-major": (lambda k, n: torch.empty(k, -(-n // 4) * 4)[:, :n], False, 4),
    "rows not aligned": (lambda k, n: torch.empty(k, n | 1)[:, :n], False, 1),
    "K-major": (lambda k, n: torch.empty(n, -(-k // 4) * 4)[:, :k].T, True, 4),
    "K-major, not aligned": (lambda k, n: torch.empty(n, k | 1)[:, :k].T, True, 1),
    "address not aligned": (lambda k, n: torch.empty(k, n // 4 * 4 + 8)[:, 1 : n + 1], False, 1),
    "every other column": (lambda k, n: torch.empty(k, 2 * n)[:, ::2], False, 1),
}


@pytest.mark.parametrize("k, n", [(64, 64), (130, 71), (3, 200), (200, 3), (65, 129)])
@pytest.mark.parametrize("how", LAYOUTS)
def test_a_copy_is_b_rounded_whatever_its_strides(machine, how, k, n):
    make, k_major, vector = LAYOUTS[how]
    B = make(k, n).copy_(torch.randn(k, n))
    assert torch.equal(copied(machine, B), round_tf32(B.contiguous()))
    config = machine.configs[-1]
    assert config in list(TF32_OPERAND.configs())
    assert (config["kKMajor"], config["kVector"]) == (k_major, vector)


def test_a_copy_of_one_column_for_all_is_right(machine):
    B = torch.randn(70, 1).expand(70, 9)
    assert torch.equal(copied(machine, B), round_tf32(B.contiguous()))
    B = torch.randn(1, 9).expand(70, 9)
    assert torch.equal(copied(machine, B), round_tf32(B.contiguous()))


def test_a_copy_keeps_what_is_not_finite(machine):
    B = torch.tensor([[float("inf"), -float("inf"), float("nan"), 0.0]]).repeat(5, 1)
    found = copied(machine, B)
    assert torch.equal(found[:, [0, 1, 3]], B[:, [0, 1, 3]]) and bool(found[:, 2].isnan().all())


def test_copies_have_whole_slabs_of_columns_and_a_limit():
    assert columns_at_once(3584) == 2**28 // (4 * 3584) // 256 * 256
    assert columns_at_once(10**9) == 256 and columns_at_once(0) > 10**7
    assert copy_stride(0) == 0 and copy_stride(5) == 8


# -- copies against operands


@pytest.mark.parametrize("tile", TF32_TILES, ids=lambda tile: f"{tile.columns} columns")
@pytest.mark.parametrize("k_step", range(4))
def test_halves_of_a_block_and_of_its_rows_are_read_from_where_copies_put_them(tile, k_step):
    assert tile.stage_bytes % 1024 == 0 and tile.depth == 32
    k = slice(8 * k_step, 8 * k_step + 8)
    for stage in (1024, 1024 + tile.stage_bytes):
        put = box_places(stage, *tile.block_box, 4)
        found = Descriptor.of(descriptor(stage + k_step * A_STEPS[0], *A_STEPS[1:]))
        assert np.array_equal(found.k_major(np.arange(64)[:, None], np.arange(8), 4), put[:, k])
        put = box_places(stage + BOX_BYTES, *tile.box(True), 4)
        assert put.max() < stage + tile.stage_bytes
        for consumer in range(tile.columns // 128):
            start = stage + BOX_BYTES + consumer * 2 * BOX_BYTES + k_step * K_MAJOR_STEPS[0]
            found = Descriptor.of(descriptor(start, *K_MAJOR_STEPS[1:]))
            addresses = found.k_major(np.arange(128)[:, None], np.arange(8), 4)
            assert np.array_equal(addresses, put[128 * consumer : 128 * consumer + 128, k])


# -- whole products


@pytest.mark.parametrize("n", [1, 8, 13, 128, 136, 264, 520])
@pytest.mark.parametrize("k_major", [False, True])
def test_the_replay_of_full_blocks_is_their_product(wide, maps, n, k_major):
    for shape in (None, (200, 150), (193, 129)):
        csr = full_blocks(CORNERS, F32, shape)
        B = operand(csr, n, F32)
        B = B.T.contiguous().T if k_major else B
        case = BlockCase(wide, csr, n, F32)
        assert case.runner.any_strides and case.meta["exact"] is None
        assert torch.equal(case.spmm(B).double(), reference(csr, B))
        assert maps.known[0].box == (BLOCK, 32)
    tile = TF32_TILES[0] if n > 128 else TF32_TILES[1]
    assert wide.configs[-1] == bcsr_config(F32, tile, k_major=True)


def test_both_operands_are_rounded_not_cut_off(machine):
    csr = full_blocks([[1, 1]], F32)
    for a, b in ((BETWEEN, 3.0), (2.0, BETWEEN)):
        given = csr.with_values(csr.values.sign() * a)
        B = torch.full((128, 24), b)
        found = BlockCase(machine, given, 24, F32).spmm(B)
        rounded = given.with_values(round_tf32(given.values))
        assert torch.equal(found.double(), reference(rounded, round_tf32(B)))


def test_an_operand_that_is_not_rounded_is_seen(machine, monkeypatch):
    csr = full_blocks([[1]], F32)
    csr = csr.with_values(torch.ones_like(csr.values))
    case, B = BlockCase(machine, csr, 8, F32), torch.full((64, 8), BETWEEN)
    expected = reference(csr, round_tf32(B))
    assert torch.equal(case.spmm(B).double(), expected)
    monkeypatch.setattr("tests.kernels.replay_tf32.round_tf32", lambda bits: bits)
    assert not torch.equal(case.spmm(B).double(), expected)


@pytest.mark.parametrize("blocks", [1, 2, 3, 5, 33])
def test_a_block_row_of_any_length_goes_through_the_ring(wide, blocks):
    csr = full_blocks([[1] * blocks, [1] + [0] * (blocks - 1)], F32)
    B = operand(csr, 136, F32)
    assert torch.equal(BlockCase(wide, csr, 136, F32).spmm(B).double(), reference(csr, B))


@pytest.mark.parametrize("name", MATRICES)
def test_the_replay_of_every_matrix_is_its_product(machine, name):
    csr = whole_numbers(name, F32)
    case = BlockCase(machine, csr, 16, F32)
    for n in (16, 7):
        B = operand(csr, n, F32)
        assert torch.equal(case.spmm(B).double(), reference(csr, B))


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("n", [24, 21])
def test_a_transposed_c_is_stored_where_it_lies_whatever_its_rows_begin_at(wide, ordered, n):
    csr = full_blocks(CORNERS, F32, (203, 150))
    order = torch.argsort(torch.arange(203) // BLOCK + torch.rand(203, dtype=torch.float64))
    case = BlockCase(wide, csr, n, F32, order=order if ordered else None)
    B, memory = operand(csr, n, F32), torch.full((n, 210), 7.0)
    out = memory[:, 3:206].T
    wide.hold(memory)
    before = torch.randint(-3, 4, (203, n)).float()
    assert torch.equal(case.spmm(B, out).double(), reference(csr, B))
    out.copy_(before)
    found = case.spmm(B.T.contiguous().T, out, alpha=0.5, beta=2.0)
    assert torch.equal(found.double(), reference(csr, B) / 2 + 2 * before)
    assert bool((memory[:, :3] == 7).all()) and bool((memory[:, 206:] == 7).all())


def test_a_wide_b_goes_in_pieces_with_its_bias(wide, monkeypatch):
    monkeypatch.setattr(tf32_operand, "MOST_BYTES", 256 * 4 * 152)
    csr = full_blocks(CORNERS, F32, (200, 150))
    B, bias = operand(csr, 600, F32, (2,)), torch.arange(600.0) - 300
    wide.hold(bias)
    found = BlockCase(wide, csr, 600, F32).spmm(B, bias=bias, relu=True)
    assert torch.equal(found.double(), torch.relu(reference(csr, B) + bias))
    assert len(wide.configs) == 2 * 3 * 2, "copies and products"


def test_a_matrix_without_blocks_has_nothing_copied(machine):
    csr = full_blocks([[0, 0]], F32)
    found = BlockCase(machine, csr, 16, F32).spmm(torch.full((128, 16), float("nan")))
    assert bool((found == 0).all()) and len(machine.configs) == 1


def test_the_quick_way_of_a_bound_product_makes_its_copy_too(machine):
    csr = full_blocks(CORNERS, F32, (200, 150))
    case, B = BlockCase(machine, csr, 32, F32), operand(csr, 32, F32)
    bound = case.runner.bind(case.stage.parts, csr.values, case.packed)
    machine.hold(B)
    assert all(torch.equal(bound(B).double(), reference(csr, B)) for _ in range(2))

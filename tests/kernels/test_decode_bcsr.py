"""The block kernel replayed: what its producer copies is what its consumers read, and C is A·B.

A replay that passes says something only if it fails where a rule is broken: waits, descriptors and
row numbers are left out or changed here once each.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import Tensor

from sparsetile import CSR
from sparsetile.kernels.bcsr import (
    BLOCK,
    COLUMNS,
    ENGINE,
    FP8,
    FP8_TILES,
    LADDER,
    SPMM_BCSR,
    STORE_BOX,
    TILES,
    TRANSPOSED_BOX,
    bcsr_config,
)
from sparsetile.systems.bcsr import runner as bcsr_runner
from sparsetile.systems.csr.runner import CSRRunner
from tests.contracts.cases import MATRICES, csr_of
from tests.kernels import replay_bcsr, replay_csr
from tests.kernels.replay import Machine, device_fields, host_letters
from tests.kernels.replay_bcsr import (
    A_STEPS,
    B_STEPS,
    BLOCK_BYTES,
    BOX_BYTES,
    FP8_A_STEPS,
    FP8_B_STEPS,
    K_MAJOR_STEPS,
    STORE_BOX_BYTES,
    Q,
    fragment_places,
    transpose,
    transposed,
)
from tests.kernels.replay_cases import BlockCase, strided
from tests.kernels.replay_wgmma import (
    Barrier,
    Descriptor,
    Leaving,
    Shared,
    box_places,
    descriptor,
)
from tests.kernels.whole_numbers import operand, reference, whole_numbers

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


@pytest.fixture
def machine(block_machine: Machine) -> Machine:
    return block_machine


def full_blocks(
    pattern: list[list[int]], dtype: torch.dtype, shape: tuple[int, int] | None = None
) -> CSR:
    """Blocks without an empty cell where the pattern has a 1; cut off at ``shape``."""
    dense = np.kron(np.array(pattern), np.ones((BLOCK, BLOCK)))
    dense *= np.random.default_rng(2).choice([-2.0, -1.0, 1.0, 3.0], dense.shape)
    rows, cols = shape or dense.shape
    return csr_of(sp.csr_array(dense[:rows, :cols]), dtype=dtype)


CORNERS = [[1, 0, 1], [0, 0, 0], [0, 1, 0], [1, 1, 1]]


def test_host_and_device_name_the_same_kinds_of_parameters_in_the_same_order():
    fields = device_fields(SPMM_BCSR)
    assert [letter for _, letter in fields] == host_letters(SPMM_BCSR)
    assert [name for name, _ in fields if "[" not in name] == [
        "c", "work", "block_col_idx", "order", "indptr", "bias", "row_bias", "spoilt", "c_stride",
        "alpha", "beta", "rows", "n", "block_rows", "slabs", "together", "store", "epilogue",
        "relu",
    ]  # fmt: skip


# -- copies against operands, address by address


@pytest.mark.parametrize("stage", [0, 1024, 5 * 40960])
@pytest.mark.parametrize("k_step", range(4))
def test_a_block_of_A_is_read_from_where_its_copy_put_it(stage, k_step):
    put = box_places(stage, BLOCK, BLOCK)
    found = Descriptor.of(descriptor(stage + k_step * A_STEPS[0], *A_STEPS[1:]))
    m, k = np.arange(BLOCK)[:, None], np.arange(16)
    assert np.array_equal(found.k_major(m, k), put[:, 16 * k_step : 16 * k_step + 16])


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.columns} columns")
@pytest.mark.parametrize("k_step", range(4))
def test_a_tile_of_B_is_read_from_where_its_copies_put_it(tile, k_step):
    for stage in range(tile.stages):
        first = 2048 + stage * tile.stage_bytes + BLOCK_BYTES
        boxes = [box_places(first + j * BOX_BYTES, 64, 64) for j in range(tile.columns // 64)]
        put = np.concatenate(boxes, axis=1)  # row k of B's tile, column n of all consumers
        for consumer in range(tile.columns // 128):
            start = first + consumer * 2 * BOX_BYTES + k_step * B_STEPS[0]
            found = Descriptor.of(descriptor(start, *B_STEPS[1:]))
            addresses = found.mn_major(np.arange(16)[:, None], np.arange(128))
            wanted = put[16 * k_step : 16 * k_step + 16, 128 * consumer : 128 * consumer + 128]
            assert np.array_equal(addresses, wanted)


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.columns} columns")
@pytest.mark.parametrize("k_step", range(4))
def test_a_k_major_tile_of_B_is_read_from_where_its_copy_put_it(tile, k_step):
    for stage in range(tile.stages):
        first = 2048 + stage * tile.stage_bytes + BLOCK_BYTES
        put = box_places(first, *tile.box(True))  # row n, column k
        assert put.max() < first + tile.stage_bytes - BLOCK_BYTES
        for consumer in range(tile.columns // 128):
            start = first + consumer * 2 * BOX_BYTES + k_step * K_MAJOR_STEPS[0]
            found = Descriptor.of(descriptor(start, *K_MAJOR_STEPS[1:]))
            addresses = found.k_major(np.arange(128)[:, None], np.arange(16))
            wanted = put[128 * consumer : 128 * consumer + 128, 16 * k_step : 16 * k_step + 16]
            assert np.array_equal(addresses, wanted)


def test_a_box_fills_its_place_and_eight_rows_of_a_column_lie_in_different_banks():
    put = box_places(4096, 64, 64)
    assert np.array_equal(np.sort(put, axis=None), 4096 + 2 * np.arange(64 * 64))
    chunks = put[:8, 0] % 128 // 16
    assert sorted(chunks) == list(range(8))


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.columns} columns")
def test_boxes_of_a_stage_are_as_many_bytes_as_its_barrier_expects(tile):
    boxes = 1 + tile.columns // 64
    assert tile.stage_bytes == boxes * BOX_BYTES
    assert tile.stage_bytes % 1024 == 0, "every stage begins at a multiple of the swizzle"
    assert tile.shared_bytes <= 227 * 1024 // (2 if tile.columns == 128 else 1) - 1024


def test_registers_of_a_warpgroup_hold_every_sum_once():
    row, column = fragment_places()
    assert row.shape == column.shape == (128, 64)
    assert len({*zip(row.ravel().tolist(), column.ravel().tolist(), strict=True)}) == 64 * 128


def test_a_warps_sums_lie_in_its_boxes_as_the_engine_reads_them():
    """Addresses of ``store_bulk``: 8 columns of a row where the swizzle of a box has them."""
    put = [box_places(4096 + j * STORE_BOX_BYTES, *STORE_BOX) for j in range(2)]
    lane = np.arange(32)
    address = 4096 + lane % 16 * 128 + ((lane // 16) ^ (lane % 8)) * 16
    for pair in range(8):
        to = (address ^ (pair % 4 * 32)) + pair // 4 * STORE_BOX_BYTES
        column = (pair % 4 * 2 + lane // 16) * 8
        assert np.array_equal(to, put[pair // 4][lane % 16, column])


def test_a_warpgroups_sums_lie_in_their_transposed_box_as_the_engine_reads_it():
    """Addresses of ``store_transposed``: eight rows of C side by side, in the row of a column."""
    put, lane = box_places(4096, *TRANSPOSED_BOX), np.arange(32)
    column = lane % 8 + lane // 16 * 8
    for warp in range(4):
        chunk = warp * 2 + lane // 8 % 2
        address = 4096 + column * 128 + (chunk ^ (lane % 8)) * 16
        for sixteen in range(8):
            row = warp * 16 + lane // 8 % 2 * 8
            found = address + sixteen * 16 * 128
            assert np.array_equal(found, put[sixteen * 16 + column, row])


def test_four_matrices_are_turned_each_by_itself():
    element = np.arange(4 * 64, dtype=np.uint16).reshape(4, 8, 8)  # matrix, row, column
    pairs = element.reshape(4, 8, 4, 2)
    word = np.ascontiguousarray(pairs.transpose(1, 2, 0, 3)).reshape(32, 4, 2).view(np.uint32)
    found = transposed(np.ascontiguousarray(word[..., 0]))
    for lane, matrix in np.ndindex(32, 4):
        low, high = int(found[lane, matrix]) & 0xFFFF, int(found[lane, matrix]) >> 16
        row, at = lane // 4, lane % 4 * 2
        assert (low, high) == (element[matrix, at, row], element[matrix, at + 1, row])


def test_four_lanes_exchange_rows_for_columns():
    word = np.arange(128 * 4, dtype=np.uint32).reshape(128, 4)  # lane * 4 + word
    found = transpose(word)
    lane = np.arange(128)
    for j in range(4):
        assert np.array_equal(found[:, j], (lane - Q + j) * 4 + Q)


# -- whole products


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("n", [8, 128, 136, 264, 520])
def test_the_replay_of_full_blocks_is_their_product(wide, dtype, n):
    for shape in (None, (200, 150), (193, 129)):
        csr = full_blocks(CORNERS, dtype, shape)
        B = operand(csr, n, dtype)
        case = BlockCase(wide, csr, n, dtype)
        assert torch.equal(case.spmm(B), reference(csr, B).to(dtype))
        assert case.meta["exact"] is None
    assert wide.configs[-1] == bcsr_config(dtype, TILES[0] if n > 128 else TILES[1])


def k_major(B: Tensor) -> Tensor:
    """The same matrix as the transpose of a row-major one, rows of that 16 bytes aligned."""
    *lead, rows, n = B.shape
    memory = torch.full((*lead, n, -(-rows // 8) * 8), float("nan"), dtype=B.dtype)
    memory[..., :rows] = B.mT
    return memory[..., :rows].mT


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("n", [1, 8, 128, 136, 264, 520])
def test_a_transposed_B_is_multiplied_where_it_lies(wide, maps, dtype, n):
    for shape in (None, (200, 150), (193, 129)):
        csr = full_blocks(CORNERS, dtype, shape)
        B = k_major(operand(csr, n, dtype))
        case = BlockCase(wide, csr, n, dtype)
        assert case.runner.any_strides
        assert torch.equal(case.spmm(B), reference(csr, B).to(dtype))
        of_b = [matrix for matrix in maps.known if matrix.pointer == B.data_ptr()]
        assert [matrix.shape for matrix in of_b] == [(n, csr.shape[1])]
    tile = TILES[0] if n > 128 else TILES[1]
    assert wide.configs[-1] == bcsr_config(dtype, tile, k_major=True)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("n", [1, 8, 136, 264, 520])
@pytest.mark.parametrize("transposed_b", [False, True])
def test_c_is_stored_as_the_transpose_that_it_is(wide, maps, dtype, n, transposed_b):
    for shape in ((256, 192), (200, 150), (193, 129)):
        csr = full_blocks(CORNERS, dtype, shape)
        B = operand(csr, n, dtype)
        memory = torch.full((n, shape[0] // 8 * 8 + 16), 7.0, dtype=dtype)
        wide.hold(memory)
        case, out = BlockCase(wide, csr, n, dtype), memory[:, : shape[0]].T
        case.spmm(k_major(B) if transposed_b else B, out)
        assert torch.equal(out, reference(csr, B).to(dtype))
        assert bool((memory[:, shape[0] :] == 7).all()), "nothing beside C is written"
        if shape[0] % 8 == 0:  # else a copy is stored
            stored = maps.known[-1]
            assert (stored.pointer, stored.shape) == (memory.data_ptr(), (n, shape[0]))


def test_a_linear_layers_batch_has_no_copies(wide, maps):
    csr = full_blocks(CORNERS, F16)
    X = operand(csr, 40, F16, (3,)).mT.contiguous()
    Y = torch.full((3, 40, 256), float("nan"), dtype=F16)
    wide.hold(X, Y)
    BlockCase(wide, csr, 40, F16).spmm(X.mT, Y.mT)
    assert torch.equal(Y.mT, reference(csr, X.mT).to(F16))
    assert {one.pointer for one in maps.known[1:]} == {one.data_ptr() for one in (*X, *Y)}


@pytest.mark.parametrize("how", ["rows not aligned", "every second column", "one for all", "order"])
def test_other_strides_are_copied(wide, how):
    csr = full_blocks(CORNERS, F16, (200, 150))
    B, out = operand(csr, 24, F16), torch.full((24, 200), float("nan"), dtype=F16).T
    if how == "rows not aligned":
        B, out = B.T.contiguous().T, torch.full((24, 203), float("nan"), dtype=F16)[:, 3:].T
    elif how == "every second column":
        B, out = B.repeat_interleave(2, 1)[:, ::2], out.new_empty(200, 48)[:, ::2]
    elif how == "one for all":
        B = B[:, :1].expand(150, 24)
    order = torch.arange(200).flip(0).view(-1, 8).flip(0).flatten() if how == "order" else None
    case = BlockCase(wide, csr, 24, F16, order=order)
    assert torch.equal(case.spmm(B, out), reference(csr, B).to(F16))
    before = out.clone()
    assert torch.equal(case.spmm(B, out, beta=2.0), (reference(csr, B) + 2 * before).to(F16))


@pytest.mark.parametrize("tile", FP8_TILES, ids=lambda tile: f"{tile.columns} columns")
@pytest.mark.parametrize("k_step", range(2))
def test_blocks_and_tiles_of_fp8_are_read_from_where_their_copies_put_them(tile, k_step):
    k = slice(32 * k_step, 32 * k_step + 32)
    assert tile.stage_bytes % 1024 == 0
    for stage in (1024, 1024 + tile.stage_bytes):
        put = box_places(stage, BLOCK, BLOCK, 1)
        start = stage + k_step * FP8_A_STEPS[0]
        found = Descriptor.of(descriptor(start, *FP8_A_STEPS[1:], 64))
        assert np.array_equal(found.k_major(np.arange(64)[:, None], np.arange(32)), put[:, k])
        put = box_places(stage + 4096, *tile.box(True), 1)
        for consumer in range(tile.columns // 128):
            start = stage + 4096 + consumer * 2 * 4096 + k_step * FP8_B_STEPS[0]
            found = Descriptor.of(descriptor(start, *FP8_B_STEPS[1:], 64))
            addresses = found.k_major(np.arange(128)[:, None], np.arange(32))
            assert np.array_equal(addresses, put[128 * consumer : 128 * consumer + 128, k])


@pytest.mark.parametrize("out_dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("n", [1, 16, 136, 264])
def test_the_replay_of_fp8_is_the_product_whatever_strides_b_has(wide, maps, out_dtype, n):
    for shape in (None, (200, 150)):
        csr = full_blocks([*CORNERS, [1, 1, 0]], F16, shape)
        case = BlockCase(wide, csr, n, FP8)
        X = torch.randint(0, 3, (n, -(-csr.shape[1] // 16) * 16)).to(FP8)[:, : csr.shape[1]]
        expected = (reference(csr, X.T.float()) / 2).to(out_dtype)
        for B in (X.T, X.float().T.contiguous().to(FP8)):
            found = case.spmm(B, torch.empty(csr.shape[0], n, dtype=out_dtype), alpha=0.5)
            assert torch.equal(found, expected)
        Y = torch.empty(n, csr.shape[0], dtype=out_dtype)
        assert torch.equal(case.spmm(X.T, Y.T, alpha=0.5), expected)
        of_b = [matrix for matrix in maps.known if matrix.pointer == X.data_ptr()]
        assert len(of_b) == 1 and of_b[0].shape == (n, csr.shape[1]), "X is not copied"
    tile = FP8_TILES[0] if n > 128 else FP8_TILES[1]
    assert wide.configs[-1] == bcsr_config(FP8, tile, out_dtype=out_dtype, k_major=True)
    assert case.runner.bind(case.stage.parts, csr.values, case.packed) is None


@pytest.mark.parametrize("blocks", [1, 2, 9, 10, 19, 40])
def test_a_block_row_of_fp8_of_any_length_goes_through_the_ring(wide, blocks):
    csr = full_blocks([[1] * blocks, [1] + [0] * (blocks - 1)], BF16)
    X = torch.randint(0, 2, (136, 64 * blocks)).to(FP8)
    found = BlockCase(wide, csr, 136, FP8).spmm(X.T, torch.empty(128, 136))
    assert torch.equal(found.double(), reference(csr, X.T.float()))


@pytest.mark.parametrize("step", LADDER)
@pytest.mark.parametrize("n, out_dtype", [(264, F16), (136, F16), (16, F16), (13, F16), (24, F32)])
def test_every_step_of_the_ladder_gives_the_same_product(wide, maps, step, n, out_dtype):
    csr = full_blocks(CORNERS, F16, (200, 150))
    B = operand(csr, n, F16)
    case = BlockCase(wide, csr, n, F16, ablation=step)
    found = case.spmm(B, torch.full((200, n), float("nan"), dtype=out_dtype))
    assert torch.equal(found, reference(csr, B).to(out_dtype))
    tile = TILES[0] if n > 128 else TILES[1]
    config = bcsr_config(F16, tile.at_step(LADDER[step]), out_dtype=out_dtype)
    assert wide.configs[-1] == config
    assert bool(maps.known) is (LADDER[step] >= ENGINE), "below, nothing has a tensor map"


@pytest.mark.parametrize("step", LADDER)
def test_steps_of_the_ladder_take_what_the_product_takes(machine, step):
    csr = whole_numbers("odd sizes", F16)
    case = BlockCase(machine, csr, 24, F16, ablation=step)
    assert not case.runner.any_strides
    B = operand(csr, 24, F16)
    assert torch.equal(case.spmm(B, alpha=0.5), (reference(csr, B) / 2).to(F16))
    empty = full_blocks([[0, 0], [1, 0]], F16)
    B = operand(empty, 24, F16)
    case = BlockCase(machine, empty, 24, F16, order=torch.arange(128).flip(0), ablation=step)
    assert torch.equal(case.spmm(B), reference(empty, B).to(F16))
    case = BlockCase(machine, empty, 24, F16, ablation=step)
    bound = case.runner.bind(case.stage.parts, empty.values, case.packed)
    machine.hold(B)
    assert all(torch.equal(bound(B), reference(empty, B).to(F16)) for _ in range(2))


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("n", [16, 136, 264])
def test_a_fixed_width_of_the_tile_gives_the_same_product(machine, columns, n):
    csr = full_blocks(CORNERS, F16, (200, 150))
    B = operand(csr, n, F16)
    case = BlockCase(machine, csr, n, F16, ablation=columns)
    assert torch.equal(case.spmm(B), reference(csr, B).to(F16))
    assert machine.configs[-1]["kCols"] == COLUMNS[columns]


def test_few_block_rows_take_narrow_tiles_so_that_more_sms_have_work(machine):
    csr = full_blocks(CORNERS, F16)
    B = operand(csr, 520, F16)
    assert torch.equal(BlockCase(machine, csr, 520, F16).spmm(B), reference(csr, B).to(F16))
    assert machine.configs[-1]["kCols"] == 128


@pytest.mark.parametrize("processors", [1, 2, 3, 132])
@pytest.mark.parametrize("together", [1, 2, 3, 8])
def test_every_item_is_made_once_however_many_blocks_of_threads_there_are(
    machine, monkeypatch, processors, together
):
    """The replay sees to it that each element of C is written once."""
    machine.install(monkeypatch, processors=processors)
    monkeypatch.setattr(bcsr_runner, "SLABS_TOGETHER", together)
    csr = full_blocks([*CORNERS, [0, 0, 1]], F16, (300, 190))
    B = operand(csr, 650, F16)
    assert torch.equal(BlockCase(machine, csr, 650, F16).spmm(B), reference(csr, B).to(F16))


@pytest.mark.parametrize("pattern", [False, True], ids=["weighted", "pattern"])
@pytest.mark.parametrize("name", MATRICES)
def test_the_replay_of_every_matrix_is_its_product(machine, name, pattern):
    """Rows of B that no entry names are NaN: zeros of blocks meet them, and C is repaired."""
    csr = whole_numbers(name, F16, pattern)
    case = BlockCase(machine, csr, 16, F16)
    for n in (16, 7):
        B = operand(csr, n, F16)
        assert torch.equal(case.spmm(B), reference(csr, B).to(F16))


@pytest.mark.parametrize("blocks", [1, 4, 5, 6, 33, 70])
def test_a_block_row_of_any_length_goes_through_the_ring(wide, blocks):
    csr = full_blocks([[1] * blocks], BF16, (3, 64 * blocks - 5))
    csr = csr.with_values(csr.values.sign())
    B = operand(csr, 136, BF16).clamp(max=1)
    found = BlockCase(wide, csr, 136, BF16).spmm(B, torch.empty(3, 136))
    assert torch.equal(found.double(), reference(csr, B))


@pytest.mark.parametrize("name", ["odd sizes", "one dense column"])
def test_an_order_of_the_rows_changes_nothing(machine, name):
    csr = whole_numbers(name, F16)
    B = operand(csr, 24, F16)
    order = torch.randperm(csr.shape[0])
    case = BlockCase(machine, csr, 24, F16, order=order)
    assert torch.equal(case.spmm(B), reference(csr, B).to(F16))


@pytest.mark.parametrize("how", ["row stride", "misaligned", "same batch again"])
@pytest.mark.parametrize("batch", [(), (3,)], ids=["matrix", "batch"])
@pytest.mark.parametrize("n", [40, 13])
def test_any_stride_and_batch_of_B_and_C_is_right(machine, how, batch, n):
    csr = full_blocks([[1, 0], [1, 1]], F16, (90, 100))
    B = strided(operand(csr, n, F16, batch), how)
    out = strided(torch.full((*batch, 90, n), 7.0, dtype=F16), "row stride")
    around = torch.as_strided(out, (*batch, 90, n + 5), out.stride())
    BlockCase(machine, csr, n, F16).spmm(B, out)
    assert torch.equal(out, reference(csr, B).to(F16))
    assert bool(around[..., n:].isnan().all()), "columns beyond C were written"


def test_b_with_aligned_rows_of_any_width_is_not_copied(machine, maps):
    csr = full_blocks([[1]], F16)
    B = operand(csr, 16, F16)[:, :11]
    assert torch.equal(BlockCase(machine, csr, 11, F16).spmm(B), reference(csr, B).to(F16))
    assert maps.known[1].pointer == B.data_ptr(), "after A's"
    overlapping = torch.ones(1, 16, dtype=F16).expand(64, 16)
    found = BlockCase(machine, csr, 16, F16).spmm(overlapping)
    assert torch.equal(found, reference(csr, overlapping).to(F16))
    copied = [matrix for matrix in maps.known if matrix.shape == (64, 16)]
    assert copied[0].row_bytes == 32, "rows that overlap are copied apart"


@pytest.mark.parametrize("n, in_place", [(8, True), (11, False)])
def test_c_is_stored_in_place_where_its_rows_end_at_16_bytes(machine, maps, n, in_place):
    csr = full_blocks(CORNERS, F16, (200, 150))
    B = operand(csr, n, F16)
    out = torch.full((200, 16), 7.0, dtype=F16)
    machine.hold(out)
    BlockCase(machine, csr, n, F16).spmm(B, out[:, :n])
    assert torch.equal(out[:, :n], reference(csr, B).to(F16)) and bool((out[:, n:] == 7).all())
    assert (maps.known[-1].pointer == out.data_ptr()) is in_place


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("out_dtype", [F16, F32], ids=str)
@pytest.mark.parametrize("n", [24, 21])
def test_alpha_beta_mean_bias_and_relu_act_on_the_right_elements(
    machine, holes, ordered, out_dtype, n
):
    csr = full_blocks([[1, 0], [0, 1], [0, 0]], F16, (150, 100))
    if holes:
        csr = whole_numbers("odd sizes", F16)
    B, bias = operand(csr, n, F16), torch.arange(n, dtype=F32) - 9
    rows = csr.shape[0]
    plain, before = reference(csr, B), torch.randint(-3, 4, (rows, n)).to(out_dtype)
    # Within block rows, so that blocks stay full.
    order = torch.argsort(torch.arange(rows) // BLOCK + torch.rand(rows, dtype=torch.float64))
    case = BlockCase(machine, csr, n, F16, order=order if ordered else None)
    assert (case.meta["exact"] is not None) is holes
    machine.hold(bias)

    def run(out: Tensor, **epilogue) -> Tensor:
        return case.spmm(B, out, **epilogue)

    empty = torch.empty(rows, n, dtype=out_dtype)
    assert torch.equal(run(before.clone(), alpha=0.5, beta=2.0), (plain / 2 + 2 * before).to(
        out_dtype))  # fmt: skip
    assert torch.equal(run(empty, alpha=2.0, bias=bias, relu=True), torch.relu(
        2 * plain + bias).to(out_dtype))  # fmt: skip
    lengths = csr.row_lengths().clamp(min=1).unsqueeze(1)
    mean = run(empty, mean=True).double()
    assert torch.allclose(mean, plain / lengths, rtol=torch.finfo(out_dtype).eps)


@pytest.mark.parametrize("n", [24, 21])
def test_alpha_and_beta_act_on_the_right_elements_of_a_transposed_c(machine, n):
    csr = full_blocks([[1, 0], [0, 1], [0, 0]], F16, (152, 100))
    B, before = operand(csr, n, F16), torch.randint(-3, 4, (n, 152)).to(F16)
    out = before.clone().T
    found = BlockCase(machine, csr, n, F16).spmm(k_major(B), out, alpha=0.5, beta=2.0)
    assert torch.equal(found, (reference(csr, B) / 2 + 2 * before.T).to(F16))
    assert machine.configs[-1]["kKMajor"]


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("out_dtype", [F16, F32], ids=str)
def test_a_linear_layers_bias_is_that_of_its_row(machine, ordered, out_dtype):
    csr = full_blocks([[1, 0], [0, 1], [0, 0]], F16, (152, 100))
    B, bias = operand(csr, 21, F16), torch.arange(152.0) - 70
    order = torch.argsort(torch.arange(152) // BLOCK + torch.rand(152, dtype=torch.float64))
    case = BlockCase(machine, csr, 21, F16, order=order if ordered else None)
    assert case.runner.fuses_linear
    machine.hold(bias)
    Y = torch.full((21, 152), float("nan"), dtype=out_dtype)
    found = case.spmm(k_major(B), Y.T, alpha=2.0, row_bias=bias, relu=True)
    assert torch.equal(found, torch.relu(2 * reference(csr, B) + bias[:, None]).to(out_dtype))


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("n", [8, 130, 300])
def test_sixteen_bit_input_may_be_stored_as_float32(wide, dtype, n):
    csr = full_blocks(CORNERS, dtype, (200, 150))
    B = operand(csr, n, dtype)
    found = BlockCase(wide, csr, n, dtype).spmm(B, torch.full((200, n), float("nan")))
    assert torch.equal(found.double(), reference(csr, B))
    assert wide.configs[-1]["OUTPUT"] == "F32"


def test_inf_and_nan_of_B_reach_only_the_rows_that_refer_to_them(machine):
    csr = whole_numbers("odd sizes", F16)
    B = operand(csr, 16, F16).nan_to_num()
    B[3, 2], B[40, 15], B[41, 15] = float("inf"), float("nan"), -float("inf")
    dense = torch.zeros(csr.shape, dtype=torch.bool)
    dense[csr.row_ids(), csr.indices.long()] = True
    found = BlockCase(machine, csr, 16, F16).spmm(B, relu=True, alpha=-1.0)
    assert torch.equal(found[:, 15].isnan(), dense[:, 40])
    finite = ~(dense[:, 40] | dense[:, 41])
    assert bool(found[finite, 15].isfinite().all())
    assert torch.equal(found[:, :2], torch.relu(-reference(csr, B)[:, :2]).to(F16))


def test_C_is_looked_at_again_only_after_a_sum_was_not_finite(machine, monkeypatch):
    looks = []
    is_finite = replay_csr.Product.is_finite
    monkeypatch.setattr(
        replay_csr.Product, "is_finite", lambda *given: looks.append(1) or is_finite(*given)
    )
    csr = whole_numbers("odd sizes", F16)
    B = operand(csr, 16, F16).nan_to_num()
    case = BlockCase(machine, csr, 16, F16)
    case.spmm(B)
    assert case.spoilt.tolist() == [0] and not looks
    B[3, 2] = float("inf")
    case.spmm(B, relu=True)
    assert case.spoilt.tolist() == [1] and looks


def test_full_blocks_need_no_repair_whatever_B_holds(machine, monkeypatch):
    monkeypatch.setattr(CSRRunner, "repair", None)
    csr = full_blocks([[1, 0], [0, 1]], F16, (100, 100))
    B = operand(csr, 8, F16)
    B[70] = float("nan")
    found = BlockCase(machine, csr, 8, F16).spmm(B)
    assert bool(found[:64].isfinite().all()) and bool(found[64:].isnan().all())


def test_the_quick_way_of_a_bound_product_is_the_same(machine, maps):
    csr = full_blocks(CORNERS, F16, (200, 150))
    case = BlockCase(machine, csr, 32, F16)
    bound = case.runner.bind(case.stage.parts, csr.values, case.packed)
    assert bound is not None
    for n in (32, 7):
        for _ in range(2):
            B = operand(csr, n, F16)
            machine.hold(B)
            assert torch.equal(bound(B), reference(csr, B).to(F16))
            assert torch.equal(bound(B), reference(csr, B).to(F16))
            of_b = [matrix for matrix in maps.known if matrix.pointer == B.data_ptr()]
            assert n == 7 or len(of_b) == 1, "a map is made once for each address"
    holes = BlockCase(machine, whole_numbers("odd sizes", F16), 32, F16)
    assert holes.runner.bind(holes.stage.parts, None, None) is None, "a repair follows"


# -- mistakes are seen


def _without(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    def change(patch: pytest.MonkeyPatch) -> None:
        product = replay_bcsr.Product
        if name == "wait for copies":
            wait = Barrier.wait
            patch.setattr(Barrier, "wait", lambda b, p: iter(()) if b.arrivals == 1 else wait(b, p))
        elif name == "wait for readers":
            wait = Barrier.wait
            patch.setattr(Barrier, "wait", lambda b, p: iter(()) if b.arrivals > 1 else wait(b, p))
        elif name == "leading":
            patch.setattr(replay_bcsr, "B_STEPS", (B_STEPS[0], 2 * B_STEPS[1], B_STEPS[2]))
        elif name == "stride of B":
            patch.setattr(replay_bcsr, "B_STEPS", (*B_STEPS[:2], 2048))
        elif name == "step of A":
            patch.setattr(replay_bcsr, "A_STEPS", (64, *A_STEPS[1:]))
        elif name == "wait for stores":
            patch.setattr(Leaving, "wait_read", lambda who: iter(()))
        elif name == "fence for stores":
            patch.setattr(Shared, "fence", lambda shared, *where: None)
        elif name == "swizzle of stores":
            store = Shared.store_matrices
            patch.setattr(
                Shared, "store_matrices", lambda shared, at, word: store(shared, at ^ 32, word)
            )
        elif name == "wait for products":
            patch.setattr(replay_bcsr, "PENDING", [2, 0])
        elif name == "wait for sums":
            patch.setattr(replay_bcsr, "PENDING", [1, 1])
        elif name == "one ring for all items":
            accumulate = product.accumulate
            patch.setattr(
                product,
                "accumulate",
                lambda self, consumer, blocks, turn, tile: accumulate(
                    self, consumer, blocks, replay_bcsr.Turn(self.stages), tile
                ),
            )
        elif name == "K-major stride":
            patch.setattr(replay_bcsr, "K_MAJOR_STEPS", (*K_MAJOR_STEPS[:2], 2048))
        elif name == "step of K-major B":
            patch.setattr(replay_bcsr, "K_MAJOR_STEPS", (2048, *K_MAJOR_STEPS[1:]))
        elif name == "turned matrices":
            patch.setattr(replay_bcsr, "transposed", lambda word: word)
        elif name == "transpose":
            patch.setattr(replay_bcsr, "transpose", lambda word: word)
        elif name == "rows":
            row_of = product.row_of
            patch.setattr(product, "row_of", lambda self, at: row_of(self, at ^ 1))

    return change


@pytest.mark.parametrize(
    "rule",
    [
        "wait for copies", "wait for readers", "wait for products", "wait for sums",
        "one ring for all items", "leading", "stride of B", "step of A", "wait for stores",
        "fence for stores", "swizzle of stores",
    ],
)  # fmt: skip
def test_the_product_needs_each_of_its_rules(wide, monkeypatch, rule):
    assert _product_needs(rule, wide, monkeypatch, None)


@pytest.mark.parametrize("rule", ["transpose", "rows"])
def test_the_product_in_an_order_of_its_own_needs_each_of_its_rules(wide, monkeypatch, rule):
    assert _product_needs(rule, wide, monkeypatch, torch.arange(512))


@pytest.mark.parametrize(
    "rule",
    ["K-major stride", "step of K-major B", "wait for stores", "fence for stores",
     "turned matrices", "swizzle of stores"],
)  # fmt: skip
def test_the_product_of_a_linear_layer_needs_each_of_its_rules(wide, monkeypatch, rule):
    assert _product_needs(rule, wide, monkeypatch, None, linear=True)


def _product_needs(
    rule: str,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    order: Tensor | None,
    linear: bool = False,
) -> bool:
    csr = full_blocks([[1] * 12] * 2 + [[1] + [0] * 11] * 6, F16)
    B = operand(csr, 136, F16)
    if linear:
        B = k_major(B)
    case = BlockCase(machine, csr, 136, F16, order=order)

    def right() -> bool:
        out = torch.full((136, 512), float("nan"), dtype=F16).T if linear else None
        return torch.equal(case.spmm(B, out), reference(csr, B).to(F16))

    assert right()
    with monkeypatch.context() as patch:
        _without(rule)(patch)
        try:
            same = right()
        except AssertionError:
            same = False
    return not same


def test_a_barrier_that_expects_other_bytes_never_opens(wide, monkeypatch):
    csr = full_blocks([[1, 1]], F16)
    case = BlockCase(wide, csr, 8, F16)
    expect = Barrier.expect
    monkeypatch.setattr(Barrier, "expect", lambda b, count: expect(b, count + 16))
    with pytest.raises(AssertionError, match="threads wait for ever"):
        case.spmm(operand(csr, 8, F16))

"""Packing and decoding agree: the tile kernel, replayed in NumPy, against scipy.

Numbers are small and whole, so that every order of additions gives the same bits. Rows of B that
no entry of A refers to are NaN, C and the scratch memory are NaN before: whatever is read or left
out by mistake shows. Rows of B and tiles of A pass through a ring whose rules ``replay_ring.py``
checks; what it notices is in ``test_decode_tiles.py``.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparsetile import CSR
from sparsetile.formats.bittcf import round_tf32
from sparsetile.kernels import KERNELS
from sparsetile.systems.acc.system import ABLATIONS
from sparsetile.systems.shared import geometry as geometry
from sparsetile.systems.shared import tile_runner as tile_runner
from tests.contracts.cases import MATRICES, csr_of, with_dense_row
from tests.kernels.replay import Machine, device_fields, host_letters
from tests.kernels.replay_bittcf import REPLAYS
from tests.kernels.replay_cases import TileCase, stack_windows, strided, with_tiles
from tests.kernels.replay_mma import round_tf32 as device_rounding
from tests.kernels.whole_numbers import operand, reference, whole_numbers

F16, F32, BF16 = torch.float16, torch.float32, torch.bfloat16
# Multiples of 16 bytes go through the ring; of these 36, 72, 200 and 264 end inside a slab.
WIDTHS = [
    *((F32, n) for n in (1, 36, 200)),
    *((F16, n) for n in (7, 264)),
    *((BF16, n) for n in (33, 72)),
]
# Tiles of each window, as the schedule puts them together.
RUNS = {
    "several windows": [2, 1, 3, 1, 1, 2, 4, 1, 1],
    "empty at the start": [0, 0, 3, 2],
    "empty in the middle": [3, 0, 0, 2, 1],
    "empty at the end": [2, 1, 0, 0],
    "nothing but empty ones": [0] * 11,
    "beside a cut one": [2, 1, 70, 1, 0, 2],
    "empty beside cut ones": [0, 70, 0, 0, 75, 0],
    "cut ones alone": [40, 70],
}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(REPLAYS)
    made.install(monkeypatch)
    return made


@pytest.fixture(params=[1, 2], ids=["eight rows", "sixteen rows"])
def stack(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Tiles that share their columns, in every window."""
    stack_windows(monkeypatch, request.param)
    return request.param


def test_host_and_device_name_the_same_kinds_of_parameters_in_the_same_order():
    spec = KERNELS["spmm_bittcf"]
    fields = device_fields(spec)
    assert [letter for _, letter in fields] == host_letters(spec)
    names = [name for name, _ in fields]
    assert names.index("arrivals") == tile_runner._ARRIVALS
    assert (names.index("b"), names.index("c")) == (tile_runner._B, tile_runner._C)
    assert names.index("partials") == tile_runner._PARTIALS
    assert names.index("b") * 8 == tile_runner._OPERANDS_OFFSET, "what a bound product patches"


@pytest.mark.parametrize("pattern", [False, True], ids=["weighted", "pattern"])
@pytest.mark.parametrize("name", MATRICES)
def test_the_replay_of_every_matrix_is_its_product(machine, stack, name, pattern):
    for dtype, n in WIDTHS:
        csr = whole_numbers(name, dtype, pattern)
        B = operand(csr, n, dtype)
        C = TileCase(machine, csr, n, dtype).spmm(B)
        assert torch.equal(C, reference(csr, B).to(dtype)), f"{dtype} of width {n}"
    assert {config["kStack"] for config in machine.configs} <= {stack}
    assert {config["kStages"] for config in machine.configs} == ({0, 2} if csr.shape[0] else set())


@pytest.mark.parametrize("name", ["odd sizes", "one dense column", "long shared rows"])
def test_an_order_of_the_rows_changes_nothing(machine, stack, name):
    for dtype in (F32, F16):
        csr = whole_numbers(name, dtype)
        order = torch.randperm(csr.shape[0])
        B = operand(csr, 40, dtype)
        C = TileCase(machine, csr, 40, dtype, order).spmm(B)
        assert torch.equal(C, reference(csr, B).to(dtype))


@pytest.mark.parametrize("pattern", [False, True], ids=["weighted", "pattern"])
@pytest.mark.parametrize("name", RUNS)
def test_runs_of_windows_store_each_window_where_it_ends(machine, stack, name, pattern):
    for dtype, n in ((F32, 40), (F32, 7), (F16, 72), (F16, 200), (F16, 33)):
        last = 13 if n == 72 else 5  # in the last window: of sixteen, more than eight or fewer
        csr = with_tiles(RUNS[name], dtype, pattern, stack=stack, last=min(last, 8 * stack - 3))
        B = operand(csr, n, dtype)
        case = TileCase(machine, csr, n, dtype, torch.arange(csr.shape[0]))
        assert torch.equal(case.spmm(B), reference(csr, B).to(dtype)), f"{dtype} of width {n}"
    windows = [-last for *_, last in case.stage.parts[7].tolist() if last < 0]
    assert sum(windows) == sum(tiles < 40 for tiles in RUNS[name]), "the others are cut"
    assert ("cut" in name) == (case.meta["slots"] > 0)
    assert max(windows, default=2) > 1, "the case must have a run of several windows"


def test_a_batch_of_B_goes_through_runs_and_cut_windows_alike(machine, stack):
    for dtype, n in ((F32, 20), (F16, 40)):
        csr = with_tiles(RUNS["empty beside cut ones"], dtype, stack=stack)
        B = operand(csr, n, dtype, (3,))
        assert torch.equal(TileCase(machine, csr, n, dtype).spmm(B), reference(csr, B).to(dtype))


@pytest.mark.parametrize("ablation", ABLATIONS)
@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_every_ablation_gives_the_same_product(machine, ablation, dtype):
    for name in ("odd sizes", "one dense row", "equal rows"):
        csr = whole_numbers(name, dtype)
        B = operand(csr, 64, dtype)
        case = TileCase(machine, csr, 64, dtype, ablation=ablation)
        assert torch.equal(case.spmm(B), reference(csr, B).to(dtype))
        assert ABLATIONS[ablation].balanced or not case.meta["slots"], "balance alone cuts windows"
        config = machine.configs[-1]
        assert config["kCacheB"] == config["kStreamC"] == ABLATIONS[ablation].cached
        assert config["kStages"] == (2 if ABLATIONS[ablation].pipelined else 1)


@pytest.mark.parametrize("how", ["row stride", "misaligned", "same batch again"])
@pytest.mark.parametrize("batch", [(), (3,)], ids=["matrix", "batch"])
def test_any_stride_and_batch_is_read_and_written_in_place(machine, stack, how, batch):
    for dtype in (F32, F16):
        csr = whole_numbers("one dense row", dtype)
        B = strided(operand(csr, 24, dtype, batch), how)
        wide = torch.full((*batch, csr.shape[0], 40), 7.0, dtype=dtype)
        C = TileCase(machine, csr, 24, dtype).spmm(B, out=wide[..., :24])
        assert torch.equal(C, reference(csr, B).to(dtype))
        assert bool((wide[..., 24:] == 7).all())


def test_alpha_beta_mean_bias_and_relu_act_on_the_right_elements(machine, stack):
    csr = whole_numbers("one dense row", F32)
    B = operand(csr, 20, F32)
    plain = reference(csr, B)
    case = TileCase(machine, csr, 20, F32, torch.randperm(csr.shape[0]))
    before = torch.randint(-4, 4, plain.shape).to(F32)
    C = case.spmm(B, out=before.clone(), alpha=2.0, beta=-0.5)
    assert torch.equal(C.double(), 2 * plain - 0.5 * before.double())
    lengths = csr.row_lengths().clamp(min=1).unsqueeze(1)
    assert torch.allclose(case.spmm(B, mean=True).double(), plain / lengths, rtol=1e-6)
    bias = torch.arange(20).to(F32)
    machine.hold(bias)
    C = case.spmm(B, bias=bias, relu=True)
    assert torch.equal(C.double(), torch.relu(plain + bias.double()))


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_sixteen_bit_input_may_be_stored_as_float32(machine, stack, dtype):
    csr = whole_numbers("one dense row", dtype)
    for n in (7, 12, 64):
        B = operand(csr, n, dtype)
        out = torch.full((csr.shape[0], n), float("nan"))
        C = TileCase(machine, csr, n, dtype).spmm(B, out=out)
        assert torch.equal(C, reference(csr, B).float())


def test_sixteen_bit_sums_are_rounded_once_at_the_end(machine, stack):
    for dtype in (F16, BF16):
        csr = csr_of(with_dense_row(20, 900, 3), dtype=dtype)
        B = torch.randn(900, 24).to(dtype)
        C = TileCase(machine, csr, 24, dtype).spmm(B)
        out = torch.full((20, 24), float("nan"))
        wide = TileCase(machine, csr, 24, dtype).spmm(B, out=out)
        assert torch.equal(C, wide.to(dtype))
        assert torch.allclose(wide.double(), reference(csr, B), atol=1e-3)


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@pytest.mark.parametrize("pattern", [False, True], ids=["weighted", "pattern"])
def test_inf_and_nan_of_B_reach_only_the_rows_that_refer_to_them(machine, stack, dtype, pattern):
    csr = whole_numbers("odd sizes", dtype, pattern)
    B = operand(csr, 40, dtype)
    used = csr.indices.unique()
    B[used[0]], B[used[5], 3], B[used[9], 39] = float("nan"), float("inf"), -float("inf")
    clean = B.clone()
    clean[used[[0, 5, 9]]] = 0
    rows, columns = csr.row_ids(), csr.indices.long()
    values = torch.ones(csr.nnz, dtype=dtype) if pattern else csr.values
    expected = torch.zeros((csr.shape[0], 40), dtype=torch.float64)
    expected.index_add_(0, rows, values.double().unsqueeze(1) * B.double()[columns])
    C = TileCase(machine, csr, 40, dtype).spmm(B)
    assert torch.equal(C.double().nan_to_num(nan=77), expected.nan_to_num(nan=77))
    assert machine.recomputed > 0, "the tiles' zeros must have met a NaN"
    TileCase(machine, csr, 40, dtype).spmm(clean)
    assert machine.recomputed == 0, "finite products take the quick way"


def test_a_cut_window_with_a_nan_is_computed_again_as_a_whole(machine, stack):
    csr = whole_numbers("one dense row", F32)
    case = TileCase(machine, csr, 8, F32)
    assert case.meta["slots"] > 0, "the case must cut a window"
    B = operand(csr, 8, F32)
    only = int(csr.indices[csr.indptr[17] + 1200])  # the dense row refers to every column
    B[only, 2] = float("nan")
    C = case.spmm(B)
    refers = torch.zeros(csr.shape[0], dtype=torch.bool)
    refers[csr.row_ids()[csr.indices == only]] = True
    assert torch.equal(C[:, 2].isnan(), refers)
    assert torch.equal(C[~refers].double(), reference(csr, B)[~refers])


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("n", [16, 7], ids=["ring", "direct"])
def test_exactly_the_windows_of_a_run_that_meet_a_nan_are_computed_again(machine, stack, dtype, n):
    tiles = [2, 0, 1, 1, 2, 0, 1, 70, 1, 1, 0]
    csr = with_tiles(tiles, dtype, stack=stack)
    case = TileCase(machine, csr, n, dtype)
    for spoilt in ([0], [2, 3], [0, 4, 6], [7], [8, 9], [0, 2, 3, 4, 6, 7, 8, 9]):
        B = operand(csr, n, dtype)
        for window in spoilt:
            B[8 * sum(tiles[:window]) + 1, 1] = float("nan")
        before = torch.randint(-4, 4, (csr.shape[0], n)).to(dtype)
        C = case.spmm(B, out=before.clone(), alpha=2.0, beta=-0.5)
        assert machine.recomputed == len(spoilt)
        used = torch.zeros(csr.shape[0], dtype=torch.bool)
        for window in spoilt:
            column = 8 * sum(tiles[:window]) + 1
            used[csr.row_ids()[csr.indices == column]] = True
        assert torch.equal(C.isnan().any(1), used) and not bool(C.isnan()[:, 2:].any())
        expected = (2 * reference(csr, B) - 0.5 * before.double()).to(dtype)
        assert torch.equal(C[~C.isnan()], expected[~C.isnan()])


def test_float32_is_rounded_to_the_nearest_tf32_not_truncated(machine):
    ones = torch.ones(3)
    csr = CSR(torch.tensor([0, 1, 2, 3]), torch.arange(3, dtype=torch.int32), ones, (3, 3))
    step = 2.0**-10  # of a TF32 next to 1
    B = torch.tensor([1 + 0.75 * step, 1 + 0.25 * step, -1 - 1.5 * step]).unsqueeze(1)
    C = TileCase(machine, csr, 1, F32).spmm(B)
    assert C[:, 0].tolist() == [1 + step, 1.0, -1 - 2 * step]
    weighted = csr.with_values(B[:, 0].clone())
    C = TileCase(machine, weighted, 1, F32).spmm(torch.ones(3, 1))
    assert C[:, 0].tolist() == [1 + step, 1.0, -1 - 2 * step], "values are rounded when packed"


def test_host_and_device_round_to_tf32_alike():
    random = np.random.default_rng(0).integers(0, 2**32, 4000, dtype=np.uint32)
    edges = np.array([0, 0x80000000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x1000, 0xFFF, 0x3F801000])
    bits = np.concatenate([random, edges.astype(np.uint32)])
    finite = ~np.isnan(bits.view(np.float32))
    host = round_tf32(torch.from_numpy(bits.view(np.float32).copy())).numpy().view(np.uint32)
    assert np.array_equal(host[finite], device_rounding(bits)[finite])
    assert np.isnan(host[~finite].view(np.float32)).all()


@pytest.mark.parametrize("name", ["odd sizes", "tall", "one dense row", "no entries"])
def test_the_quick_way_of_a_bound_product_is_the_same(machine, stack, name):
    csr = whole_numbers(name, F32)
    case = TileCase(machine, csr, 32, F32)
    bound = case.runner.bind(case.stage.parts, csr.values, case.packed)
    for n in (32, 7):
        for _ in range(2):
            B = operand(csr, n, F32)
            machine.hold(B)
            C = bound(B)
            case.check_writes(C)
            assert torch.equal(C, reference(csr, B).to(F32))
    assert bound(torch.empty(csr.shape[1], 0)).shape == (csr.shape[0], 0)


def test_values_are_packed_on_the_way_when_no_copy_is_given(machine, monkeypatch):
    csr = whole_numbers("odd sizes", F16)
    case = TileCase(machine, csr, 16, F16)
    packing = case.runner.pack

    def held(*args):
        packed = packing(*args)
        machine.hold(packed)
        return packed

    monkeypatch.setattr(case.runner, "pack", held)
    B, out = operand(csr, 16, F16), torch.empty(csr.shape[0], 16, dtype=F16)
    machine.hold(B, out)
    case.runner.spmm(case.stage.parts, csr.values, None, B, out)
    assert torch.equal(out, reference(csr, B).to(F16))


def test_the_longest_window_is_cut_over_two_levels(machine, stack):
    csr = csr_of(with_dense_row(4, 900, 2))
    csr.values[:] = 1
    for dtype in (F32, F16):
        case = TileCase(machine, csr.with_values(csr.values.to(dtype)), 72, dtype)
        assert case.meta["nodes"] > 1
        B = operand(csr, 72, dtype).clamp(max=1)
        assert torch.equal(case.spmm(B), reference(csr, B).to(dtype))


def test_batches_past_the_grid_are_launched_in_pieces(machine, monkeypatch):
    monkeypatch.setattr(geometry, "MAX_BATCHES", 2)
    csr = whole_numbers("odd sizes", F32)
    B = operand(csr, 4, F32, (5,))
    case, out = TileCase(machine, csr, 4, F32), torch.full((5, 131, 4), float("nan"))
    machine.hold(B, out)
    case.runner.spmm(case.stage.parts, csr.values, case.packed, B, out)
    assert torch.equal(out, reference(csr, B).to(F32))

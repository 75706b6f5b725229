"""Packing and decoding agree: the tile kernel, replayed in NumPy, against scipy.

Numbers are small and whole, so that every order of additions gives the same bits. Rows of B that
no entry of A refers to are NaN, C and the scratch memory are NaN before: whatever is read or left
out by mistake shows. Rows of B pass through a ring whose rules ``replay_ring.py`` checks.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import Tensor

from sparsetile import CSR
from sparsetile.formats.bittcf import round_tf32
from sparsetile.kernels import KERNELS
from sparsetile.kernels import bittcf as kernel_module
from sparsetile.reorder import Permutation
from sparsetile.systems import Request, acc_runner, geometry
from sparsetile.systems.acc import LADDER, AccSystem
from sparsetile.systems.base import Epilogue
from tests.contracts.cases import MATRICES, csr_of, with_dense_row
from tests.kernels.replay import device_fields, host_letters
from tests.kernels.replay_bittcf import REPLAYS, TileMachine
from tests.kernels.replay_mma import round_tf32 as device_rounding
from tests.kernels.replay_ring import Ring
from tests.kernels.whole_numbers import operand, reference, whole_numbers

F16, F32 = torch.float16, torch.float32
# Multiples of 16 bytes go through the ring; of these 36 and 200 end inside a slab.
WIDTHS = [
    *((F32, n) for n in (1, 7, 33, 36, 130, 200)),
    *((F16, n) for n in (1, 7, 24, 33, 130, 200)),
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
def machine(monkeypatch: pytest.MonkeyPatch) -> TileMachine:
    made = TileMachine(REPLAYS)
    made.install(monkeypatch)
    return made


def with_tiles(tiles: list[int], dtype: torch.dtype, pattern: bool = False) -> CSR:
    """A matrix whose windows have these tiles and no columns in common; the last has five rows."""
    random = np.random.default_rng(5)
    rows, columns = [], []
    for window, count in enumerate(tiles):
        height = 5 if window == len(tiles) - 1 else 8
        first = 8 * sum(tiles[:window])
        dense = random.random((height, 8 * count)) < 0.3
        dense[random.integers(0, height, 8 * count), np.arange(8 * count)] = True
        row, column = np.nonzero(dense)
        rows.append(row + 8 * window)
        columns.append(column + first)
    row, column = np.concatenate(rows), np.concatenate(columns)
    values = random.choice([-2.0, -1.0, 1.0, 3.0], row.size)
    shape = (8 * len(tiles) - 3, 8 * sum(tiles) + 2)
    return csr_of(sp.csr_array((values, (row, column)), shape=shape), pattern=pattern, dtype=dtype)


class Case:
    """A matrix as the acc system builds it, ready to be launched on a machine."""

    def __init__(
        self,
        machine: TileMachine,
        csr: CSR,
        n: int,
        dtype: torch.dtype,
        order: Tensor | None = None,
        ablation: str | None = None,
    ) -> None:
        request = Request(csr, n, dtype, Permutation("given", order), ablation=ablation)
        self.machine, self.csr = machine, csr
        system = AccSystem()
        self.stage = system.build(request)
        self.meta = json.loads(self.stage.recipe.partition(":")[2])
        # Not the registry's runner, which would remember another machine's kernels.
        self.runner = system.make_runner(self.meta)
        self.packed = self.runner.pack(self.stage.parts, csr.values, dtype)
        machine.hold(*self.stage.parts, csr.values, self.packed)

    def spmm(self, B: Tensor, out: Tensor | None = None, **epilogue) -> Tensor:
        if out is None:
            out = torch.full(
                (*B.shape[:-2], self.csr.shape[0], B.shape[-1]), float("nan"), dtype=B.dtype
            )
        self.machine.hold(B, out)
        self.runner.spmm(
            self.stage.parts, self.csr.values, self.packed, B, out, Epilogue(**epilogue)
        )
        self.check_writes(out)
        return out

    def check_writes(self, out: Tensor) -> None:
        """Each element of C was written exactly once, nothing beside C, counters are back at 0."""
        if out.numel():
            written = self.machine.written[out.data_ptr()].writes
            strides = [stride * written.itemsize for stride in out.stride()]
            mine = np.lib.stride_tricks.as_strided(written, out.shape, strides)
            assert (mine == 1).all()
            assert int(written.sum()) == out.numel()
        assert not any(bool(counters.any()) for counters in self.machine.arrivals)


def test_host_and_device_name_the_same_kinds_of_parameters_in_the_same_order():
    spec = KERNELS["spmm_bittcf"]
    fields = device_fields(spec)
    assert [letter for _, letter in fields] == host_letters(spec)
    names = [name for name, _ in fields]
    assert names.index("arrivals") == acc_runner._ARRIVALS
    assert (names.index("b"), names.index("c")) == (acc_runner._B, acc_runner._C)
    assert names.index("partials") == acc_runner._PARTIALS
    assert names.index("b") * 8 == acc_runner._OPERANDS_OFFSET, "what a bound product patches"


@pytest.mark.parametrize("pattern", [False, True], ids=["weighted", "pattern"])
@pytest.mark.parametrize("name", MATRICES)
def test_the_replay_of_every_matrix_is_its_product(machine, name, pattern):
    for dtype, n in WIDTHS:
        csr = whole_numbers(name, dtype, pattern)
        B = operand(csr, n, dtype)
        C = Case(machine, csr, n, dtype).spmm(B)
        assert torch.equal(C, reference(csr, B).to(dtype)), f"{dtype} of width {n}"


@pytest.mark.parametrize("name", ["odd sizes", "one dense column", "long shared rows"])
def test_an_order_of_the_rows_changes_nothing(machine, name):
    for dtype in (F32, F16):
        csr = whole_numbers(name, dtype)
        order = torch.randperm(csr.shape[0])
        B = operand(csr, 40, dtype)
        C = Case(machine, csr, 40, dtype, order).spmm(B)
        assert torch.equal(C, reference(csr, B).to(dtype))


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_every_slab_width_and_access_width_does(machine, monkeypatch, dtype):
    """Wider and narrower slabs than the host would choose, with one slab and with several."""
    full = 16 // dtype.itemsize
    csr = whole_numbers("odd sizes", dtype)
    for vector, ablation in ((full, None), (full, "cache"), (full // 2, None), (1, None)):
        for slab in kernel_module.slabs(dtype, vector):
            monkeypatch.setattr(acc_runner, "choose_slab", lambda *_, slab=slab, **__: slab)
            for n in (vector, slab.columns, 3 * full * 8 + vector):
                B = operand(csr, n, dtype)
                case = Case(machine, csr, n, dtype, ablation=ablation)
                assert torch.equal(case.spmm(B), reference(csr, B))
    keys = ("kSpan", "kPieces", "kVec", "kStages")
    seen = {tuple(c[key] for key in keys) for c in machine.configs}
    listed = {
        tuple(c[key] for key in keys)
        for c in kernel_module.SPMM_BITTCF.configs()
        if c["ELEMENT"] == kernel_module.ELEMENTS[dtype]
    }
    assert seen == listed, "every configuration that is compiled is replayed"


@pytest.mark.parametrize("pattern", [False, True], ids=["weighted", "pattern"])
@pytest.mark.parametrize("name", RUNS)
def test_runs_of_windows_store_each_window_where_it_ends(machine, name, pattern):
    for dtype, n in ((F32, 40), (F32, 7), (F16, 72), (F16, 200), (F16, 33)):
        csr = with_tiles(RUNS[name], dtype, pattern)
        B = operand(csr, n, dtype)
        case = Case(machine, csr, n, dtype, torch.arange(csr.shape[0]))
        assert torch.equal(case.spmm(B), reference(csr, B).to(dtype)), f"{dtype} of width {n}"
    windows = [-last for *_, last in case.stage.parts[7].tolist() if last < 0]
    assert sum(windows) == sum(tiles < 40 for tiles in RUNS[name]), "the others are cut"
    assert ("cut" in name) == (case.meta["slots"] > 0)
    assert max(windows, default=2) > 1, "the case must have a run of several windows"


def test_a_batch_of_B_goes_through_runs_and_cut_windows_alike(machine):
    for dtype, n in ((F32, 20), (F16, 40)):
        csr = with_tiles(RUNS["empty beside cut ones"], dtype)
        B = operand(csr, n, dtype, (3,))
        assert torch.equal(Case(machine, csr, n, dtype).spmm(B), reference(csr, B).to(dtype))


@pytest.mark.parametrize("ablation", LADDER)
@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_every_step_of_the_ladder_gives_the_same_product(machine, ablation, dtype):
    for name in ("odd sizes", "one dense row", "equal rows"):
        csr = whole_numbers(name, dtype)
        B = operand(csr, 64, dtype)
        case = Case(machine, csr, 64, dtype, ablation=ablation)
        assert torch.equal(case.spmm(B), reference(csr, B).to(dtype))
        assert not case.meta["slots"], "windows stay whole below the last step"
        config = machine.configs[-1]
        assert config["kCacheB"] == config["kStreamC"] == (ablation in ("cache", "pipeline"))
        assert config["kStages"] == (2 if ablation == "pipeline" else 1)


def strided(B: Tensor, how: str) -> Tensor:
    *lead, rows, cols = B.shape
    if how == "row stride":
        wide = torch.full((*lead, rows, cols + 5), float("nan"), dtype=B.dtype)
        wide[..., :cols] = B
        return wide[..., :cols]
    if how == "misaligned":
        flat = torch.full((B.numel() + 1,), float("nan"), dtype=B.dtype)
        flat[1:] = B.flatten()
        return flat[1:].view(B.shape)
    return B[:1].expand(B.shape) if lead else B  # "same batch again"


@pytest.mark.parametrize("how", ["row stride", "misaligned", "same batch again"])
@pytest.mark.parametrize("batch", [(), (3,)], ids=["matrix", "batch"])
def test_any_stride_and_batch_is_read_and_written_in_place(machine, how, batch):
    for dtype in (F32, F16):
        csr = whole_numbers("one dense row", dtype)
        B = strided(operand(csr, 24, dtype, batch), how)
        wide = torch.full((*batch, csr.shape[0], 40), 7.0, dtype=dtype)
        C = Case(machine, csr, 24, dtype).spmm(B, out=wide[..., :24])
        assert torch.equal(C, reference(csr, B).to(dtype))
        assert bool((wide[..., 24:] == 7).all())


def test_alpha_beta_mean_bias_and_relu_act_on_the_right_elements(machine):
    csr = whole_numbers("one dense row", F32)
    B = operand(csr, 20, F32)
    plain = reference(csr, B)
    case = Case(machine, csr, 20, F32, torch.randperm(csr.shape[0]))
    before = torch.randint(-4, 4, plain.shape).to(F32)
    C = case.spmm(B, out=before.clone(), alpha=2.0, beta=-0.5)
    assert torch.equal(C.double(), 2 * plain - 0.5 * before.double())
    lengths = csr.row_lengths().clamp(min=1).unsqueeze(1)
    assert torch.allclose(case.spmm(B, mean=True).double(), plain / lengths, rtol=1e-6)
    bias = torch.arange(20).to(F32)
    machine.hold(bias)
    C = case.spmm(B, bias=bias, relu=True)
    assert torch.equal(C.double(), torch.relu(plain + bias.double()))


def test_sixteen_bit_input_may_be_stored_as_float32(machine):
    csr = whole_numbers("one dense row", F16)
    for n in (7, 12, 64):
        B = operand(csr, n, F16)
        out = torch.full((csr.shape[0], n), float("nan"))
        C = Case(machine, csr, n, F16).spmm(B, out=out)
        assert torch.equal(C, reference(csr, B).float())


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@pytest.mark.parametrize("pattern", [False, True], ids=["weighted", "pattern"])
def test_inf_and_nan_of_B_reach_only_the_rows_that_refer_to_them(machine, dtype, pattern):
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
    C = Case(machine, csr, 40, dtype).spmm(B)
    assert torch.equal(C.double().nan_to_num(nan=77), expected.nan_to_num(nan=77))
    assert machine.recomputed > 0, "the tiles' zeros must have met a NaN"
    Case(machine, csr, 40, dtype).spmm(clean)
    assert machine.recomputed == 0, "finite products take the quick way"


def test_a_cut_window_with_a_nan_is_computed_again_as_a_whole(machine):
    csr = whole_numbers("one dense row", F32)
    case = Case(machine, csr, 8, F32)
    assert case.meta["slots"] > 0, "the case must cut a window"
    B = operand(csr, 8, F32)
    only = int(csr.indices[csr.indptr[17] + 1200])  # the dense row refers to every column
    B[only, 2] = float("nan")
    C = case.spmm(B)
    refers = torch.zeros(csr.shape[0], dtype=torch.bool)
    refers[csr.row_ids()[csr.indices == only]] = True
    assert torch.equal(C[:, 2].isnan(), refers)
    assert torch.equal(C[~refers].double(), reference(csr, B)[~refers])


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@pytest.mark.parametrize("n", [16, 7], ids=["ring", "direct"])
def test_exactly_the_windows_of_a_run_that_meet_a_nan_are_computed_again(machine, dtype, n):
    tiles = [2, 0, 1, 1, 2, 0, 1, 70, 1, 1, 0]
    csr = with_tiles(tiles, dtype)
    case = Case(machine, csr, n, dtype)
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
    C = Case(machine, csr, 1, F32).spmm(B)
    assert C[:, 0].tolist() == [1 + step, 1.0, -1 - 2 * step]
    weighted = csr.with_values(B[:, 0].clone())
    C = Case(machine, weighted, 1, F32).spmm(torch.ones(3, 1))
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
def test_the_quick_way_of_a_bound_product_is_the_same(machine, name):
    csr = whole_numbers(name, F32)
    case = Case(machine, csr, 32, F32)
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
    case = Case(machine, csr, 16, F16)
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


def test_the_longest_window_is_cut_over_two_levels(machine):
    csr = csr_of(with_dense_row(4, 900, 2))
    csr.values[:] = 1
    for dtype in (F32, F16):
        case = Case(machine, csr.with_values(csr.values.to(dtype)), 72, dtype)
        assert case.meta["nodes"] > 1
        B = operand(csr, 72, dtype).clamp(max=1)
        assert torch.equal(case.spmm(B), reference(csr, B).to(dtype))


@pytest.mark.parametrize("field, change", [(0, 1), (1, 1), (2, -1), (3, 1), (3, -1)])
@pytest.mark.parametrize("n", [8, 7], ids=["ring", "direct"])
def test_a_wrong_schedule_does_not_pass(machine, field, change, n):
    csr = with_tiles([3, 2, 3, 1, 4, 2, 2, 1], F32)
    case = Case(machine, csr, n, F32)
    items = case.stage.parts[7]
    assert len(items) > 1 and int(items[0, 3]) < -1
    B = operand(csr, n, F32) + 1
    expected = reference(csr, B).to(F32)
    assert torch.equal(case.spmm(B), expected)
    items[0, field] += change
    with pytest.raises(AssertionError):
        assert torch.equal(case.spmm(B), expected)


@pytest.mark.parametrize("stages", ["one", "two"])
def test_the_ring_needs_each_of_its_waits_and_barriers(machine, monkeypatch, stages):
    csr = with_tiles([9, 7], F32)
    case = Case(machine, csr, 8, F32, ablation="cache" if stages == "one" else None)
    B = operand(csr, 8, F32)
    assert torch.equal(case.spmm(B), reference(csr, B).to(F32))
    for rule in ("sync", "wait", "commit"):
        with monkeypatch.context() as without, pytest.raises(AssertionError):
            without.setattr(Ring, rule, lambda *_: None)
            case.spmm(B)


def test_a_wrong_bit_does_not_pass(machine):
    csr = whole_numbers("odd sizes", F32)
    case = Case(machine, csr, 8, F32)
    B = operand(csr, 8, F32) + 1
    case.stage.parts[3][0] ^= 1
    assert not torch.equal(case.spmm(B), reference(csr, B).to(F32))


def test_batches_past_the_grid_are_launched_in_pieces(machine, monkeypatch):
    monkeypatch.setattr(geometry, "MAX_BATCHES", 2)
    csr = whole_numbers("odd sizes", F32)
    B = operand(csr, 4, F32, (5,))
    case, out = Case(machine, csr, 4, F32), torch.full((5, 131, 4), float("nan"))
    machine.hold(B, out)
    case.runner.spmm(case.stage.parts, csr.values, case.packed, B, out)
    assert torch.equal(out, reference(csr, B).to(F32))

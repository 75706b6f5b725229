"""The rsh system: when it can serve, how it splits rows, what it builds and what it launches."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import Tensor

import sparsetile as st
from sparsetile.core.device import H200
from sparsetile.engines.request import BuiltSystem
from sparsetile.engines.rows.cost import predict_rows
from sparsetile.engines.rows.runner import RowRunner
from sparsetile.engines.tiles import hybrid_cost as rsh_cost
from sparsetile.engines.tiles import hybrid_runner
from sparsetile.engines.tiles.hybrid_cost import (
    CUT,
    CUT_LEAST,
    CUT_MOST,
    HEIGHT,
    PIECE,
    RUN,
    SHARED_LEAST,
    SHARED_MOST,
    TILE_CHAIN,
    TIMES,
    WIDE,
    WIDE_RUN,
    cheapest_split,
    counted,
    long_windows,
    row_costs,
)
from sparsetile.formats.window_split import count_columns, split_by_cost, split_by_threshold
from sparsetile.kernels import KernelSpec
from sparsetile.kernels.rstile import SPMM_RSTILE, choose_slabs
from sparsetile.launch.interface import PLAIN, Epilogue
from sparsetile.reorder import Permutation
from sparsetile.systems import SYSTEMS, runner
from sparsetile.systems.rsh.runner import RSHRunner
from sparsetile.systems.rsh.system import thresholds
from tests.case_names import case_of
from tests.contracts.cases import MATRICES, csr_of, equal_rows, random_matrix, tf32
from tests.host import answer_on_host
from tests.systems.requests import OnGPU, check_plan_file, request_for

RSH = SYSTEMS["rsh"]
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
request = functools.partial(request_for, F32, ceilings=H200)  # predicted as for that GPU


def build(csr: st.CSR | None = None, ablation: str | None = "tiles", **changes: Any) -> BuiltSystem:
    """All rows in windows, which small matrices would not lead the system to."""
    return RSH.build(request(csr=csr, ablation=ablation, **changes))


def meta_of(built: BuiltSystem) -> dict[str, Any]:
    return json.loads(built.recipe.partition(":")[2])


def shared_and_alone() -> st.CSR:
    """48 rows that share 72 columns, between 20 and 30 rows of three columns each."""
    shared, alone = equal_rows(48, 500).toarray(), random_matrix(50, 500, 0.006).toarray()
    return csr_of(sp.csr_array(np.concatenate([alone[:20], shared, alone[20:]])))


# -- reasons


def test_float32_waits_until_torch_allows_tf32_and_16_bits_do_not(capability):
    with tf32(False):
        assert RSH.reasons(request(OnGPU)) == [
            "rounds float32 to TF32, which torch does not allow now: set "
            "torch.backends.cuda.matmul.allow_tf32 = True"
        ]
        assert RSH.reasons(request(OnGPU, dtype=F16)) == []
        assert RSH.reasons(request(OnGPU, dtype=BF16, deterministic=True)) == []
    with tf32(True):
        assert RSH.reasons(request(OnGPU)) == []


def test_older_gpus_the_cpu_and_float64_are_refused_with_reasons(capability):
    capability.append((7, 5))
    assert RSH.reasons(request(OnGPU, dtype=F16)) == ["needs sm_80 or newer, this GPU is sm_75"]
    capability.append((8, 0))
    assert RSH.reasons(request(OnGPU, dtype=F16)) == []
    assert RSH.reasons(request(OnGPU, dtype=torch.float64)) == [
        "takes float32, float16, bfloat16, not float64"
    ]
    assert RSH.reasons(request()) == ["runs on cuda, A is on cpu"]


# -- which rows go where


@pytest.mark.parametrize(
    "rows, entries, expected",
    [(10, 0, 0), (10, 20, 1), (10, 50, 2), (10, 60, 3), (10, 120, 6), (10, 900, 6), (1, 3, 2)],
)
def test_the_papers_thresholds_are_half_of_a_mean_row_and_at_most_six(rows, entries, expected):
    dense = np.zeros((rows, 100))
    dense.flat[:entries] = 1
    assert thresholds(request(csr=csr_of(sp.csr_array(dense)))) == (expected, 3)


def test_a_matrix_without_rows_has_thresholds_all_the_same():
    assert thresholds(request(csr=csr_of(MATRICES["no rows"]()))) == (0, 3)


@pytest.mark.parametrize("permuted", [False, True], ids=["given order", "permuted"])
@pytest.mark.parametrize("ablation", RSH.ablations)
def test_every_row_is_owned_by_exactly_one_part(ablation, permuted):
    for name in (*MATRICES, "shared and alone"):
        with case_of(name):
            csr = shared_and_alone() if name == "shared and alone" else csr_of(MATRICES[name]())
            order = torch.randperm(csr.shape[0]) if permuted else None
            built = build(csr, ablation, permutation=Permutation("given", order))
            windows, items = built.tensors["order"], built.tensors["items"]
            together = torch.cat([windows, items[:, 0].unique()])
            assert torch.equal(together.sort().values, torch.arange(csr.shape[0]).int())
            assert windows.numel() == meta_of(built)["positions"]


def windows_of(built: BuiltSystem) -> list[int]:
    """Rows of A inside windows."""
    return built.tensors["order"].tolist()


def test_each_ablation_splits_rows_by_its_own_rule():
    csr = shared_and_alone()
    counts = count_columns(csr, height=HEIGHT)
    wanted = request(csr=csr, n=128)
    expected = {
        "tiles": split_by_threshold(counts, 0, 0),
        "threshold": split_by_threshold(counts, *thresholds(wanted)),
        "mixed": split_by_cost(counts, row_costs(wanted)),
    }
    for ablation, split in expected.items():
        assert windows_of(build(csr, ablation, n=128)) == split.tiled.tolist()
    assert windows_of(build(csr, "rows", n=128)) == []
    mixed = windows_of(build(csr, "mixed", n=128))
    assert set(mixed) == set(range(20, 68)), "rows that share columns, and no others"
    assert len({len(split.tiled) for split in expected.values()}) == 3, "the rules differ here"


def test_with_tiles_alone_only_rows_without_entries_are_left_to_cuda_cores():
    csr = csr_of(MATRICES["empty rows"]())
    rest = build(csr).tensors["items"]
    assert rest.shape[0] > 0 and bool((rest[:, 1] == rest[:, 2]).all())


def test_windows_are_cut_from_the_plans_order():
    csr = csr_of(random_matrix(40, 30, 0.2))
    order = torch.randperm(40)
    built = build(csr, permutation=Permutation("given", order))
    assert windows_of(built) == order.tolist()
    assert windows_of(build(csr)) == list(range(40))


def test_all_rows_on_cuda_cores_is_the_product_of_csr():
    csr = csr_of(random_matrix(150, 3000, 0.003))
    wanted = request(csr=csr, n=64)
    built, other = RSH.build(wanted), SYSTEMS["csr"].build(wanted)
    assert built.system == "rsh" and built.recipe.startswith("rsh:")
    assert built.choices == {**other.choices, "split": "all rows on CUDA cores, as csr"}
    assert all(torch.equal(t, other.tensors[k]) for k, t in built.tensors.items())
    assert built.tensors.keys() == other.tensors.keys()
    assert isinstance(runner(built.recipe), RowRunner)
    assert cheapest_split(wanted).partition is None


def test_a_mixture_is_built_if_it_is_predicted_faster_and_asked_for_if_it_is_not():
    fast, slow = csr_of(equal_rows(640, 5000)), csr_of(equal_rows(64, 400))
    built = RSH.build(request(csr=fast, n=512))
    assert isinstance(runner(built.recipe), RSHRunner) and "ablation" not in built.choices
    assert windows_of(built) == list(range(640))
    assert isinstance(runner(RSH.build(request(csr=slow, n=512)).recipe), RowRunner)
    asked = build(slow, "mixed", n=512)
    assert isinstance(runner(asked.recipe), RSHRunner) and windows_of(asked) == list(range(64))


# -- prediction


@pytest.mark.parametrize("dtype", RSH.dtypes, ids=str)
@pytest.mark.parametrize("name", ["odd sizes", "tall", "no entries", "in windows"])
def test_predictions_are_positive_and_grow_with_the_width(name, dtype):
    matrix = equal_rows(640, 5000) if name == "in windows" else MATRICES[name]()
    csr = csr_of(matrix, dtype=dtype)
    wide = cheapest_split(request(csr=csr, n=512, dtype=dtype))
    assert (wide.partition is not None) == (name == "in windows")
    found = [RSH.predict(request(csr=csr, n=n, dtype=dtype)) for n in (1, 32, 128, 512)]
    assert found[0] > 0 and all(a < b for a, b in itertools.pairwise(found))


@pytest.mark.parametrize("name", MATRICES)
def test_no_product_is_predicted_slower_than_rows_alone(name):
    for n in (8, 128, 512):
        wanted = request(csr=csr_of(MATRICES[name]()), n=n)
        assert RSH.predict(wanted) <= predict_rows(wanted)


def test_no_product_is_predicted_faster_than_its_operands_are_read():
    csr = csr_of(equal_rows(640, 5000))
    slow = dataclasses.replace(H200, dram=H200.dram / 100)
    for n in (8, 32, 512):
        wanted = dataclasses.replace(request(csr=csr, n=n), ceilings=slow)
        operands = csr.nnz * 8 + 4 * n * (csr.shape[0] + csr.shape[1])
        assert RSH.predict(wanted) >= operands / (2 * slow.dram)


def test_the_longest_window_is_predicted_if_windows_do_not_fill_the_gpu():
    wanted = request(csr=csr_of(equal_rows(640, 5000)), n=512)
    longest, _ = long_windows(wanted)
    assert int(counted(wanted).pairs[0]) > longest * 8, "shared: it counts as the longest alone"
    fixed, byte = TILE_CHAIN[4]
    chain = 1e-6 * (TIMES[4].start + longest * (fixed + byte * 512))
    assert cheapest_split(wanted).partition is not None
    assert RSH.predict(wanted) == pytest.approx(chain)


def test_more_windows_are_predicted_to_take_longer():
    some, more = (request(csr=csr_of(equal_rows(rows, 5000)), n=512) for rows in (1280, 2560))
    for wanted in (some, more):
        partition = cheapest_split(wanted).partition
        assert partition is not None and partition.windows.numel() == wanted.csr.shape[0] // 16
    assert RSH.predict(some) < RSH.predict(more)


def test_a_prediction_counts_columns_once(calls_of):
    wanted = request(csr=csr_of(equal_rows(640, 5000)), n=512)
    RSH.predict(wanted)

    again = calls_of(rsh_cost, "count_columns")
    RSH.build(wanted)
    RSH.predict(wanted.changed(n=64))
    assert not again


def test_pieces_of_long_windows_are_part_of_their_cost():
    wanted = request(n=128)
    costs = row_costs(wanted)
    assert costs.longest == long_windows(wanted)[0] and costs.piece == PIECE * costs.tile > 0
    assert row_costs(request(n=256)).tile > costs.tile
    assert row_costs(request(n=128, dtype=F16)).tile < costs.tile


# -- build


def test_recipe_and_choices_say_what_was_built():
    csr = shared_and_alone()
    built = build(csr, "mixed", n=128)
    short = csr.nnz - 48 * 72
    assert meta_of(built) == {
        "rows": 98, "cols": 500, "nnz": csr.nnz, "tensors": list(built.tensors), "positions": 48,
        "tiles": 30, "items": 2, "shared": 0, "slots": 0, "nodes": 0,
        "residual": {"sections": [0, 0, 0, 0, 50], "slots": 0, "nodes": 0},
    }  # fmt: skip
    assert built.choices == {
        "format": f"RS-Tile, 3 windows of 16 rows, 30 tiles of {48 * 72 / 30:.1f} entries",
        "split": f"{100 * (1 - short / csr.nnz):.1f} % of the entries and 48 of 98 rows in windows",
        "schedule": "2 items of windows, 0 of them shared by the warps of a block, at most "
        f"{CUT_LEAST} tiles, 0 partial sums; 50 items of rows, 0 partial sums",
        "ablation": "mixed",
    }
    assert built.tensors["columns"] is csr.indices and built.tensors["indptr"] is csr.indptr


def full(windows: int, tiles: int) -> st.CSR:
    """Windows of sixteen full rows, each with as many tiles."""
    return csr_of(sp.csr_array(np.ones((16 * windows, 8 * tiles))))


@pytest.mark.parametrize("dtype, depth", [(F32, 1), (F16, 2), (BF16, 2)], ids=str)
def test_long_windows_are_shared_and_longer_ones_are_cut(dtype, depth):
    shared, limit = SHARED_LEAST[dtype.itemsize] * depth, CUT_LEAST * depth
    assert long_windows(request(csr=full(1, limit), dtype=dtype)) == (shared, limit)
    built = [build(full(1, t), dtype=dtype) for t in (shared, shared + 1, limit, limit + 1)]
    assert [meta_of(b)["shared"] for b in built] == [0, 1, 1, 2]
    assert [meta_of(b)["slots"] for b in built] == [0, 0, 0, 2]
    said = [b.choices["schedule"] for b in built]
    most = f"by the warps of a block, at most {limit} tiles"
    assert said[0].startswith(f"1 items of windows, 0 of them shared {most}, 0 partial sums")
    assert said[3].startswith(f"2 items of windows, 2 of them shared {most}, 2 partial sums")


def test_the_limits_grow_with_what_each_warp_has_to_do(gpu_facts):
    csr = full(60, 40)
    steps = 1200  # of two tiles, for 16 warps an SM at 128 columns
    gpu_facts(processors=2)
    shared, cut = round(steps / 32), round(CUT * steps / 32)
    assert long_windows(request(csr=csr, n=128, dtype=F16)) == (2 * shared, 2 * cut)
    wide = long_windows(request(csr=csr, n=384, dtype=F16))
    assert wide == (2 * SHARED_MOST, 2 * CUT_MOST), "but never more"
    assert long_windows(request(csr=csr, n=128)) == (SHARED_MOST, 2 * cut), "twice the steps"
    gpu_facts(processors=132)
    least = long_windows(request(csr=csr, n=128, dtype=F16))
    assert least == (2 * SHARED_LEAST[2], 2 * CUT_LEAST), "nor less"


def test_runs_of_short_windows_are_shorter_in_wide_float32_products():
    csr = full(24, 2)  # steps of two tiles: one a window

    def windows(n: int, dtype: torch.dtype) -> int:
        items = build(csr, n=n, dtype=dtype).tensors["window_items"]
        return int((-items[:, 3]).max())

    assert windows(128, F32) == windows(512, F16) == RUN
    assert windows(WIDE, F32) == WIDE_RUN


@pytest.mark.parametrize("ablation", [None, *RSH.ablations])
def test_a_plan_of_no_columns_is_built(ablation):
    assert build(shared_and_alone(), ablation, n=0).recipe.startswith("rsh:")


def test_packed_values_are_operands_and_float32_ones_are_tf32():
    csr = csr_of(random_matrix(40, 30, 0.2))
    built = build(csr)
    work = runner(built.recipe)
    assert work.packed_names == ("fragments",) and work.needs_packed_values
    packed = work.pack(built.tensors, csr.values, F32)["fragments"]
    assert packed.numel() == 128 * meta_of(built)["tiles"], "zeros included"
    assert not bool((packed.view(torch.int32) & 0x1FFF).any())
    found, expected = packed[packed != 0].sort().values, csr.values.sort().values
    assert torch.allclose(found, expected, rtol=2.0**-11)
    half = work.pack(built.tensors, csr.values, F16)["fragments"]
    assert torch.equal(half[half != 0].sort().values, csr.values.half().sort().values)


@pytest.mark.parametrize("dtype", RSH.dtypes, ids=str)
def test_a_pattern_is_packed_as_ones(dtype):
    csr = csr_of(random_matrix(40, 30, 0.2), pattern=True)
    built = build(csr, dtype=dtype)
    packed = runner(built.recipe).pack(built.tensors, None, dtype)["fragments"]
    assert packed.dtype is dtype and float(packed.float().sum()) == csr.nnz
    assert set(packed.float().tolist()) == {0.0, 1.0}


# -- runner


class FakeKernel:
    """Keeps what it is launched with."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.launches: list[SimpleNamespace] = []

    def launch(self, grid, threads, stream, params, *, overlap) -> None:
        self.launches.append(
            SimpleNamespace(grid=grid, threads=threads, params=params, overlap=overlap)
        )

    def prepare(self, grid, threads, params, names, rare, *, overlap) -> tuple[Any, ...]:
        return grid, threads, params, (*names, *rare), overlap


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch, fresh_runners: None) -> list[FakeKernel]:
    """Kernels that were loaded; nothing is launched, and scratch memory lies at 1000 and 2000."""
    found: list[FakeKernel] = []

    def load(spec: KernelSpec, config: dict[str, Any], device: int | None) -> FakeKernel:
        assert spec is SPMM_RSTILE
        found.append(FakeKernel(config))
        return found[-1]

    asked: list[tuple[int, int]] = []

    def scratch(device, stream, partials: int, arrivals: int):
        asked.append((partials, arrivals))
        return SimpleNamespace(data_ptr=lambda: 1000), SimpleNamespace(data_ptr=lambda: 2000)

    answer_on_host(monkeypatch, hybrid_runner, stream=7, load=load, scratch=scratch)
    monkeypatch.setattr(FakeKernel, "scratch", asked, raising=False)
    return found


def run(
    built: BuiltSystem, B: Tensor, out: Tensor, values: Tensor | None = None,
    epilogue: Epilogue = PLAIN,
) -> None:  # fmt: skip
    runner(built.recipe).spmm(built.tensors, values, None, B, out, epilogue)


@pytest.mark.parametrize("dtype, n", [(F32, 7), (F32, 192), (F16, 130), (BF16, 1000)])
def test_a_plan_compiles_one_kernel_and_knows_its_grid(loaded, dtype, n):
    csr = csr_of(random_matrix(200, 90, 0.1), dtype=dtype)
    work = runner(build(csr, n=n, dtype=dtype).recipe)
    for _ in range(2):
        work.prepare(n, dtype, True, torch.device("cuda", 0))
    (kernel,) = loaded
    slabs = choose_slabs(dtype, -(-n * dtype.itemsize // 16) * 16 // dtype.itemsize)
    assert kernel.config in list(SPMM_RSTILE.configs()) and kernel.config["kCols"] == slabs.columns
    (launch,) = work._launches.values()
    windows = -(-(work.meta["items"] << slabs.shift) // 4)  # a warp an item and slab
    assert launch.window_blocks == windows
    assert launch.grid(5) == (windows, slabs.groups(n), 5), "no rows beside the windows"


def test_blocks_of_rows_follow_those_of_windows(loaded):
    built = build(shared_and_alone(), "mixed", n=128)
    run(built, torch.ones(500, 256), torch.empty(98, 256))
    (launch,) = loaded[0].launches
    rows_of_blocks, slabs = -(-50 // 16), choose_slabs(F32, 256)
    assert (slabs.rows.lanes, slabs.row_slabs, slabs.shift) == (8, 2, 1)
    windows = (2 << 1) // 4  # two items, two slabs
    assert launch.grid == (windows + 2 * rows_of_blocks, 1, 1) and launch.threads == 128
    params = launch.params
    assert (params["window_blocks"], params["row_slabs"], params["slabs"]) == (windows, 2, 2)
    assert (params["window_slabs"], params["slab_shift"], params["rows"]) == (2, 1, 48)
    assert params["block_end"] == (0, 0, 0, 0, rows_of_blocks) and params["n"] == 256
    assert set(params) == {field.name for field in SPMM_RSTILE.params.fields}
    assert launch.overlap, "no partial sums are waited for"


def test_partial_sums_of_windows_and_of_rows_lie_behind_each_other(loaded):
    shared, row = np.eye(16, 5000) + (np.arange(5000) < 2000), np.zeros((1, 9000))
    row[0, 5000:] = 1
    matrix = np.concatenate([np.pad(shared, ((0, 0), (0, 4000))), row])
    built = build(csr_of(sp.csr_array(matrix)), "mixed", n=128)
    meta, rest = meta_of(built), meta_of(built)["residual"]
    assert meta["slots"] and rest["slots"]
    run(built, torch.ones(3, 9000, 256), torch.empty(3, 17, 256))
    (launch,) = loaded[0].launches
    window_bytes = 2 * meta["slots"] * 16 * 128 * 4  # both slabs, sixteen rows of 128 columns
    row_bytes = 2 * rest["slots"] * 128 * 4
    assert FakeKernel.scratch == [
        (3 * (window_bytes + row_bytes), 3 * 2 * (meta["nodes"] + rest["nodes"]))
    ]
    params = launch.params
    assert (params["window_partials"], params["partials"]) == (1000, 1000 + 3 * window_bytes)
    assert (params["window_arrivals"], params["arrivals"]) == (2000, 2000 + 4 * 6 * meta["nodes"])
    assert not launch.overlap and launch.grid[2] == 3


def test_batches_whose_partial_sums_are_large_go_in_pieces(loaded, constants):
    built = build(csr_of(np.ones((16, 8 * 165))), n=128)
    one = meta_of(built)["slots"] * 16 * 128 * 4
    constants(hybrid_runner, MAX_SCRATCH=2 * one + 1)
    run(built, torch.ones(5, 1320, 128), torch.empty(5, 16, 128))
    assert [launch.grid[2] for launch in loaded[-1].launches] == [2, 2, 1]
    constants(hybrid_runner, MAX_SCRATCH=one - 1)
    run(built, torch.ones(2, 1320, 128), torch.empty(2, 16, 128))
    assert [launch.grid[2] for launch in loaded[-1].launches] == [1, 1], "one at least"


@pytest.mark.parametrize("dtype, width", [(F32, 8), (F16, 8), (BF16, 8)])
def test_odd_widths_are_copied_into_whole_accesses(loaded, dtype, width):
    csr = csr_of(random_matrix(150, 130, 0.2), dtype=dtype)
    B = torch.ones(130, 7, dtype=dtype)
    out = torch.empty(150, 7, dtype=dtype)
    run(build(csr, dtype=dtype), B, out)
    (launch,) = loaded[0].launches
    assert launch.params["b"] != B.data_ptr() and launch.params["b"] % 16 == 0
    assert launch.params["b_row_bytes"] == width * dtype.itemsize
    assert launch.params["c"] != out.data_ptr() and launch.params["c_row_stride"] == width
    assert launch.params["n"] == width, "columns past the last are zeros, and left behind"


@pytest.mark.parametrize("how", ["stride", "address"])
def test_rows_of_B_that_are_not_aligned_are_copied_and_C_is_written_in_place(loaded, how):
    B = torch.ones(130, 17)[:, :16] if how == "stride" else torch.ones(2081)[1:].view(130, 16)
    out = torch.empty(150, 16)
    run(build(), B, out)
    (launch,) = loaded[0].launches
    assert launch.params["b"] != B.data_ptr() and launch.params["b"] % 16 == 0
    assert launch.params["b_row_bytes"] == 64 and launch.params["c"] == out.data_ptr()


def test_aligned_operands_are_taken_as_they_are(loaded):
    B, out = torch.ones(130, 24)[:, :16], torch.empty(150, 24)[:, 4:20]
    run(build(), B, out)
    (launch,) = loaded[0].launches
    assert (launch.params["b"], launch.params["c"]) == (B.data_ptr(), out.data_ptr())
    assert (launch.params["b_row_bytes"], launch.params["c_row_stride"]) == (96, 24)


def test_rows_of_C_that_are_not_aligned_are_copied(loaded):
    out = torch.empty(150, 17)[:, :16]
    run(build(), torch.ones(130, 16), out)
    (launch,) = loaded[0].launches
    assert launch.params["c"] != out.data_ptr() and launch.params["c_row_stride"] == 16


def test_patterns_and_other_types_of_C_ask_for_kernels_of_their_own(loaded):
    csr = csr_of(random_matrix(150, 130, 0.2), dtype=F16)
    built = build(csr, dtype=F16)
    B, out = torch.ones(130, 16, dtype=F16), torch.empty(150, 16, dtype=F16)
    run(built, B, out, csr.values)
    run(built, B, out)
    run(built, B, out.float(), csr.values)
    shown = [(each.config["kWeighted"], each.config["OUTPUT"]) for each in loaded]
    assert shown == [(True, "F16"), (False, "F16"), (True, "F32")]
    assert [each.launches[0].params["values"] for each in loaded] == [
        csr.values.data_ptr(), 0, csr.values.data_ptr(),
    ]  # fmt: skip


def test_prepared_launches_are_for_aligned_operands(loaded):
    built = build()
    work = runner(built.recipe)
    packed = work.pack(built.tensors, None, F32)
    ((grid, threads, params, names, overlap),) = work.prepare_launches(
        built.tensors, None, packed, torch.ones(130, 16)
    )
    assert (threads, names, overlap) == (128, ("b", "c"), True) and grid[1:] == (1, 1)
    assert (params["b_row_bytes"], params["c_row_stride"], params["n"]) == (64, 16, 16)
    assert params["fragments"] == packed["fragments"].data_ptr()
    flat = torch.ones(130 * 8 + 1)[1:].view(130, 8)
    for B in (torch.ones(130, 7), flat):
        assert work.prepare_launches(built.tensors, None, packed, B) is None
    assert work.prepare_launches(built.tensors, None, None, torch.ones(130, 16)) is None


def test_nothing_is_launched_for_nothing(loaded):
    for name, n, batch in (("no rows", 4, ()), ("odd sizes", 0, ()), ("odd sizes", 4, (0,))):
        csr = csr_of(MATRICES[name]())
        built = build(csr)
        run(built, torch.ones(*batch, csr.shape[1], n), torch.empty(*batch, csr.shape[0], n))
        if not batch:
            runner(built.recipe).prepare(n, F32, True, torch.device("cuda", 0))
    assert loaded == []
    empty = build(csr_of(MATRICES["no rows"]()))
    assert runner(empty.recipe).bind(empty.tensors, None, None) is None


# -- plan files


def test_a_plan_file_keeps_parts_and_recipe_and_names_the_reason_if_it_cannot_run(tmp_path):
    check_plan_file(RSH, F32, tmp_path)

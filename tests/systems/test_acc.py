"""The acc system: when it can serve, what it builds, and the ladder of its ablation."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import sparsetile as st
from sparsetile.engines.request import Request
from sparsetile.engines.tiles import short
from sparsetile.engines.tiles import short_runner as acc_runner
from sparsetile.kernels import KernelSpec
from sparsetile.kernels.bittcf import SPMM_BITTCF, Policy, bittcf_config, slabs
from sparsetile.kernels.csr import WIDE_SLAB_BYTES
from sparsetile.plan.planner import build_plan
from sparsetile.reorder import Permutation
from sparsetile.systems import SYSTEMS
from sparsetile.systems.acc.system import ABLATIONS, LADDER, AccSystem
from tests.contracts.cases import MATRICES, csr_of, random_matrix, tf32, with_dense_row

ACC = AccSystem()


@dataclass(frozen=True, eq=False)
class OnGPU(Request):
    """A request that says its matrix is on a GPU."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)


def request(kind: type[Request] = Request, csr: st.CSR | None = None, **changes) -> Request:
    wanted = {"n": 16, "dtype": torch.float32, "permutation": Permutation("identity", None)}
    return kind(csr or csr_of(random_matrix(40, 30, 0.2)), **{**wanted, **changes})


def test_float32_waits_until_torch_allows_tf32(capability):
    with tf32(False):
        found = ACC.reasons(request(OnGPU))
        assert ACC.reasons(request(OnGPU, dtype=torch.float16)) == []
    assert found == [
        "rounds float32 to TF32, which torch does not allow now: set "
        "torch.backends.cuda.matmul.allow_tf32 = True"
    ]
    with tf32(True):
        assert ACC.reasons(request(OnGPU)) == []


def test_older_gpus_and_float64_are_refused_with_reasons(capability):
    capability.append((7, 5))
    assert ACC.reasons(request(OnGPU, dtype=torch.bfloat16)) == [
        "needs sm_80 or newer, this GPU is sm_75"
    ]
    capability.append((8, 0))
    assert ACC.reasons(request(OnGPU, dtype=torch.float64)) == [
        "takes float32, float16, bfloat16, not float64"
    ]


def test_where_there_is_no_gpu_the_device_is_the_only_reason():
    assert ACC.reasons(request()) == ["runs on cuda, A is on cpu"]


def meta_of(wanted: Request) -> dict[str, object]:
    return json.loads(ACC.build(wanted).recipe.partition(":")[2])


def test_the_ladder_turns_one_part_on_after_the_other():
    csr = csr_of(with_dense_row(40, 5000, 17))
    found = {step: meta_of(request(csr=csr, ablation=step)) for step in (*LADDER, None)}
    switches = {
        step: (meta["cached"], meta["ahead"], meta["pipelined"], meta["slots"] > 0)
        for step, meta in found.items()
    }
    assert switches == {
        "bittcf": (False, False, False, False),
        "reorder": (False, False, False, False),
        "cache": (True, False, False, False),
        "dtc-pipeline": (True, True, False, False),
        "pipeline": (True, False, True, False),
        None: (True, False, True, True),
    }


def test_the_gate_balances_only_from_the_paper_s_imbalance_on():
    even = csr_of(with_dense_row(40, 160, 17))
    uneven = csr_of(with_dense_row(40, 5000, 17))
    found = [meta_of(request(csr=csr, ablation="ibd-gate"))["slots"] for csr in (even, uneven)]
    assert meta_of(request(csr=even))["slots"] > 0
    assert found[0] == 0 < found[1]


def test_one_part_is_turned_off_while_all_others_stay_on(one_processor):
    csr = csr_of(with_dense_row(40, 5000, 17))
    switches = {}
    for name in ("no-balance", "no-stack", "no-pipeline"):
        meta = meta_of(request(csr=csr, ablation=name))
        switches[name] = (meta["cached"], meta["pipelined"], meta["slots"] > 0)
    assert switches == {
        "no-balance": (True, True, False),
        "no-stack": (True, True, True),
        "no-pipeline": (True, False, True),
    }
    stacks = {name: stack_of(overlapping(60, 32, 32), 512, ablation=name) for name in switches}
    assert stacks == {"no-balance": 2, "no-stack": 1, "no-pipeline": 1}


@pytest.mark.parametrize("ablation", ABLATIONS)
def test_no_ablation_needs_a_kernel_that_the_tests_do_not_compile(one_processor, ablation):
    compiled = list(SPMM_BITTCF.configs())
    for dtype, csr in ((torch.float32, overlapping(60, 32, 32)), (torch.float16, None)):
        meta = meta_of(request(csr=csr, n=512, dtype=dtype, ablation=ablation))
        policy = Policy(bool(meta["pipelined"]), bool(meta["cached"]))
        vector = 16 // dtype.itemsize
        for slab in slabs(dtype, vector, meta["stack"]):
            assert bittcf_config(dtype, slab, vector, True, policy=policy) in compiled


def test_the_stage_says_what_was_decided():
    csr = csr_of(MATRICES["equal rows"]())
    stage = ACC.build(request(csr=csr))
    assert stage.choices["format"] == (
        "BitTCF, windows of 8 rows, 72 tiles of 54.0 entries, 3212 bytes"
    )
    assert stage.choices["schedule"] == "9 items of at most 4 tiles, IBD 0.00, 0 partial sums"
    assert ACC.build(request(csr=csr, ablation="cache")).choices["ablation"] == "cache"


def test_short_windows_are_put_together_to_runs_unless_balance_is_off():
    csr = csr_of(random_matrix(800, 20, 0.05))
    windows = 100
    together = ACC.build(request(csr=csr)).tensors["items"]
    assert together.shape[0] < windows and int(-together[:, 3].sum()) == windows
    alone = ACC.build(request(csr=csr, ablation="pipeline")).tensors["items"]
    assert alone.shape[0] == windows and bool((alone[:, 3] == -1).all())


def test_the_recipe_says_how_far_apart_rows_of_B_are_used_in_the_plans_order(monkeypatch):
    seen = []

    def noted(csr: st.CSR, order: torch.Tensor | None, row_bytes: int) -> float:
        seen.append((order, row_bytes))
        return 3.25

    monkeypatch.setattr(short, "l2_reload_factor", noted)
    order = torch.randperm(40)
    meta = meta_of(request(permutation=Permutation("given", order), n=16))
    assert meta["reloads"] == 3.25 and ACC.make_runner(meta)._reloads == 3.25
    assert seen == [(order, 64)]
    meta_of(request(n=4096))
    assert seen[1:] == [(None, WIDE_SLAB_BYTES)], "wider products are walked in slabs"


def test_rows_are_visited_in_the_order_asked_for():
    csr = csr_of(random_matrix(40, 30, 0.2))
    order = torch.randperm(40)
    stage = ACC.build(request(csr=csr, permutation=Permutation("given", order)))
    assert torch.equal(stage.tensors["order"], order.int())
    assert ACC.build(request(csr=csr)).tensors["order"].numel() == 0


def test_packed_values_are_in_tile_order_and_float32_ones_are_tf32():
    csr = csr_of(random_matrix(40, 30, 0.2))
    stage = ACC.build(request(csr=csr))
    work = ACC.make_runner(json.loads(stage.recipe.partition(":")[2]))
    packed = work.pack(stage.tensors, csr.values, torch.float32)["values"]
    assert not bool((packed.view(torch.int32) & 0x1FFF).any())
    assert torch.allclose(packed, csr.values[stage.tensors["entries"].long()], rtol=2.0**-11)
    half = work.pack(stage.tensors, csr.values, torch.float16)["values"]
    assert torch.equal(half, csr.values.half()[stage.tensors["entries"].long()])
    assert work.pack(stage.tensors, None, torch.float16)["values"].shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_packed_values_are_whole_pieces_of_what_kernels_copy(dtype):
    for rows in (1, 2, 3):
        csr = csr_of(sp.csr_array(np.arange(1.0, 5 * rows + 1).reshape(rows, 5)), dtype=dtype)
        stage = ACC.build(request(csr=csr, dtype=dtype))
        work = ACC.make_runner(json.loads(stage.recipe.partition(":")[2]))
        packed = work.pack(stage.tensors, csr.values, dtype)["values"]
        assert packed.numel() == -(-csr.nnz // 8) * 8
        assert torch.equal(packed[: csr.nnz], csr.values[stage.tensors["entries"].long()])
        assert not bool(packed[csr.nnz :].any())
        exact = work.pack(stage.tensors, csr.values.float(), torch.float32)["values"]
        assert exact.numel() == packed.numel(), "also of 32 bits"


# -- windows of sixteen rows


def overlapping(windows: int, each: int, shared: int) -> st.CSR:
    """Sixteen rows a window: either eight use ``each`` columns, ``shared`` of them in common."""
    dense = np.zeros((16 * windows, 2 * each - shared))
    dense[0::16, :each], dense[8::16, each - shared :] = 1, 1
    return csr_of(sp.csr_array(dense))


def stack_of(csr: st.CSR, n: int, dtype: torch.dtype = torch.float32, **changes) -> int:
    meta = meta_of(request(csr=csr, n=n, dtype=dtype, **changes))
    assert ACC.make_runner(meta)._stack == meta["stack"], "the runner reads it from the recipe"
    return meta["stack"]


@pytest.fixture
def one_processor(gpu_facts) -> None:
    """Sixteen workers, so that small matrices have enough tiles for each."""
    gpu_facts(processors=1, l2_bytes=2**20)


@pytest.mark.parametrize(
    "each, shared, saved, wide, narrower",
    [
        (32, 32, 2.0, 2, 2), (24, 16, 1.5, 2, 2), (40, 24, 10 / 7, 2, 1), (40, 16, 1.25, 2, 1),
        (24, 8, 1.2, 1, 1), (32, 0, 1.0, 1, 1),
    ],
)  # fmt: skip
def test_windows_of_sixteen_rows_are_cut_if_they_save_enough_reads_of_B(
    one_processor, each, shared, saved, wide, narrower
):
    csr = overlapping(60, each, shared)
    stacked = short.BitTCF.pack(csr, stack=2)
    assert stacked.tiles_of_eight() / stacked.tile_count == pytest.approx(saved)
    assert [stack_of(csr, n) for n in (256, 512)] == [wide, wide], "1024 bytes of a row and more"
    assert [stack_of(csr, n) for n in (128, 255)] == [narrower, narrower]
    assert [stack_of(csr, n) for n in (127, 32, 1)] == [1, 1, 1], "under 512 bytes never"


def test_sixteen_bit_products_and_steps_of_the_ladder_keep_windows_of_eight_rows(one_processor):
    csr = overlapping(60, 32, 32)
    assert stack_of(csr, 512) == 2
    for dtype in (torch.float16, torch.bfloat16):
        assert stack_of(csr.with_values(csr.values.to(dtype)), 512, dtype) == 1
    for step in LADDER:
        assert stack_of(csr, 512, ablation=step) == 1


def test_windows_of_sixteen_rows_can_be_asked_for_whatever_they_save():
    csr = csr_of(random_matrix(40, 30, 0.05))
    assert stack_of(csr, 8) == 1 and stack_of(csr, 8, ablation="stacked") == 2


@pytest.mark.parametrize("n, windows", [(128, 32), (256, 16), (512, 8)])
def test_every_worker_keeps_a_run_of_tiles(one_processor, n, windows):
    """Sixteen workers, fewer for each slab of 128 columns, and eight tiles a run."""
    assert stack_of(overlapping(windows, 32, 32), n) == 2
    assert stack_of(overlapping(windows - 1, 32, 32), n) == 1


def test_the_gpus_own_processors_count(gpu_facts, capability):
    csr = overlapping(32, 32, 32)
    for count, stack in ((1, 2), (2, 1)):
        gpu_facts(processors=count, l2_bytes=2**20)
        assert meta_of(request(OnGPU, csr=csr, n=128))["stack"] == stack


def test_what_is_saved_is_counted_in_the_plans_order(one_processor):
    csr = overlapping(60, 32, 0)
    assert stack_of(csr, 128) == 1
    position = torch.arange(csr.shape[0])
    order = torch.argsort(position // 8 % 2, stable=True)  # all first eights, then all second
    assert stack_of(csr, 128, permutation=Permutation("given", order)) == 2


@pytest.mark.parametrize("name", ["no rows", "no columns", "no entries"])
def test_a_matrix_without_entries_keeps_windows_of_eight_rows(one_processor, name):
    assert stack_of(csr_of(MATRICES[name]()), 512) == 1


def test_the_stage_tells_windows_of_sixteen_rows(one_processor):
    stage = ACC.build(request(csr=overlapping(32, 32, 32), n=128))
    assert stage.choices["format"] == (
        f"BitTCF, windows of 16 rows, 128 tiles of 16.0 entries, {4 * (32 + 14 * 128 + 2)} bytes"
    )
    assert stage.tensors["tc_offset"].numel() == 2 * 128 + 1
    assert stage.tensors["tc_local_bit"].numel() == 2 * 128


def test_the_runner_takes_slabs_and_kernels_of_the_plans_windows(one_processor, monkeypatch):
    loaded = []
    monkeypatch.setattr(KernelSpec, "load", lambda spec, config, device: loaded.append(config))
    for shared, stack in ((32, 2), (0, 1)):
        work = ACC.make_runner(meta_of(request(csr=overlapping(60, 32, shared), n=128)))
        for n, vector in ((128, 4), (6, 2), (7, 1)):
            launch = work._launch_for(torch.float32, torch.float32, n, vector, True, 0)
            sizes = [(one.count(n), 128 * one.sums) for one in slabs(torch.float32, vector, stack)]
            assert (launch.slabs, launch.slot_bytes) in sizes
            assert loaded[-1]["kStack"] == stack
            assert loaded[-1] in list(acc_runner.SPMM_BITTCF.configs())


def test_nothing_is_launched_for_nothing():
    for name in ("no rows", "odd sizes"):
        csr = csr_of(MATRICES[name]())
        stage = ACC.build(request(csr=csr))
        work = ACC.make_runner(json.loads(stage.recipe.partition(":")[2]))
        n = 4 if name == "no rows" else 0
        B, out = torch.ones(csr.shape[1], n), torch.empty(csr.shape[0], n)
        assert work.spmm(stage.tensors, csr.values, None, B, out) is None
        assert work.prepare(n, torch.float32, True, torch.device("cuda", 0)) is None


def test_ablation_needs_a_system_that_has_a_ladder():
    A = (torch.tensor([0, 1]), torch.tensor([0]), torch.ones(1), (1, 1))
    ladders = [name for name, system in SYSTEMS.items() if system.ablations]
    assert "acc" in ladders
    for system in ("auto", "cpu"):
        with pytest.raises(ValueError) as caught:
            build_plan(A, 4, system=system, ablation="cache")
        assert str(caught.value) == (
            f"plan: ablation must be None with system='{system}', got 'cache'. "
            f"Name a system that has ablations: {', '.join(ladders)}."
        )
    with pytest.raises(ValueError) as caught:
        build_plan(A, 4, system="acc", ablation="tma")
    said = f"plan: ablation must be one of {list(AccSystem.ablations)}, got 'tma'."
    assert str(caught.value).startswith(said)

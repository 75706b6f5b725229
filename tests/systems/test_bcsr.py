"""The bcsr system: when it can serve, what it builds, what its runner keeps."""

from __future__ import annotations

import functools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import sparsetile as st
from sparsetile.engines.request import Request
from sparsetile.engines.rows.runner import RowRunner
from sparsetile.kernels.bcsr import FP8, NARROW, SPMM_BCSR, WIDE, Store
from sparsetile.kernels.tf32_operand import TF32_OPERAND
from sparsetile.launch.interface import PLAIN, Epilogue
from sparsetile.plan.planner import build_plan
from sparsetile.reorder import Permutation
from sparsetile.systems import SYSTEMS, runner
from sparsetile.systems.bcsr import engine
from sparsetile.systems.bcsr import runner as bcsr_runner
from sparsetile.systems.bcsr import system as system_module
from sparsetile.systems.bcsr.runner import BCSRRunner
from tests.contracts.cases import MATRICES, csr_of, random_matrix, tf32
from tests.host import answer_on_host
from tests.systems.requests import OnGPU, check_plan_file, request_for

BCSR = SYSTEMS["bcsr"]
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
GIB = 2**30


request = functools.partial(request_for, F16)


def blocks_of(pattern: list[list[int]], dtype: torch.dtype = F16) -> st.CSR:
    """A matrix of full blocks."""
    dense = np.kron(np.array(pattern), np.ones((64, 64)))
    return csr_of(sp.csr_array(dense * np.arange(1.0, dense.shape[1] + 1)), dtype=dtype)


def meta_of(wanted: Request) -> dict[str, object]:
    return json.loads(BCSR.build(wanted).recipe.partition(":")[2])


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, capability) -> SimpleNamespace:
    """A Hopper GPU and its free memory."""
    found = SimpleNamespace(free=8 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (found.free, 2 * found.free))
    return found


# -- reasons


@pytest.mark.parametrize("other", [(8, 0), (8, 9), (10, 0), (12, 0)])
@pytest.mark.usefixtures("gpu")
def test_other_gpus_than_hopper_are_refused(capability, other):
    capability.append(other)
    name = f"sm_{other[0]}{other[1]}"
    assert BCSR.reasons(request(OnGPU)) == [f"needs a Hopper GPU (sm_90a), this GPU is {name}"]


def test_sixteen_bit_types_are_served_on_hopper_and_float64_refused(gpu):
    assert BCSR.reasons(request(OnGPU)) == BCSR.reasons(request(OnGPU, dtype=BF16)) == []
    assert BCSR.reasons(request(OnGPU, dtype=torch.float64)) == [
        "takes float32, float16, bfloat16, float8_e4m3fn, not float64"
    ]


def test_float32_is_served_where_torch_allows_tf32(gpu):
    wanted = request(OnGPU, dtype=F32)
    with tf32(False):
        (reason,) = BCSR.reasons(wanted)
        assert reason.startswith("rounds float32 to TF32, which torch does not allow now")
    with tf32(True):
        assert BCSR.reasons(wanted) == []
        assert BCSR.reasons(request(OnGPU, dtype=F32, ablation="opt3")) == [
            "has no opt3 in float32"
        ]


def test_a_plan_in_float32_compiles_the_product_and_the_copy_of_b(loaded):
    work = runner(BCSR.build(request(csr=blocks_of([[1]], F32), dtype=F32)).recipe)
    work.prepare(512, F32, True, torch.device("cuda", 0))
    (copy, copy_config, _), (name, config, _, shared) = loaded
    assert (copy, name) == ("tf32_operand", "spmm_bcsr")
    assert copy_config in list(TF32_OPERAND.configs()) and config in list(SPMM_BCSR.configs())
    assert (config["ELEMENT"], config["kKMajor"], shared) == ("F32", True, 4 * 24592 + 80)


def test_blocks_of_float32_are_packed_rounded():
    csr = blocks_of([[1]], F32)
    csr = csr.with_values(torch.full_like(csr.values, 1 + 2.0**-11 + 2.0**-20))
    stage = BCSR.build(request(csr=csr, dtype=F32))
    packed = runner(stage.recipe).pack(stage.tensors, csr.values, F32)["blocks"]
    assert bool((packed == 1 + 2.0**-10).all())


def test_fp8_is_served_where_nothing_has_to_be_repaired(gpu):
    full = blocks_of([[1, 0], [1, 1]])
    assert BCSR.reasons(request(OnGPU, dtype=FP8, csr=full)) == []
    assert BCSR.reasons(request(OnGPU, dtype=FP8, csr=full, ablation="opt6")) == []
    assert BCSR.reasons(request(OnGPU, dtype=FP8, ablation="opt3")) == [
        "has no opt3 in float8_e4m3fn",
        "takes float8_e4m3fn only where blocks of 64x64 are full",
    ]


def test_a_plan_in_fp8_compiles_what_a_linear_layer_needs(loaded):
    work = runner(BCSR.build(request(csr=blocks_of([[1]]), dtype=FP8)).recipe)
    work.prepare(512, FP8, True, torch.device("cuda", 0))
    ((_, config, *_),) = loaded
    assert config in list(SPMM_BCSR.configs())
    assert (config["ELEMENT"], config["OUTPUT"], config["kKMajor"]) == ("E4M3", "BF16", True)


def test_determinism_is_no_reason(gpu):
    assert BCSR.reasons(request(OnGPU, deterministic=True)) == []


def test_blocks_that_memory_could_not_hold_are_refused(gpu):
    diagonal = csr_of(sp.eye_array(64 * 200, format="csr"))
    gpu.free = 4 * 200 * 8192
    assert BCSR.reasons(request(OnGPU, csr=diagonal)) == []
    gpu.free -= 4
    assert BCSR.reasons(request(OnGPU, csr=diagonal)) == [
        "would store blocks of 0.0 GiB, over 0.0 GiB"
    ]
    scattered = Permutation("given", torch.randperm(64 * 200))
    gpu.free = 4 * 400 * 8192
    (reason,) = BCSR.reasons(request(OnGPU, csr=diagonal, permutation=scattered))
    assert reason.startswith("would store blocks of "), "counted in the plan's order"


def test_blocks_are_not_counted_where_they_cannot_be_too_many(gpu, monkeypatch):
    monkeypatch.setattr(system_module, "count_blocks", None)
    assert BCSR.reasons(request(OnGPU)) == []


# -- build


def test_a_matrix_of_full_blocks_is_built_without_what_repairs():
    csr = blocks_of([[1, 0], [0, 0], [1, 1]])
    stage = BCSR.build(request(csr=csr))
    work, ptr, idx, order, places, indptr = stage.tensors.values()
    names = ["work", "block_row_ptr", "block_col_idx", "order", "places", "indptr"]
    assert list(stage.tensors) == names
    assert ptr.tolist() == [0, 1, 1, 3]
    assert work.tolist() == [[2, 1, 2, 0], [0, 0, 1, 0], [1, 1, 0, 0]]
    assert work.dtype is torch.int32 and work.is_contiguous()
    assert idx.tolist() == [0, 0, 1]
    assert order.numel() == 0 and places.numel() == csr.nnz and indptr is csr.indptr
    assert json.loads(stage.recipe.partition(":")[2]) == {
        "rows": 192, "cols": 128, "nnz": csr.nnz, "blocks": 3, "exact": None, "step": 6,
        "columns": None, "tensors": list(stage.tensors),
    }  # fmt: skip
    assert stage.choices == {
        "format": "BCSR, 3 blocks of 64x64, 100.0 % of their cells hold entries, 24576 bytes",
        "schedule": "3 block rows, longest first, at most 2 blocks",
    }


def test_a_step_of_the_ladder_is_in_the_recipe_and_in_the_choices():
    csr = blocks_of([[1]])
    for name, step in (("opt0", 0), ("opt5", 5), ("opt6", 6), ("opt7", 7)):
        wanted = request(csr=csr, ablation=name)
        assert meta_of(wanted)["step"] == step
        assert BCSR.build(wanted).choices["ablation"] == name
    assert "ablation" not in BCSR.build(request(csr=csr)).choices


@pytest.mark.parametrize("name", ["opt4", "columns512"])
def test_steps_that_are_not_built_are_refused_by_name(name):
    with pytest.raises(ValueError, match=f"'opt7', 'columns128', 'columns256'], got '{name}'"):
        build_plan(blocks_of([[1]]), 8, system="bcsr", ablation=name)


def test_empty_cells_add_the_exact_system_s_parts():
    csr = csr_of(random_matrix(150, 130, 0.2), dtype=F16)
    stage = BCSR.build(request(csr=csr))
    exact = SYSTEMS["csr"].build(request(csr=csr))
    assert meta_of(request(csr=csr))["exact"] == exact.recipe
    assert all(torch.equal(stage.tensors[f"exact.{k}"], t) for k, t in exact.tensors.items())
    assert len(stage.tensors) == 6 + len(exact.tensors)
    assert stage.choices["repair"].startswith("elements that are not finite, by csr")
    assert isinstance(runner(stage.recipe)._exact, RowRunner)


def test_rows_are_cut_in_the_order_asked_for():
    csr = csr_of(random_matrix(150, 130, 0.2))
    order = torch.randperm(150)
    stage = BCSR.build(request(csr=csr, permutation=Permutation("given", order)))
    assert torch.equal(stage.tensors["order"], order.int())


@pytest.mark.parametrize("name", MATRICES)
def test_matrices_of_every_kind_are_built_and_packed(name):
    csr = csr_of(MATRICES[name](), dtype=F16)
    stage = BCSR.build(request(csr=csr))
    work = runner(stage.recipe)
    assert isinstance(work, BCSRRunner)
    packed = work.pack(stage.tensors, csr.values, F16)["blocks"]
    assert packed.shape == (stage.tensors["block_col_idx"].numel(), 64, 64) and packed.dtype is F16
    assert torch.equal(packed.flatten()[stage.tensors["places"]], csr.values)
    assert int((packed != 0).sum()) == int((csr.values != 0).sum())
    ones = work.pack(stage.tensors, None, BF16)["blocks"]
    assert ones.dtype is BF16 and float(ones.float().sum()) == csr.nnz


def test_a_runner_whose_repair_is_not_exact_is_refused():
    meta = meta_of(request())
    other = SYSTEMS["acc"].build(request()).recipe
    with pytest.raises(TypeError) as caught:
        BCSR.make_runner({**meta, "exact": other})
    assert str(caught.value).startswith("bcsr: exact must be an exact runner, got ")


def test_the_tiles_width_is_an_ablation_of_every_type(gpu, loaded):
    csr = blocks_of([[1]])
    for name, columns in (("columns128", 128), ("columns256", 256)):
        wanted = request(csr=csr, ablation=name)
        meta = meta_of(wanted)
        assert (meta["columns"], meta["step"]) == (columns, 6)
        assert BCSR.build(wanted).choices["ablation"] == name
        work = BCSR.make_runner(meta)
        assert work.any_strides and work.fuses_linear
        for n in (8, 4096):
            work.prepare(n, F16, True, torch.device("cuda", 0))
            assert loaded[-1][1]["kCols"] == columns
            assert loaded[-1][1] in list(SPMM_BCSR.configs())
        for dtype in (FP8, F32, F16):
            with tf32(True):
                assert BCSR.reasons(request(OnGPU, csr=csr, dtype=dtype, ablation=name)) == []
    assert meta_of(request(csr=csr))["columns"] is None


# -- runner


@pytest.fixture
def loaded(loads, gpu_facts) -> list[tuple]:
    gpu_facts(processors=4, l2_bytes=2**20)
    return loads


def test_a_plan_compiles_the_product_and_its_repair(loaded):
    work = runner(BCSR.build(request()).recipe)
    work.prepare(512, F16, True, torch.device("cuda", 0))
    (name, config, device, shared), (repair, repair_config, _), (strided, *_) = loaded
    assert strided == "repair_strided"
    assert (name, device, config["kCols"], shared) == ("spmm_bcsr", 0, 256, 196752)
    assert config in list(SPMM_BCSR.configs())
    assert repair == "spmm_csr" and repair_config["kRepair"]
    work.prepare(512, F16, True, torch.device("cuda", 0))
    assert len(loaded) == 3, "once"


def test_full_blocks_need_no_second_kernel(loaded):
    runner(BCSR.build(request(csr=blocks_of([[1]]))).recipe).prepare(
        64, F16, True, torch.device("cuda", 0)
    )
    assert [name for name, *_ in loaded] == ["spmm_bcsr"]


def test_nothing_is_launched_for_nothing():
    for name in ("no rows", "odd sizes"):
        csr = csr_of(MATRICES[name](), dtype=F16)
        stage = BCSR.build(request(csr=csr))
        work = runner(stage.recipe)
        n = 4 if name == "no rows" else 0
        B, out = torch.ones(csr.shape[1], n, dtype=F16), torch.empty(csr.shape[0], n, dtype=F16)
        assert work.spmm(stage.tensors, csr.values, None, B, out) is None
        assert work.prepare(n, F16, True, torch.device("cuda", 0)) is None
        assert name == "odd sizes" or work.bind(stage.tensors, csr.values, None) is None


def test_a_tensor_map_is_made_once_for_each_place_and_shape_of_B(monkeypatch):
    made = []

    def encode(*what):
        made.append(what)
        return (len(made), *[0] * 15)

    answer_on_host(monkeypatch, bcsr_runner, encode_matrix=encode)
    work = BCSR.make_runner(meta_of(request(csr=blocks_of([[1]]))))
    B = torch.zeros(64, 16, dtype=F16)

    def map_of(B: torch.Tensor, address: int = 4096) -> tuple[int, ...]:
        return work._map_of_b(B, WIDE, False)(address)

    first = map_of(B)
    assert map_of(B.clone()) == work._map_of_b(B, NARROW, False)(4096) == first and len(made) == 1
    assert made == [(4096, F16, (64, 16), 32, (64, 64))]
    others = [
        map_of(B, 8192), map_of(B[:, :8]), map_of(B[:, :8].clone()), map_of(B.to(BF16)),
        work._map_of_c(F16, 16, 16, Store.BY_ENGINE)(4096),
    ]  # fmt: skip
    assert len({first, *others}) == len(made) == 6
    assert made[-1] == (4096, F16, (64, 16), 32, (16, 64))
    transposed = torch.zeros(16, 64, dtype=F16).T
    work._map_of_b(transposed, WIDE, True)(4096)
    work._map_of_b(transposed, NARROW, True)(4096)
    work._map_of_c(F16, 16, 72, Store.TRANSPOSED)(4096)
    assert made[-3:] == [
        (4096, F16, (16, 64), 128, (256, 64)), (4096, F16, (16, 64), 128, (128, 64)),
        (4096, F16, (16, 64), 144, (128, 64)),
    ]  # fmt: skip


def test_no_tensor_map_is_made_of_what_the_copy_engine_will_not_touch(monkeypatch):
    answer_on_host(monkeypatch, bcsr_runner, encode_matrix=lambda *what: pytest.fail("made"))
    empty = BCSR.make_runner(meta_of(request(csr=csr_of(sp.csr_array((70, 64)), dtype=F16))))
    assert not any(empty._map_of_b(torch.zeros(64, 16, dtype=F16), WIDE, False)(4096))
    assert not any(empty._map_of_c(F32, 16, 16, Store.BY_THREADS)(4096))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, fresh_runners: None, gpu_facts) -> list[str]:
    """What happens on the way to a launch, in order, on a GPU that is pretended."""
    gpu_facts(processors=4, l2_bytes=2**20)
    done: list[str] = []
    kernel = SimpleNamespace(launch=lambda *_, **__: done.append("launch"))
    answer_on_host(
        monkeypatch, bcsr_runner, stream=7, load=lambda spec, config, *rest: kernel,
        ensure_cuda_context=lambda device: done.append("context"),
        encode_matrix=lambda *what: done.append("map") or (0,) * 16,
    )  # fmt: skip
    return done


def test_a_thread_has_its_context_before_the_first_tensor_map(launched):
    csr = blocks_of([[1]])
    stage = BCSR.build(request(csr=csr))
    work = runner(stage.recipe)
    B, out = torch.ones(csr.shape[1], 64, dtype=F16), torch.empty(csr.shape[0], 64, dtype=F16)
    work.spmm(stage.tensors, csr.values.to(F16), None, B, out)
    assert launched[0] == "context" and launched[-1] == "launch" and "map" in launched


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_product_and_repair_share_a_flag_that_begins_at_zero(launched, monkeypatch, beta):
    stage = BCSR.build(request())
    work = runner(stage.recipe)
    flag, given = torch.ones(1, dtype=torch.int64), []
    answer_on_host(monkeypatch, bcsr_runner, zeroed_flag=lambda device, stream: flag.zero_())

    def product(self, tensors, blocks, B, out, epilogue, spoilt=None):
        given.append((spoilt, int(spoilt)))
        spoilt.fill_(1)
        out.zero_()

    def repair(self, tensors, values, B, out, epilogue=PLAIN, only_if=None):
        given.append((only_if, int(only_if)))

    monkeypatch.setattr(type(work), "_product", product)
    monkeypatch.setattr(type(work._exact), "repair", repair)
    B = torch.ones(work.cols, 64, dtype=F16)
    for _ in range(2):
        out = torch.zeros(work.rows, 64, dtype=F16)
        values = torch.ones(work.nnz, dtype=F16)
        work.spmm(stage.tensors, values, None, B, out, Epilogue(beta=beta))
    assert all(each is flag for each, _ in given)
    assert [seen for _, seen in given] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    "shape, offset, strides, well",
    [
        ((4, 16), 0, (16, 1), True), ((4, 11), 0, (16, 1), True), ((4, 16), 1, (16, 1), False),
        ((4, 16), 8, (24, 1), True), ((4, 11), 0, (11, 1), False), ((4, 16), 0, (0, 1), False),
        ((2, 4, 16), 0, (64, 16, 1), True), ((2, 4, 16), 0, (68, 16, 1), False),
        ((4, 16), 0, (64, 2), False), ((4, 1), 0, (8, 4), True), ((16, 4), 0, (1, 16), False),
    ],
)  # fmt: skip
def test_b_is_taken_as_it_is_if_rows_are_aligned_and_apart(shape, offset, strides, well):
    memory = torch.zeros(1024, dtype=F16)
    assert memory.data_ptr() % 16 == 0
    matrix = memory.as_strided(shape, strides, offset)
    assert engine.copies_well(matrix) is well
    if shape[-1] > 1:
        assert engine.transposed_well(matrix.mT) is well
        assert not engine.transposed_well(matrix) or strides[-1] != 1


@pytest.mark.parametrize(
    "dtype, n, stride, well",
    [
        (F16, 16, 16, True), (F16, 12, 16, False), (F16, 16, 20, False), (F32, 16, 20, True),
        (F32, 12, 12, False), (F32, 16, 18, False), (F16, 16, 8, False),
    ],
)  # fmt: skip
def test_c_is_written_in_place_if_rows_are_aligned_and_hold_whole_stores(dtype, n, stride, well):
    out = torch.zeros(512, dtype=dtype).as_strided((4, n), (stride, 1))
    assert engine.stores_well(out) is well
    assert not engine.stores_well(out.mT)
    runner = BCSR.make_runner(meta_of(request(csr=blocks_of([[1]]))))
    tensors = {"order": torch.zeros(0, dtype=torch.int32)}
    expected = Store.TRANSPOSED if well else Store.BY_ENGINE
    if dtype is F16:
        assert runner._store_of(tensors, out.mT) is expected
        assert runner._store_of(tensors, out) is Store.BY_ENGINE
    else:
        assert runner._store_of(tensors, out.mT) is Store.TRANSPOSED_BY_THREADS
        assert runner._store_of(tensors, out) is Store.BY_THREADS


def test_operands_of_any_strides_are_taken_but_by_steps_of_the_ladder():
    for asked in (request(csr=blocks_of([[1]])), request()):
        work = BCSR.make_runner(meta_of(asked))
        assert work.any_strides and work.fuses_linear
    step = BCSR.make_runner(meta_of(request(ablation="opt2")))
    assert not step.any_strides and not step.fuses_linear


# -- plan files


def test_a_plan_file_keeps_parts_and_recipe_and_names_the_reason_if_it_cannot_run(tmp_path):
    check_plan_file(BCSR, F16, tmp_path)

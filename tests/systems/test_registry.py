"""The registry of systems: recipes lead to runners, reasons are complete, the table is true."""

from __future__ import annotations

import gc
import importlib
import threading
import weakref

import pytest
import torch

import sparsetile as st
from sparsetile.engines.request import Request, make_recipe, tensor_bytes
from sparsetile.engines.runner import ExactRunner, Runner
from sparsetile.plan.traced.flat import parsed
from sparsetile.reorder import Permutation
from sparsetile.systems import SYSTEMS, candidates, runner
from sparsetile.systems.cpu.runner import CPURunner
from sparsetile.systems.dense.system import CPU_LIMIT_BYTES
from sparsetile.systems.registry import exact_system
from tests.contracts.cases import csr_of, random_matrix

GPU_SYSTEMS = [name for name, system in SYSTEMS.items() if system.devices == ("cuda",)]


def request(**changes) -> Request:
    csr = changes.pop("csr", None) or csr_of(random_matrix(12, 10, 0.3))
    wanted = {"n": 4, "dtype": torch.float32, "permutation": Permutation("identity", None)}
    return Request(csr, **{**wanted, **changes})


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_system_builds_a_stage_whose_recipe_finds_its_runner(name):
    wanted = request()
    stage = SYSTEMS[name].build(wanted)
    found = runner(stage.recipe)
    assert stage.system == name == SYSTEMS[name].name
    assert (found.rows, found.cols, found.nnz) == (12, 10, wanted.csr.nnz)
    assert runner(stage.recipe) is found, "one object for one text"
    assert stage.bytes == sum(part.numel() * part.element_size() for part in stage.tensors.values())
    assert {"format", "schedule"} <= stage.choices.keys()
    assert all(isinstance(words, str) and words for words in stage.choices.values())


def test_a_plan_and_its_operators_share_a_runner_however_many_others_there_were():
    csr = csr_of(random_matrix(12, 10, 0.3))
    plan = st.plan(csr, 4)
    before = parsed(plan.flat[1]).forward
    others = [
        runner(make_recipe("cpu", st.CSR(csr.indptr, csr.indices, None, (12, 10 + cols)), ()))
        for cols in range(1, 2001)
    ]
    again = st.plan(csr, 4)
    assert len(set(map(id, others))) == 2000
    assert again._variant.runner is plan._variant.runner is before is parsed(again.flat[1]).forward


@pytest.mark.parametrize("tune", ["model", "measure"])
def test_what_planning_prepares_is_the_plans(tune, fresh_runners, calls_of):
    prepared = calls_of(CPURunner, "prepare")
    plan = st.plan(csr_of(random_matrix(12, 10, 0.1)), 4, system="cpu", tune=tune)
    assert [call.given[0] for call in prepared] == [plan._variant.runner]


def test_threads_that_ask_at_once_get_one_runner():
    recipe = make_recipe("cpu", csr_of(random_matrix(7, 11, 0.3)), ())
    start, found = threading.Barrier(8), []

    def ask() -> None:
        start.wait()
        found.append(runner(recipe))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(map(id, found))) == 1


def test_a_runner_that_nobody_holds_is_let_go():
    recipe = make_recipe("cpu", csr_of(random_matrix(9, 13, 0.3)), ())
    kept = weakref.ref(runner(recipe))
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_same_request_builds_the_same_recipe(name):
    assert SYSTEMS[name].build(request()).recipe == SYSTEMS[name].build(request()).recipe


def test_every_system_is_able_or_gives_reasons():
    able, rejected = candidates(request())
    assert able == [name for name, system in SYSTEMS.items() if "cpu" in system.devices]
    assert not set(able) & set(GPU_SYSTEMS) and {*able, *GPU_SYSTEMS} == SYSTEMS.keys()
    assert rejected == {}, "systems of GPUs are not asked"
    assert SYSTEMS["csr"].reasons(request()) == ["runs on cuda, A is on cpu"]


def test_folders_say_what_their_systems_do():
    for name, system in SYSTEMS.items():
        folder = importlib.import_module(f"sparsetile.systems.{name}")
        assert system.name == name and system.devices == folder.DEVICES
        assert system.exact_on == getattr(folder, "EXACT_ON", ())


ONE_PRODUCT = """
import sys, torch, sparsetile as st
A = torch.eye(3).to_sparse_csr()
st.spmm(A, torch.ones(3, 2)), st.plan(A, 2) @ torch.ones(3, 2)
imported = {name.split(".")[2] for name in sys.modules if name.startswith("sparsetile.systems.")
            and name.endswith(".system")}
print(*sorted(imported))
"""


def test_a_system_that_nobody_asks_for_is_not_imported(interpreter):
    ran = interpreter(ONE_PRODUCT)
    assert ran.stdout.split() == SYSTEMS.on("cpu"), ran.stderr


def test_all_reasons_are_given_at_once():
    found = SYSTEMS["cusparse"].reasons(request(dtype=torch.complex64, deterministic=True))
    assert len(found) == 3
    assert found[0] == "runs on cuda, A is on cpu"
    assert found[1].startswith("takes float32") and found[1].endswith("not complex64")
    assert found[2] == "is not bit-reproducible, and determinism was asked for"


def huge(rows: int, cols: int) -> st.CSR:
    """A matrix of this shape without entries, which costs no memory but its row pointers."""
    indptr = torch.zeros(1, dtype=torch.int64).expand(rows + 1)
    return st.CSR(indptr, torch.empty(0, dtype=torch.int32), None, (rows, cols))


def test_dense_does_not_write_out_what_memory_could_not_hold():
    side = int((CPU_LIMIT_BYTES // 4) ** 0.5)
    assert SYSTEMS["dense"].reasons(request(csr=huge(side, side))) == []
    (reason,) = SYSTEMS["dense"].reasons(request(csr=huge(4 * side, side)))
    assert reason == "would write A out in 8.0 GiB, over 2.0 GiB"


class Large(st.CSR):
    """A matrix that says it has 2^31 entries."""

    @property
    def nnz(self) -> int:
        return 2**31


@pytest.mark.parametrize(
    "name, reason",
    [
        ("acc", "holds under 2^31 entries, A has 2147483648"),
        ("bcsr", "holds under 2^31 entries, A has 2147483648"),
        ("half", "holds under 2^31 entries, A has 2147483648"),
        ("cusparse", "is used with 32-bit offsets, A has 2147483648 entries"),
        ("wcsr", "holds under 2^31 entries, A has 2147483648"),
    ],
)
def test_more_entries_than_32_bits_count_are_refused_before_any_launch(name, reason):
    csr = huge(3, 3)
    large = Large(csr.indptr, csr.indices, None, csr.shape)
    assert reason in SYSTEMS[name].reasons(request(csr=large))


@pytest.mark.parametrize("name", ["csr", "cpu"])
def test_exact_systems_hold_more_entries_than_32_bits_count(name):
    csr = huge(3, 3)
    large = Large(csr.indptr, csr.indices, None, csr.shape)
    assert not [each for each in SYSTEMS[name].reasons(request(csr=large)) if "entries" in each]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_exact_system_of_a_device_serves_every_dtype_deterministically(device):
    system = exact_system(device)
    assert device in system.devices and system.deterministic
    assert set(system.dtypes) >= {torch.float32, torch.float16, torch.bfloat16, torch.float64}
    assert isinstance(runner(system.build(request()).recipe), ExactRunner)


def test_the_table_has_one_true_row_per_system():
    table = {row["name"]: row for row in st.systems()}
    assert list(table) == list(SYSTEMS)
    for name, row in table.items():
        system = SYSTEMS[name]
        assert row["devices"] == list(system.devices) and row["summary"] == system.summary
        assert row["deterministic"] is system.deterministic
        assert [getattr(torch, dtype) for dtype in row["dtypes"]] == list(system.dtypes)
        exact = system in (exact_system("cuda"), exact_system("cpu"))
        assert row["reduces"] == ["sum", "mean", *(["max", "min"] if exact else [])]


def test_a_recipe_has_the_sizes_and_the_runner_s_facts():
    csr = csr_of(random_matrix(12, 10, 0.3))
    text = make_recipe("toy", csr, ["a", "b"], strip=4)
    assert (
        text
        == f'toy:{{"cols": 10, "nnz": {csr.nnz}, "rows": 12, "strip": 4, "tensors": ["a", "b"]}}'
    )
    assert tensor_bytes([torch.zeros(3), torch.zeros(2, dtype=torch.int64)]) == 28


def test_a_runner_that_reads_values_as_they_are_packs_nothing():
    class Plain(Runner):
        def spmm(self, *args, **kwargs) -> None: ...

    made = Plain({"rows": 1, "cols": 1, "nnz": 0, "tensors": []})
    assert not made.needs_packed_values and made.pack({}, None, torch.float32) == {}
    assert made.bind({}, None, None) is None
    assert made.prepare(4, torch.float32, True, torch.device("cpu")) is None


def test_dense_needs_an_exact_system_beneath_it():
    wanted = request()
    inexact = SYSTEMS["dense"].build(wanted).recipe
    with pytest.raises(TypeError) as caught:
        sizes = {"rows": 12, "cols": 10, "nnz": 1, "tensors": []}
        SYSTEMS["dense"].make_runner({**sizes, "exact": inexact})
    assert str(caught.value) == "dense: exact must be an exact runner, got DenseRunner."

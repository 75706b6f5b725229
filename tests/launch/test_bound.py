"""Bound products: what they prepare once, and operands that they hand on or copy."""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import Tensor

from sparsetile.engines.rows import runner as csr_runner
from sparsetile.engines.tiles import hybrid_runner, tile_runner
from sparsetile.kernels import KernelSpec
from sparsetile.launch import bound as module
from sparsetile.launch.bound import BoundLinear, BoundProduct
from sparsetile.launch.interface import PLAIN, Epilogue
from sparsetile.systems import SYSTEMS
from sparsetile.systems import runner as runner_of
from tests.contracts.cases import csr_of, random_matrix
from tests.host import answer_on_host
from tests.systems.requests import request_for

FAKED = (csr_runner, tile_runner, hybrid_runner)


class Notes:
    """A runner that notes what it is asked for."""

    rows = 3

    def __init__(self, done: list[str]) -> None:
        self.done = done
        self.given: list[Tensor] = []

    def prepare_launches(self, tensors, values, packed, B, epilogue=PLAIN):
        self.done.append("prepare")

    def spmm(self, tensors, values, packed, B, out, epilogue=PLAIN):
        self.given.append(B)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Notes:
    done: list[str] = []
    answer_on_host(
        monkeypatch, module, stream=7, record_stream=lambda tensors, device: None,
        ensure_cuda_context=lambda device: done.append("context"),
    )  # fmt: skip
    return Notes(done)


def test_launches_are_prepared_once_and_in_a_thread_with_a_context(runner):
    product = BoundProduct(runner, {"indptr": torch.zeros(4)}, None, None)
    B = torch.ones(2, 4)
    for _ in range(2):
        product(B)
    assert runner.done == ["context", "prepare"]
    assert all(given is B for given in runner.given)


def test_rows_farther_apart_than_kernels_can_address_are_copied(runner):
    product = BoundProduct(runner, {"indptr": torch.zeros(4)}, None, None)
    for _ in range(2):
        product(torch.empty(2, 2**30, device="meta")[:, :4])
    assert runner.done == [], "no launch is prepared for such rows"
    assert [given.stride() for given in runner.given] == [(4, 1)] * 2


@pytest.mark.parametrize("fused", [False, True])
def test_the_allocator_is_told_of_each_stream_once(runner, monkeypatch, fused):
    tensors, values = {"indptr": torch.zeros(4), "columns": torch.zeros(2)}, torch.zeros(2)
    packed = {"values": torch.zeros(3)}
    recorded, streams = [], iter([7, 7, 9, 7, 9, 9])
    answer_on_host(
        monkeypatch, module, current_stream_handle=lambda device: next(streams),
        record_stream=lambda tensors, device: recorded.append(list(tensors)),
    )  # fmt: skip
    product = BoundProduct(runner, tensors, values, packed)
    for _ in range(6):
        B = torch.ones(2, 4)
        product.fused(B, None, 2.0, False, True) if fused else product(B)
    assert len(recorded) == 2
    for parts in recorded:
        expected = [*tensors.values(), values, *packed.values()]
        assert all(one is other for one, other in zip(parts, expected, strict=True))


# -- the same launches as the general way


class Kernel:
    """Notes (grid, threads, overlap, parameters) of launches."""

    def __init__(self, spec: KernelSpec, noted: list[tuple]) -> None:
        self.spec, self.noted = spec, noted

    def launch(self, grid, threads, stream, params, *, overlap=False):
        assert set(params) == {field.name for field in self.spec.params.fields}
        self.noted.append((self.spec.name, grid, threads, overlap, dict(params)))

    def prepare(self, grid, threads, params, patch, rare=(), *, overlap=False):
        def launch_with(stream, seldom, *values):
            changed = dict(zip((*patch, *rare), (*values, *seldom), strict=True))
            self.launch(grid, threads, stream, {**params, **changed}, overlap=overlap)

        def launch(stream, *values):
            launch_with(stream, (), *values)

        return SimpleNamespace(launch=launch, launch_with=launch_with)


class GPU:
    """A pretended GPU: what was launched, what scratch memory was asked for."""

    def __init__(self) -> None:
        self.launches: list[tuple] = []
        self.asked: list[tuple[int, ...]] = []
        self.at = 2**20

    def scratch(self, device, stream, size, counters, owner=0):
        self.asked.append((size, counters, owner))
        at = self.at
        return SimpleNamespace(data_ptr=lambda: at), SimpleNamespace(data_ptr=lambda: 2 * at)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, fresh_runners: None, gpu_facts) -> GPU:
    gpu_facts()
    made = GPU()
    answer_on_host(
        monkeypatch, module, *FAKED, stream=7, scratch=made.scratch,
        load=lambda spec, config, *rest: Kernel(spec, made.launches),
        record_stream=lambda tensors, device: None,
    )  # fmt: skip
    return made


def cut_matrix() -> sp.csr_array:
    """Long rows and full windows, which every system cuts."""
    full = np.zeros((40, 9000))
    full[:16] = random_matrix(16, 9000, 0.6).toarray()
    full[20] = 1.0
    return sp.csr_array(full)


def binds_launches(name: str) -> bool:
    """Whether a system's products are launched by one of the modules that a pretended GPU is in."""
    csr = csr_of(random_matrix(30, 20, 0.1))
    ablation = SYSTEMS[name].contract_ablations[0]
    built = SYSTEMS[name].build(request_for(torch.float32, csr=csr, ablation=ablation))
    defined_in = {base.__module__ for base in type(runner_of(built.recipe)).__mro__}
    return bool(defined_in & {module.__name__ for module in FAKED})


BOUND = [
    name
    for name, system in SYSTEMS.items()
    if system.kernels and "cpu" not in system.devices and binds_launches(name)
]
EPILOGUES = {
    "plain": PLAIN,
    "bias and relu": Epilogue(bias=torch.arange(16.0), relu=True),
    "scaled mean": Epilogue(alpha=-2.5, mean=True),
}


def test_most_systems_bind_their_launches_in_the_common_way():
    assert len(BOUND) >= 6


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("name", BOUND)
def test_bound_launches_are_those_of_the_general_way(name, cut, gpu):
    csr = csr_of(cut_matrix() if cut else random_matrix(30, 20, 0.1))
    ablation = SYSTEMS[name].contract_ablations[0]
    built = SYSTEMS[name].build(request_for(torch.float32, csr=csr, ablation=ablation))
    work = runner_of(built.recipe)
    packed = work.pack(built.tensors, csr.values, torch.float32) if work.packed_names else None
    product = work.bind(built.tensors, csr.values, packed)
    B, allocated = torch.ones(csr.shape[1], 16), []
    for epilogue, _ in itertools.product(EPILOGUES.values(), range(2)):
        gpu.launches.clear()
        gpu.asked.clear()
        if epilogue.plain:
            out = product(B)
        else:
            given = (epilogue.bias, epilogue.alpha, epilogue.mean, epilogue.relu)
            out = product.fused(B, *given)
        found, asked = gpu.launches[:], gpu.asked[:]
        gpu.launches.clear()
        gpu.asked.clear()
        work.spmm(built.tensors, csr.values, packed, B, out, epilogue)
        assert found == gpu.launches and asked == gpu.asked
        assert bool(asked) == cut and found[-1][-1]["c"] == out.data_ptr()
        allocated.append(out)
    later = {"wcsr": ["join_wcsr", "redo_wcsr"], "voltrix": ["redo_bmat"]}.get(name, [])
    if cut and later:
        assert [launch[0] for launch in found[1:]] == later
        assert asked[0][2] == threading.get_ident(), "no other thread's launch comes between"
        assert found[0][-1]["redo"] != 0


def test_scratch_memory_that_has_grown_is_the_next_launch_s(gpu):
    csr = csr_of(cut_matrix())
    built = SYSTEMS["csr"].build(request_for(torch.float32, csr=csr))
    work = runner_of(built.recipe)
    packed = work.pack(built.tensors, csr.values, torch.float32) if work.packed_names else None
    product = work.bind(built.tensors, csr.values, packed)
    B = torch.ones(csr.shape[1], 16)
    for gpu.at in (2**20, 2**20, 2**22, 2**20):
        product(B)
        params = gpu.launches[-1][-1]
        assert (params["partials"], params["arrivals"]) == (gpu.at, 2 * gpu.at)


def test_a_product_keeps_a_bounded_number_of_launches(gpu):
    csr = csr_of(random_matrix(150, 130, 0.05))
    built = SYSTEMS["csr"].build(request_for(torch.float32, csr=csr))
    work = runner_of(built.recipe)
    packed = work.pack(built.tensors, csr.values, torch.float32) if work.packed_names else None
    product = work.bind(built.tensors, csr.values, packed)
    for n in (*range(1, 300), 1):
        B = torch.ones(130, n + 3)[:, 1 : n + 1]
        for _ in range(2):
            assert product(B).shape == product.fused(B, None, 2.0, False, False).shape == (150, n)
            params = gpu.launches[-1][-1]
            assert (params["n"], params["b"]) == (n, B.data_ptr())
            assert params["b_row_bytes"] == 4 * (n + 3) and params["alpha"] == 2.0
        assert len(product._prepared) <= 256


def test_a_prepared_launch_takes_each_call_s_bias_and_scale(gpu):
    csr = csr_of(random_matrix(150, 130, 0.05))
    built = SYSTEMS["csr"].build(request_for(torch.float32, csr=csr))
    work = runner_of(built.recipe)
    packed = work.pack(built.tensors, csr.values, torch.float32) if work.packed_names else None
    product = work.bind(built.tensors, csr.values, packed)
    B, bias = torch.ones(130, 16), torch.arange(16.0)
    product.fused(B, bias, 1.0, False, False)
    product.fused(B, None, 3.0, False, False)
    product.fused(B, bias.double(), 1.0, False, False)
    product.fused(B, torch.ones(32)[::2], 1.0, False, False)
    shown = [(each[-1]["bias"], each[-1]["alpha"], each[-1]["epilogue"]) for each in gpu.launches]
    assert shown[:2] == [(bias.data_ptr(), 1.0, True), (0, 3.0, True)]
    assert len(shown) == 4 and all(at for at, _, _ in shown[2:]), "float32 copies"
    assert product.fused(torch.ones(130, 0), None, 2.0, False, False).shape == (150, 0)
    assert len(gpu.launches) == 4


def test_operands_that_need_copies_take_their_epilogue_the_general_way(runner):
    product, seen = BoundProduct(runner, {"indptr": torch.zeros(4)}, None, None), []
    runner.spmm = lambda tensors, values, packed, B, out, epilogue: seen.append(epilogue)
    bias = torch.ones(4)
    for _ in range(2):
        product.fused(torch.ones(2, 4), bias, 2.0, True, True)
    assert runner.done == ["context", "prepare"]
    for epilogue in seen:
        assert (epilogue.alpha, epilogue.beta, epilogue.mean) == (2.0, 0.0, True)
        assert epilogue.bias is bias and epilogue.relu


class NotesLinear:
    """A runner of linear layers that notes what it prepares and launches."""

    rows, cols = 3, 8

    def __init__(self) -> None:
        self.prepared: list[tuple[tuple[int, ...], bool, bool]] = []
        self.launched: list[tuple[int, ...]] = []

    def prepare_linear(self, tensors, packed, X, epilogue):
        self.prepared.append((tuple(X.shape), epilogue.row_bias is not None, epilogue.relu))
        if X.shape[0] > 5:
            return None
        return SimpleNamespace(launch=lambda stream, *places: self.launched.append(places))


@pytest.fixture
def layer(runner: Notes) -> tuple[BoundLinear, NotesLinear]:
    notes = NotesLinear()
    return BoundLinear(notes, {"work": torch.zeros(4)}, {"blocks": torch.zeros(2)}), notes


def test_a_linear_layer_is_prepared_once_for_each_kind_of_input(layer):
    bound, notes = layer
    bias = torch.zeros(3)
    for X in (torch.zeros(2, 8), torch.zeros(2, 8), torch.zeros(1, 2, 8), torch.zeros(8)):
        Y = bound(X, None, False)
        assert Y is not None and Y.shape == (*X.shape[:-1], 3)
        assert notes.launched[-1] == (X.data_ptr(), Y.data_ptr())
    assert notes.prepared == [((2, 8), False, False)] * 2 + [((1, 8), False, False)]
    Y = bound(X, bias, True)
    assert notes.prepared[-1] == ((1, 8), True, True)
    assert notes.launched[-1] == (X.data_ptr(), Y.data_ptr(), bias.data_ptr())
    bound(X, other := torch.ones(3), True)
    assert notes.launched[-1][2] == other.data_ptr() and len(notes.prepared) == 4


def test_inputs_of_a_linear_layer_that_need_copies_are_left_to_others(layer):
    bound, notes = layer
    room = torch.zeros(80)
    unfit = (torch.zeros(2, 7), torch.zeros(0, 8), torch.zeros(()), torch.zeros(8, 2).t(),
             room[1:17].view(2, 8), torch.zeros(2, 3, 8).transpose(0, 1))  # fmt: skip
    for X in unfit:
        assert bound(X, None, False) is None
    assert not notes.prepared
    for _ in range(2):
        assert bound(torch.zeros(6, 8), None, False) is None, "the runner says so, once"
    assert len(notes.prepared) == 1 and not notes.launched

"""The ladder's last step replayed: what two blocks of threads share arrives, nobody waits for ever.

A mistake here would hang a GPU, so each rule of the protocol is left out once, and must be missed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from sparsetile.kernels.bcsr import BLOCK
from tests.kernels import replay_bcsr, replay_bcsr_cluster
from tests.kernels.replay import Machine
from tests.kernels.replay_bcsr_cluster import ClusterBlock, Gathering
from tests.kernels.replay_cases import BlockCase
from tests.kernels.replay_wgmma import Barrier, box_places
from tests.kernels.test_decode_bcsr import CORNERS, full_blocks
from tests.kernels.whole_numbers import operand, reference

F16, BF16 = torch.float16, torch.bfloat16


@pytest.fixture
def machine(wide: Machine) -> Machine:
    return wide


def test_halves_of_a_block_lie_where_the_whole_would():
    whole = box_places(4096, BLOCK, BLOCK)
    halves = [box_places(4096 + rank * 32 * 128, 32, BLOCK) for rank in range(2)]
    assert np.array_equal(np.concatenate(halves), whole)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("n", [8, 128, 256, 264, 520, 776])
def test_two_blocks_of_threads_make_the_product_whatever_slabs_there_are(machine, maps, dtype, n):
    """264 and 776 columns are odd numbers of slabs: the last block of threads has none."""
    for seed, shape in enumerate((None, (193, 129))):
        machine.seed = seed
        csr = full_blocks(CORNERS, dtype, shape)
        B = operand(csr, n, dtype)
        case = BlockCase(machine, csr, n, dtype, ablation="opt7")
        assert torch.equal(case.spmm(B), reference(csr, B).to(dtype))
    assert maps.known[0].box == (32, 64) and machine.configs[-1]["CLUSTERED"] == "1"


@pytest.mark.parametrize("processors", [1, 2, 3, 132])
def test_every_item_is_made_once_however_many_clusters_there_are(machine, monkeypatch, processors):
    machine.install(monkeypatch, processors=processors)
    csr = full_blocks([*CORNERS, [0, 0, 1]], F16, (300, 190))
    B = operand(csr, 650, F16)
    case = BlockCase(machine, csr, 650, F16, ablation="opt7")
    assert torch.equal(case.spmm(B), reference(csr, B).to(F16))


@pytest.mark.parametrize("seed", range(6))
def test_long_and_short_block_rows_go_through_both_rings_in_step(machine, seed):
    machine.seed = seed
    csr = full_blocks([[1] * 11, [1] + [0] * 10, [0] * 11, [1, 1] + [0] * 9], F16)
    B = operand(csr, 264, F16)
    case = BlockCase(machine, csr, 264, F16, ablation="opt7")
    assert torch.equal(case.spmm(B), reference(csr, B).to(F16))


# -- mistakes are seen


def _own_consumers_alone(patch: pytest.MonkeyPatch) -> None:
    """A producer waits for its own block's consumers, as without a cluster."""
    patch.setattr(ClusterBlock, "release", replay_bcsr.Product.release)
    make = Barrier.__init__
    patch.setattr(
        Barrier, "__init__", lambda barrier, count: make(barrier, 1 if count == 1 else count // 2)
    )


def _arrivals_at_home_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ClusterBlock, "release", replay_bcsr.Product.release)


def _no_beginning(patch: pytest.MonkeyPatch) -> None:
    sync = Gathering.sync

    def skip(which: Gathering) -> Iterator[None]:
        return iter(()) if which.first else sync(which)  # type: ignore[attr-defined]

    make = Gathering.__init__
    made: list[Gathering] = []

    def remember(which: Gathering, threads: int) -> None:
        make(which, threads)
        which.first = len(made) % 2 == 0  # type: ignore[attr-defined]
        made.append(which)

    patch.setattr(Gathering, "__init__", remember)
    patch.setattr(Gathering, "sync", skip)


def _no_end(patch: pytest.MonkeyPatch) -> None:
    def life(block: ClusterBlock, role: Iterator[None], first: bool) -> Iterator[None]:
        if first:
            block.full = [Barrier(1) for _ in range(block.stages)]
            arrivals = 2 * block.consumers * 4
            block.empty = [Barrier(arrivals) for _ in range(block.stages)]
            block.begun = True
        yield from block.beginning.sync()
        yield from role
        block.running -= 1

    patch.setattr(ClusterBlock, "life", life)


def _wrong_rows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(replay_bcsr_cluster, "BLOCK", 32)


def _half_a_block_expected(patch: pytest.MonkeyPatch) -> None:
    expect = Barrier.expect
    patch.setattr(Barrier, "expect", lambda barrier, count: expect(barrier, count - 32 * 128))


@pytest.mark.parametrize(
    "rule",
    [_own_consumers_alone, _arrivals_at_home_alone, _no_beginning, _no_end, _wrong_rows,
     _half_a_block_expected],
)  # fmt: skip
def test_the_protocol_needs_each_of_its_rules(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, rule: Callable[[pytest.MonkeyPatch], None]
):
    csr = full_blocks([[1] * 12] * 2 + [[1] + [0] * 11] * 3, F16)
    B = operand(csr, 264, F16)
    case = BlockCase(machine, csr, 264, F16, ablation="opt7")

    def right(seed: int) -> bool:
        machine.seed = seed
        try:
            return torch.equal(case.spmm(B), reference(csr, B).to(F16))
        except (AssertionError, AttributeError):  # the latter: a barrier that is not there yet
            return False

    assert right(0)
    with monkeypatch.context() as patch:
        rule(patch)
        assert not all(right(seed) for seed in range(4))
    assert right(0)

"""Machines that several files of replays share."""

from __future__ import annotations

import pytest

from sparsetile.systems.bcsr import runner as bcsr_runner
from tests.kernels import replay_bcsr, replay_csr
from tests.kernels.replay import Machine
from tests.kernels.replay_wgmma import Maps


@pytest.fixture
def maps(monkeypatch: pytest.MonkeyPatch) -> Maps:
    """The tensor maps of a machine of blocks."""
    made = Maps()
    monkeypatch.setattr(bcsr_runner, "encode_matrix", made.encode)
    return made


@pytest.fixture
def block_machine(monkeypatch: pytest.MonkeyPatch, maps: Maps, fresh_runners: None) -> Machine:
    """Runs ``bcsr``'s kernels, and ``csr``'s, which repair what they leave."""
    made = Machine({**replay_csr.REPLAYS, **replay_bcsr.replays(maps)})
    made.install(monkeypatch)
    return made


@pytest.fixture
def wide(block_machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """One SM: tiles are wide wherever B is, and a block of threads goes through several items."""
    block_machine.install(monkeypatch, processors=1)
    return block_machine

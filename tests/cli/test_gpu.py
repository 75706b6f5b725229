"""The commands on a machine with a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sparsetile.jit import device_arch
from tests.cli.conftest import Cli

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here"),
]


@pytest.mark.parametrize("system", ["auto", "csr", "cusparse", "dense"])
def test_run_checks_and_times_on_the_gpu(cli: Cli, folder: Path, system: str):
    words = ("run", "weighted", "--data", folder, "-n", 64, "--system", system, "--json")
    outcome = cli(*words)
    (row,) = outcome.json
    assert outcome.code == 0 and row["device"] == "cuda:0" and row["ok"]
    assert 0 < row["seconds"] <= row["call_seconds"]
    assert row["floor_share"] == pytest.approx(row["floor_seconds"] / row["seconds"])


def test_our_own_kernel_is_timed_by_graph_replay(cli: Cli, folder: Path):
    (row,) = cli("run", "weighted", "--data", folder, "--system", "csr", "--json").json
    assert row["timing"] == "graph" and row["seconds"] > 0


def test_tf32_is_judged_by_its_own_bound(cli: Cli, folder: Path):
    words = ("run", "weighted", "--data", folder, "--system", "dense", "--tf32", "--json")
    outcome = cli(*words)
    assert outcome.code == 0 and outcome.json[0]["tf32"] is True


def test_the_cpu_can_be_asked_for(cli: Cli, folder: Path):
    (row,) = cli("run", "weighted", "--data", folder, "--device", "cpu", "--json").json
    assert row["device"] == "cpu" and row["ok"]


def test_doctor_lists_the_gpu_and_multiplies_on_it(cli: Cli):
    outcome = cli("doctor", "--json")
    found = {finding["name"]: finding for finding in outcome.json["findings"]}
    assert outcome.code == 0
    assert torch.cuda.get_device_name(0) in found["GPU 0"]["detail"]
    assert found["product on GPU 0"]["status"] == "ok"
    assert found["NVIDIA driver"]["status"] == "ok"


def test_compile_takes_this_gpu_s_architecture_by_default(cli: Cli):
    outcome = cli("compile", "--kernel", "sddmm_csr", "--json")
    assert outcome.code == 0
    assert {row["arch"] for row in outcome.json} == {device_arch(0)}

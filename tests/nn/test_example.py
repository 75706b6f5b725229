"""The examples learn, and refuse clearly what they cannot do."""

from __future__ import annotations

import pytest
import torch

from tests.examples import load_example
from tools import gnn_times


def test_the_example_learns_and_prints_loss_and_accuracy(capsys):
    accuracy = load_example("gcn_train").main(epochs=20)
    lines = capsys.readouterr().out.splitlines()
    assert accuracy > 0.9
    assert len(lines) == 2 and all("loss" in line and "accuracy" in line for line in lines)


@pytest.mark.parametrize("capture", [False, True])
def test_the_step_that_is_captured_trains_on_the_host(capture):
    epoch = load_example("gcn_cuda_graph").make_training("cpu", capture, nodes=200, edges=2000)
    losses = [epoch().item() for _ in range(10)]
    assert losses[-1] < losses[0]


def test_a_cuda_graph_without_a_gpu_is_refused(no_gpu):
    with pytest.raises(SystemExit, match="device must be a CUDA GPU, got none"):
        load_example("gcn_cuda_graph").main()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
def test_a_captured_step_trains_as_the_eager_one_does(capsys):
    load_example("gcn_cuda_graph").main(epochs=20)
    assert "CUDA graph" in capsys.readouterr().out


def test_layer_times_are_of_equal_results(capsys):
    found = gnn_times.main(["--nodes", "300", "--edges", "3000", "--batch", "32", "--steps", "1"])
    capsys.readouterr()
    assert [entry["what"] for entry in found] == [
        "gat", "sage mini-batch", "gcn mini-batch", "plan(tune=none) of a block",
    ]  # fmt: skip
    for entry in found[:3]:
        assert entry["difference"] < 1e-3
        assert entry["sparsetile_ms"] > 0 and entry["pyg_ms"] > 0

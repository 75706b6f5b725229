"""examples/gcn_train.py finds the communities of its graph."""

from __future__ import annotations

from tests.examples import load_example


def test_the_example_learns_and_prints_loss_and_accuracy(capsys):
    accuracy = load_example("gcn_train").main(epochs=20)
    lines = capsys.readouterr().out.splitlines()
    assert accuracy > 0.9
    assert len(lines) == 2 and all("loss" in line and "accuracy" in line for line in lines)

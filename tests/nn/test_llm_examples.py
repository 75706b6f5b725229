"""The examples of pruned language models: what they print is true."""

from __future__ import annotations

import pytest
import torch

from tests.examples import load_example


@pytest.fixture(autouse=True)
def _one_thread():
    """Matrices are tiny: threads would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_a_pruned_model_recovers_with_state_on_kept_weights_alone(capsys):
    outcome = load_example("prune_and_finetune").main()
    printed = capsys.readouterr().out.splitlines()
    assert outcome.final_loss < outcome.pruned_loss
    assert 0.75 <= outcome.sparsity <= 0.85
    assert outcome.optimiser_bytes < 0.4 * outcome.dense_optimiser_bytes
    assert outcome.gradient_error < 1e-5
    assert printed[0].startswith("dense: loss") and printed[-1].startswith("gradients differ")


@pytest.mark.parametrize("share, expected", [(0.0, 0.0), (0.5, 0.7), (1.0, 0.8), (2.0, 0.8)])
def test_the_schedule_is_cubic(share, expected):
    assert load_example("prune_and_finetune").sparsity_at(share) == pytest.approx(expected)


def test_the_prefill_example_runs_a_model_of_transformers(capsys):
    pytest.importorskip("transformers")
    found = load_example("sparse_prefill").main(["--tokens", "32", "--layers", "1", "--tiny"])
    out = capsys.readouterr().out
    assert "over dense" in out and "MB" in out
    assert found.difference < 1e-3
    assert found.sparse_bytes < found.dense_bytes


def test_perplexities_of_every_way_are_printed(capsys):
    pytest.importorskip("transformers")
    words = ["--tiny", "--length", "32", "--windows", "4", "--calibration", "2", "--block", "16"]
    found = load_example("evaluate_pruned").main([*words, "--sparsity", "0.5,0.9"])
    assert [outcome.way for outcome in found] == [
        "dense", "unstructured, 50%, magnitude", "unstructured, 90%, magnitude",
        "unstructured, 50%, wanda", "unstructured, 90%, wanda", "2:4, 50%, magnitude",
        "2:4, 50%, wanda", "blocks of 16, 50%, magnitude", "blocks of 16, 90%, magnitude",
        "blocks of 16, 50%, wanda", "blocks of 16, 90%, wanda",
    ]  # fmt: skip
    assert all(outcome.perplexity > 1 for outcome in found)
    assert [round(outcome.bytes, 2) for outcome in found[:3]] == [1.0, 0.53, 0.13]  # float32
    assert len(capsys.readouterr().out.splitlines()) == len(found)


def test_a_text_that_is_too_short_is_refused(capsys):
    pytest.importorskip("transformers")
    with pytest.raises(SystemExit):
        load_example("evaluate_pruned").main(["--tiny", "--length", "4096"])
    assert "shorten --length or --calibration" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        load_example("evaluate_pruned").main([])
    assert "pass --model and --text, or --tiny" in capsys.readouterr().err

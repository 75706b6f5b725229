"""tools.llm_study: every part runs on a host, results are checked, bad words refused."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
from tools.llm_decoder import QWEN_7B, TINY, Cache, Decoder
from tools.llm_study import main
from tools.llm_times import LlmSelection, run_llm, validate_llm

from sparsetile.bench.record import read_records
from sparsetile.nn import SparseConfig, SparseLinear, SparseSwiGLU, densify_, sparsify_
from tests.cli.conftest import Outcome
from tools import llm_times


@pytest.fixture
def study(capsys):
    """Run the study on the host and return its exit code and what it wrote where."""

    def run(*words: object) -> Outcome:
        code = main(["--device", "cpu", *map(str, words)])
        return Outcome(code, *capsys.readouterr())

    return run


def test_projections_are_those_of_qwen():
    assert QWEN_7B.projections() == {
        "gate": (18944, 3584), "up": (18944, 3584), "down": (3584, 18944), "q": (3584, 3584),
        "k": (512, 3584), "v": (512, 3584), "o": (3584, 3584),
    }  # fmt: skip


def tiny(prepare=None) -> Decoder:
    torch.manual_seed(0)
    return Decoder(TINY, torch.device("cpu"), torch.float32, prepare).eval()


@torch.no_grad()
def test_decoding_token_by_token_is_prefilling():
    model, tokens = tiny(), torch.tensor([[5, 9, 2, 77]])
    cache = Cache.empty(TINY, 8, model.norm.weight)
    for place in range(4):
        logits = model.decode(tokens[:, place : place + 1], torch.tensor([place]), cache)
        expected = model.prefill(tokens[:, : place + 1])
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_the_decoder_is_pruned_block_by_block():
    config = SparseConfig(sparsity=0.5)
    model = tiny(lambda block: sparsify_(block, config, lambda module, name: "mlp." in name))
    assert all(isinstance(block.mlp, SparseSwiGLU) for block in model.blocks)
    tokens = torch.tensor([[5, 9, 2]])
    expected = model.prefill(tokens)
    torch.testing.assert_close(densify_(model).prefill(tokens), expected, rtol=1e-4, atol=1e-5)


def test_every_part_is_measured_and_right(study, tmp_path):
    out = tmp_path / "llm.jsonl"
    got = study(
        "--matrices", "gate,k", "--sparsity", "0.9",
        "-n", "1,5", "--out", out, "--json",
    )  # fmt: skip
    assert got.code == 0, got.err
    records = got.json["records"]
    layers = [record for record in records if record["part"] == "layers"]
    assert len(layers) == 2 * 2 * 2 * 2  # projections, zeros, bias, tokens
    assert {(record["zeros"], record["bias"]) for record in layers} == {
        (0.0, False), (0.0, True), (0.001, False), (0.001, True),
    }  # fmt: skip
    assert all(record["status"] == "ok" and record["seconds"] > 0 for record in records)
    assert all(
        record["bytes"] < 0.2 * record["dense_bytes"]
        for record in layers
        if record["name"] == "gate"
    )
    models = [
        (record["part"], record["sparsity"]) for record in records if record["part"] != "layers"
    ]
    assert models.count(("prefill-sparse", 0.9)) == 2
    assert models.count(("prefill", None)) == models.count(("prefill", 0.9)) == 2
    assert models.count(("decode", None)) == models.count(("decode", 0.9)) == 1
    written, damaged = read_records(out, validate_llm)
    assert len(written) == len(records) and damaged == []
    assert written[0]["suite"] == "llm" and "environment" in written[0]
    table = study("--matrices", "k", "-n", "2", "--sparsity", "0.5")
    assert "over dense" in table.out and "decode" in table.out


def test_what_a_file_holds_is_not_measured_again(study, tmp_path, calls_of):
    out = tmp_path / "llm.jsonl"
    words = [
        "--dtype", "float16", "--settings", "layers,decode",
        "--matrices", "k", "--sparsity", "0.5", "--out", out,
    ]  # fmt: skip
    assert study(*words, "-n", "1").code == 0
    first = out.read_text().splitlines()
    assert len(first) == 1 + 4 + 2  # the run; zeros and bias; dense and pruned

    made = calls_of(llm_times, "Decoder")
    more = study(*words, "-n", "1,2", "--json")
    assert more.code == 0 and len(more.json["records"]) == 6 + 4 and not made
    assert out.read_text().splitlines()[:7] == first
    assert len(read_records(out, validate_llm)[0]) == 10


def test_nothing_is_begun_after_the_time_limit(study, monkeypatch):
    now = iter(range(0, 10**6, 3))
    clock = SimpleNamespace(monotonic=lambda: next(now), perf_counter=time.perf_counter)
    monkeypatch.setattr("tools.llm_times.time", clock)
    got = study(
        "--dtype", "float16", "--matrices", "k", "-n", "1",
        "--sparsity", "0.5", "--time-limit", "8", "--json",
    )  # fmt: skip
    assert got.code == 0 and len(got.json["records"]) == 1
    assert "time limit: 9 measurements left out" in got.err


def test_a_wrong_result_fails(study, fault):
    fault(SparseLinear, "forward", lambda right, layer, x: right(layer, x) + 1)
    got = study(
        "--settings", "layers", "--matrices", "k", "-n", "2",
        "--sparsity", "0.5",
    )  # fmt: skip
    assert got.code == 1


@pytest.mark.parametrize(
    "words, text",
    [
        (["--settings", "train"], "--settings must be"),
        (["--matrices", "lm_head"], "--matrices must be"),
        (["--sparsity", "1.5"], "--sparsity must be at least 0 and below 1"),
        (["--sparsity", "most"], "--sparsity must be numbers"),
        (["--dtype", "float64"], "--dtype must be"),
        (["--time-limit", "0"], "--time-limit must be seconds above 0"),
        (["-n", "many"], "-n must be whole numbers"),
    ],
)
def test_rejects_bad_options(study, words, text):
    got = study(*words)
    assert got.code == 2
    assert text in got.err


def test_widths_of_each_device_reach_what_is_asked_of_it():
    assert LlmSelection("cuda").widths("layers") == (1, 16, 128, 1024, 8192, 65536)
    assert LlmSelection("cuda").widths("prefill")[-1] == 65536
    assert next(run_llm(LlmSelection("cpu", tokens=(3,)), print))["tokens"] == 3

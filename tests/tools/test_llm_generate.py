"""tools.llm_generate: decoding is transformers' own, pruned models are compared, tables."""

from __future__ import annotations

import json

import pytest
import torch
from tools.llm_generate import TINY, Decoding, make_model, prune

from sparsetile.nn import MaskedLinear
from tools import llm_generate

CPU = torch.device("cpu")
PROMPT = torch.arange(8)[None]


def tokens(decoding: Decoding, count: int) -> list[int]:
    decoding.read(PROMPT)
    found = [int(decoding.token)]
    for _ in range(count - 1):
        decoding.step()
        found.append(int(decoding.token))
    return found


@pytest.mark.parametrize("sparsity", [0.0, 0.5])
def test_tokens_are_those_of_generate(sparsity):
    model = make_model(TINY, CPU, torch.float32)
    if sparsity:
        prune(model, sparsity)
    expected = model.generate(PROMPT, max_new_tokens=4, do_sample=False)[0, 8:].tolist()
    assert tokens(Decoding(model, TINY, 1, compiled=False), 4) == expected


def test_layers_of_a_size_keep_as_many_weights():
    model = make_model(TINY, CPU, torch.bfloat16)
    prune(model, 0.7)
    layers = [each for each in model.modules() if isinstance(each, MaskedLinear)]
    assert len(layers) == 2 * 5  # q, k and v are one
    found = {(each.in_features, each.out_features, each.weight.numel()) for each in layers}
    assert found == {(64, 128, round(0.3 * 64 * 128)), (64, 64, round(0.3 * 64 * 64)),
                     (128, 64, round(0.3 * 128 * 64))} | {
        (64, 128, sum(round(0.3 * 64 * rows) for rows in (64, 32, 32)))
    }  # fmt: skip


def test_logits_are_compared_with_dense_products():
    model = make_model(TINY, CPU, torch.float32)
    prune(model, 0.5)
    decoding = Decoding(model, TINY, 1, compiled=False)
    decoding.read(PROMPT)
    assert llm_generate._error(decoding) < 1e-5
    assert {layer.prefer for layer in llm_generate._masked(model)} == {"speed"}


def test_the_table_of_a_record(tmp_path, capsys):
    record = tmp_path / "generate.jsonl"
    lines = [
        {"schema": 1, "environment": {}},
        {"sparsity": 0.5, "batch": 1, "seconds": 0.0035, "ratio": 1.4},
    ]
    record.write_text("\n".join(map(json.dumps, lines)))
    assert llm_generate.main(["--table", str(record)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "| sparsity | batch | ms a token | over dense |",
        "| ---: | ---: | ---: | ---: |",
        "| 50% | 1 | 3.500 | 1.40 |",
    ]


def test_refuses_nothing_to_do(capsys):
    with pytest.raises(SystemExit) as left:
        llm_generate.main([])
    assert left.value.code == 2 and "--out must be the file" in capsys.readouterr().err

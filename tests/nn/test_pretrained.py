"""save_pretrained records what is pruned; from_pretrained of transformers loads it."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn

from sparsetile.nn import (
    MaskedLinear,
    SparseConfig,
    SparseLinear,
    densify_,
    enable_from_pretrained,
    load_sparse_,
    sparsify_,
)
from tests.nn.language_models import TOKENS, model_of, transformers

CONFIGS = {
    "unstructured": SparseConfig(0.6, pattern="unstructured"),
    "2:4": SparseConfig(pattern="2:4"),
    "blocks": SparseConfig(0.5, block=32),
    "blocks apart": SparseConfig(0.5, block=64, join_gate_up=False),
}


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(TOKENS).logits


def close(one: torch.Tensor, other: torch.Tensor) -> None:
    """Products may differ in the last bit by the alignment of the weights."""
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind, tied", [("Qwen2", True), ("Llama", False)])
def test_from_pretrained_loads_what_save_pretrained_wrote(name, kind, tied, tmp_path):
    model = sparsify_(model_of(kind, tied), CONFIGS[name])
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert written["quant_method"] == "sparsetile" and written["layers"]
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    close(logits(again), logits(model))
    for layer in again.modules():  # copies are kept of weights that were in a file
        if isinstance(layer, MaskedLinear):
            assert layer.memory()["dense copy"] > 0
    kinds = [type(layer) for layer in model.modules()]
    assert [type(layer) for layer in again.modules()] == kinds
    # And once more, from the loaded one.
    again.save_pretrained(tmp_path / "again")
    third = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval()
    close(logits(third), logits(model))


def test_what_is_pruned_after_sparsify_is_recorded(tmp_path):
    model = sparsify_(model_of(), CONFIGS["unstructured"])
    for layer in model.modules():
        if isinstance(layer, MaskedLinear):
            layer.prune_(0.8)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    close(logits(again), logits(model))
    assert again.model.layers[0].self_attn.q_proj.sparsity == pytest.approx(0.8, abs=1e-3)


def test_a_copy_records_itself(tmp_path):
    model = sparsify_(model_of(), CONFIGS["unstructured"])
    other = copy.deepcopy(model)
    other.model.layers[0].self_attn.q_proj.prune_(0.9)
    for number, each in enumerate((model, other)):
        each.save_pretrained(tmp_path / str(number))
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / str(number)).eval()
        close(logits(again), logits(each))
    assert again.hf_quantizer.is_trainable and again.hf_quantizer.is_qat_trainable
    assert again.hf_quantizer.is_compileable


def test_dtype_of_from_pretrained_is_that_of_the_weights(tmp_path):
    sparsify_(model_of(), CONFIGS["2:4"]).save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    layer = again.model.layers[0].self_attn.q_proj
    assert layer.weight.dtype is torch.bfloat16 and layer.mask_bits.dtype is torch.uint8
    assert logits(again.eval()).dtype is torch.bfloat16


def test_a_loaded_model_generates_trains_and_becomes_dense(tmp_path):
    sparsify_(model_of(), CONFIGS["blocks"]).save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    expected = logits(model)
    out = model.generate(
        TOKENS, max_new_tokens=3, do_sample=False, pad_token_id=0, cache_implementation="static"
    )
    assert out.shape == (2, 9)
    dense = densify_(model)
    torch.testing.assert_close(logits(dense), expected, rtol=1e-4, atol=1e-5)
    dense.save_pretrained(tmp_path / "dense")
    assert "quantization_config" not in json.loads((tmp_path / "dense/config.json").read_text())
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense").eval()
    torch.testing.assert_close(logits(plain), expected, rtol=1e-4, atol=1e-5)


def test_training_goes_on_after_from_pretrained(tmp_path):
    sparsify_(model_of(), CONFIGS["unstructured"]).save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(6):
        loss = model(TOKENS, labels=TOKENS).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_load_sparse_also_records(tmp_path):
    sparsify_(model_of(), CONFIGS["unstructured"]).save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    model = load_sparse_(transformers.AutoModelForCausalLM.from_config(config).eval(), tmp_path)
    model.save_pretrained(tmp_path / "again")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval()
    close(logits(again), logits(model))


def test_fp8_weights_are_not_recorded(tmp_path):
    config = SparseConfig(0.5, weight_dtype=torch.float8_e4m3fn)
    model = sparsify_(model_of(), config)
    assert any(isinstance(layer, SparseLinear) for layer in model.modules())
    assert getattr(model.config, "quantization_config", None) is None


def test_a_model_quantised_by_another_keeps_its_record():
    model = model_of()
    model.config.quantization_config = {"quant_method": "gptq"}
    sparsify_(model, CONFIGS["2:4"])
    assert model.config.quantization_config == {"quant_method": "gptq"}
    densify_(model)
    assert model.config.quantization_config == {"quant_method": "gptq"}


def test_a_fresh_process_needs_one_call(tmp_path, interpreter):
    sparsify_(model_of(), CONFIGS["2:4"]).save_pretrained(tmp_path)
    code = (
        "import sys, torch\n"
        "from sparsetile.nn import MaskedLinear, enable_from_pretrained\n"
        "assert 'transformers' not in sys.modules\n"
        "enable_from_pretrained()\n"
        "enable_from_pretrained()\n"
        "from transformers import AutoModelForCausalLM\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})\n"
        "assert isinstance(model.model.layers[0].mlp.up_proj, MaskedLinear)\n"
    )
    ran = interpreter(code)
    assert ran.returncode == 0, ran.stderr


def test_registering_twice_is_harmless():
    enable_from_pretrained()
    enable_from_pretrained()

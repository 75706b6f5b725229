"""PEFT's LoRA on pruned layers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from sparsetile.nn import MaskedLinear, SparseConfig, SparseLinear, lora_config, sparsify_

peft = pytest.importorskip("peft")

CONFIGS = {
    "unstructured": SparseConfig(0.6, pattern="unstructured"),
    "2:4": SparseConfig(pattern="2:4"),
    "blocks": SparseConfig(0.5, block=16),
}
X = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def adapted(pattern: str, **options) -> nn.Module:
    model = sparsify_(Net(), CONFIGS[pattern])
    return peft.get_peft_model(model, lora_config(r=4, target_modules=["up", "down"], **options))


def sparse_layers(model: nn.Module) -> list[nn.Module]:
    return [each for each in model.modules() if isinstance(each, (MaskedLinear, SparseLinear))]


@pytest.mark.parametrize("pattern", CONFIGS)
def test_adapters_train_and_pruned_weights_stay(pattern):
    expected = sparsify_(Net(), CONFIGS[pattern])(X)
    model = adapted(pattern)
    torch.testing.assert_close(model(X), expected)  # B starts as zeros
    before = [layer.to_dense().detach().clone() for layer in sparse_layers(model)]
    assert len(before) == 2
    trained = [name for name, part in model.named_parameters() if part.requires_grad]
    assert trained and all("lora_" in name for name in trained)
    optimiser = torch.optim.AdamW([part for part in model.parameters() if part.requires_grad], 0.02)
    losses = []
    for _ in range(60):
        optimiser.zero_grad()
        loss = (model(X) - X.flip(1)).square().mean()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    for layer, old in zip(sparse_layers(model), before, strict=True):
        assert torch.equal(layer.to_dense(), old)


@pytest.mark.parametrize("pattern", CONFIGS)
def test_adapters_are_saved_and_loaded(pattern, tmp_path):
    model = adapted(pattern, init_lora_weights=False).eval()
    expected = model(X)
    model.save_pretrained(tmp_path)
    base = sparsify_(Net(), CONFIGS[pattern])
    options = lora_config(r=4, target_modules=["up", "down"])
    again = peft.PeftModel.from_pretrained(base, tmp_path, config=options).eval()
    torch.testing.assert_close(again(X), expected)
    assert not torch.allclose(base.up.base_layer(X), again.base_model.model.up(X))


def test_adapters_of_a_model_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(config)
    sparsify_(model, SparseConfig(0.5, block=32, join_gate_up=False)).save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    options = lora_config(r=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, options)
    tokens = torch.arange(12).reshape(2, 6)
    model(tokens, labels=tokens).loss.backward()
    gradients = [name for name, part in model.named_parameters() if part.grad is not None]
    assert len(gradients) == 4 and all("lora_" in name for name in gradients)
    assert model.generate(input_ids=tokens, max_new_tokens=2, pad_token_id=0).shape == (2, 8)


def test_merging_is_refused():
    model = adapted("2:4")
    with pytest.raises(ValueError, match="merge: the layer must be dense, got a pruned one"):
        model.merge_adapter()


def test_layers_with_an_activation_are_refused():
    layer = SparseLinear.from_linear(nn.Linear(64, 64), sparsity=0.5, block=16, activation="relu")
    with pytest.raises(ValueError, match="must be layers without an activation of their own, got"):
        peft.get_peft_model(nn.Sequential(layer), lora_config(r=2, target_modules=["0"]))


def test_dora_is_refused():
    with pytest.raises(ValueError, match="use_dora must be False, got True"):
        adapted("2:4", use_dora=True)

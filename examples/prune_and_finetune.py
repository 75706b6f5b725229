"""Prune a small transformer to 80 % in blocks while it trains, on a GPU if there is one.

python examples/prune_and_finetune.py

The model learns to continue sequences that count up modulo the vocabulary. It is trained dense,
then pruned on the cubic schedule of Zhu and Gupta: most blocks go early, the last ones slowly, and
training goes on in between. The optimiser holds state for kept weights only. At the end gradients
are compared with those of a masked dense layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsetile.nn import SparseConfig, SparseLinear, sparsify_

VOCABULARY, WIDTH, INNER, HEADS, LENGTH = 32, 64, 256, 4, 16
TARGET, BLOCK = 0.8, 16
DENSE_STEPS, PRUNING_STEPS, LAST_STEPS, EVERY = 40, 60, 30, 10


class Block(nn.Module):
    """Causal attention and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        met = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(met.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.mlp_norm(x))))


class Transformer(nn.Module):
    """Two blocks over token and position embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.blocks(self.tokens(tokens) + self.places(places)))


def batch(generator: torch.Generator, device: str) -> Tensor:
    """Sequences that count up by a step of their own."""
    first = torch.randint(VOCABULARY, (8, 1), generator=generator)
    step = torch.randint(1, 4, (8, 1), generator=generator)
    return ((first + step * torch.arange(LENGTH + 1)) % VOCABULARY).to(device)


def sparsity_at(share: float) -> float:
    """The cubic schedule: from 0 to ``TARGET`` as ``share`` goes from 0 to 1."""
    return TARGET * (1 - (1 - min(share, 1.0)) ** 3)


@dataclass(frozen=True)
class Outcome:
    """What was reached: losses after each stage, share of blocks dropped, bytes of the state."""

    dense_loss: float
    pruned_loss: float
    final_loss: float
    sparsity: float
    optimiser_bytes: int
    dense_optimiser_bytes: int
    gradient_error: float


def train(
    model: nn.Module, optimiser: torch.optim.Optimizer, steps: int, generator: torch.Generator
) -> float:
    """Train and return the mean loss of the last steps."""
    device = str(next(model.parameters()).device)
    losses = []
    for _ in range(steps):
        tokens = batch(generator, device)
        logits = model(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return sum(losses[-5:]) / len(losses[-5:])


def state_bytes(optimiser: torch.optim.Optimizer) -> int:
    """Bytes that the optimiser holds."""
    return sum(
        part.nbytes
        for state in optimiser.state.values()
        for part in state.values()
        if isinstance(part, Tensor)
    )


def gradient_error(layer: SparseLinear) -> float:
    """Largest difference from the gradients of a masked dense layer, over the largest gradient."""
    weight = layer.to_dense().detach().requires_grad_()
    mask = (SparseLinear.from_dense(layer.to_dense(), block=BLOCK).to_dense() != 0).to(weight.dtype)
    x = torch.randn(9, layer.in_features, device=weight.device)
    dense = functional.linear(x, weight * mask, layer.bias)
    (expected,) = torch.autograd.grad(dense.square().sum(), weight)
    (found,) = torch.autograd.grad(layer(x).square().sum(), layer.weight)
    kept = SparseLinear.from_dense(expected, mask=mask, block=BLOCK).weight
    return float((found - kept.detach()).abs().max() / kept.detach().abs().max())


def main() -> Outcome:
    """Train, prune, fine-tune; print a line for each stage."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Transformer().to(device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    dense_loss = train(model, optimiser, DENSE_STEPS, generator)
    dense_bytes = state_bytes(optimiser)
    print(f"dense: loss {dense_loss:.3f}, optimiser {dense_bytes / 1e3:.0f} kB")

    # All blocks are kept at first, so that nothing is lost; the schedule drops them.
    config = SparseConfig(sparsity=0.0, block=BLOCK)
    sparsify_(model, config, lambda module, name: name.startswith("blocks."))
    layers = [module for module in model.modules() if isinstance(module, SparseLinear)]
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(EVERY, PRUNING_STEPS + 1, EVERY):
        for layer in layers:
            layer.prune_(sparsity_at(step / PRUNING_STEPS), optimiser)
        pruned_loss = train(model, optimiser, EVERY, generator)
        print(f"{layers[0].sparsity:.0%} dropped: loss {pruned_loss:.3f}")

    final_loss = train(model, optimiser, LAST_STEPS, generator)
    kept = state_bytes(optimiser)
    error = gradient_error(layers[0])
    print(f"fine-tuned: loss {final_loss:.3f}, optimiser {kept / 1e3:.0f} kB")
    print(f"gradients differ from a masked dense layer's by {error:.1e}")
    return Outcome(
        dense_loss, pruned_loss, final_loss, layers[0].sparsity, kept, dense_bytes, error
    )


if __name__ == "__main__":
    main()

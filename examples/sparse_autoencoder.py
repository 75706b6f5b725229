"""A top-k sparse autoencoder: each token uses k of many features, others in every step.

python examples/sparse_autoencoder.py

The decoder multiplies a sparse matrix (tokens x features, k entries a row) by its weight. The
pattern is new in each step, so there is nothing to plan: ``sparsetile.functional.spmm`` takes the
arrays as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sparsetile import functional

FEATURES, WIDTH, K = 512, 64, 8
TOKENS = 1024


class TopKAutoencoder(nn.Module):
    """Encoder, the k largest activations of each token, decoder."""

    def __init__(self, width: int = WIDTH, features: int = FEATURES, k: int = K) -> None:
        super().__init__()
        self.k = k
        self.encoder = nn.Linear(width, features)
        # Encoder and decoder begin as transposes of each other, with rows of length one.
        rows = nn.functional.normalize(self.encoder.weight.detach().clone(), dim=1)
        self.decoder = nn.Parameter(rows)
        self.mean = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        values, columns = self.encoder(x - self.mean).topk(self.k, dim=-1)
        # Every row has k entries, so row pointers are multiples of k.
        indptr = torch.arange(0, columns.numel() + 1, self.k, device=x.device)
        code = torch.relu(values).flatten()
        return functional.spmm(indptr, columns.flatten(), code, self.decoder) + self.mean


def tokens_of(dictionary: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return sums of few vectors of a dictionary that the autoencoder does not know."""
    chosen = torch.randint(len(dictionary), (count, K // 2), generator=generator)
    scale = torch.rand(count, K // 2, 1, generator=generator) + 0.5
    return (dictionary[chosen] * scale).sum(1)


def main(steps: int = 400) -> float:
    """Train, and return the share of the variance that the reconstruction explains."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dictionary = nn.functional.normalize(torch.randn(128, WIDTH, generator=generator), dim=1)
    model = TopKAutoencoder().to(device)
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    explained = 0.0
    for step in range(steps + 1):
        x = tokens_of(dictionary, TOKENS, generator).to(device)
        loss = (model(x) - x).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 100 == 0:
            explained = 1 - loss.item() / x.var(0).mean().item()
            print(f"step {step}: loss {loss.item():.5f}, explained variance {explained:.3f}")
    return explained


if __name__ == "__main__":
    main()

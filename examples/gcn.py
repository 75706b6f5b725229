"""A two-layer graph convolution trained on a generated graph, on a GPU if there is one.

python examples/gcn.py
"""

from __future__ import annotations

import torch

import sparsetile as st
from sparsetile.data import generators


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    graph = generators.power_law(3000, 30000, seed=1)
    degree = graph.row_lengths().clamp(min=1).float()
    weights = (degree[graph.row_ids()] * degree[graph.indices.long()]).rsqrt()
    plan = st.plan(graph.with_values(weights).to(device), n=32)

    features = torch.randn(3000, 32, device=device)
    labels = (plan @ features).argmax(1) % 4
    first = torch.nn.Linear(32, 32, device=device)
    second = torch.nn.Linear(32, 4, device=device)
    optimiser = torch.optim.Adam([*first.parameters(), *second.parameters()], lr=0.01)
    for epoch in range(60):
        hidden = torch.relu(plan @ first(features))
        loss = torch.nn.functional.cross_entropy(plan @ second(hidden), labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if epoch % 20 == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}")
    print(f"done: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()

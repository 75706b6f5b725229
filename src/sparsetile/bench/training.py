"""One training run of a GCN, timed: the papers' networks with the product exchanged.

All runs of a setting start from the same weights, features and labels. The device is waited for
once, at the end: each epoch is timed by events on the device's stream, and what the host needed to
issue it by the clock.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sparsetile.bench.gnn_paths import Path, sparse_tensor
from sparsetile.core.timer import Samples
from sparsetile.intake import CSR

__all__ = ["CLASSES", "FEATURES", "LABELS", "SETTINGS", "Network", "Setting", "Trained", "train"]

FEATURES = 128
CLASSES = 16
# What is learnt: the classes that a GCN of random weights gives. Networks that learn random labels
# by heart drift apart whatever multiplies: sums that differ by 3e-7 end 1.6e-2 apart after 300
# epochs on PubMed, and 3e-4 with these labels.
LABELS = "teacher"
# Epochs that fill caches, plan the transpose and warm up a capture. They count in the total.
_WARM_EPOCHS = 3


@dataclass(frozen=True)
class Setting:
    """A network as a paper trains it."""

    layers: int
    hidden: int
    paper: str


SETTINGS: dict[str, Setting] = {
    "gcn2-256": Setting(2, 256, "Voltrix-SpMM"),
    "gcn2-128": Setting(2, 128, "BRP-SpMM"),
    "gcn6-64": Setting(6, 64, "RSH-SpMM"),
    "gcn6-256": Setting(6, 256, "RSH-SpMM"),
}


class Network(nn.Module):
    """A GCN over any product: linear map, product, bias, ReLU."""

    def __init__(self, setting: Setting, product: Callable[[Tensor, Tensor, bool], Tensor]) -> None:
        super().__init__()
        inner = [setting.hidden] * (setting.layers - 1)
        widths = [FEATURES, *inner, CLASSES]
        self.maps = nn.ModuleList(
            nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(widths)
        )
        self.biases = nn.ParameterList(torch.zeros(b) for b in widths[1:])
        self._product = product

    def forward(self, x: Tensor) -> Tensor:
        last = len(self.maps) - 1
        for number, (linear, bias) in enumerate(zip(self.maps, self.biases, strict=True)):
            x = self._product(linear(x), bias, number < last)
        return x


@dataclass(frozen=True)
class Trained:
    """What a run took. Bytes are those beyond matrix, features and labels; None on the host."""

    losses: list[float]
    prepare_seconds: float
    train_seconds: float
    step: Samples
    host: Samples
    peak_bytes: int | None
    graph_bytes: int | None
    choices: dict[str, Any]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _allocated(device: torch.device) -> int | None:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None


@contextlib.contextmanager
def _tf32(enabled: bool) -> Iterator[None]:
    """Let dense and sparse float32 products use TF32, or not, as torch's own setting says."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = enabled
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _taught(matrix: CSR, x: Tensor, weights: Tensor) -> Tensor:
    """Return the classes that two products and these weights give, in float64."""
    A = sparse_tensor(matrix, torch.float64)
    taught: Tensor = (A @ (A @ (x.double() @ weights.double()))).argmax(1)
    return taught


def train(
    path: Path,
    setting: Setting,
    matrix: CSR,
    epochs: int,
    *,
    reorder: str = "auto",
    seed: int = 0,
    tf32: bool = True,
) -> Trained:
    """Train and time one network.

    Parameters
    ----------
    path : Path
        The product.
    matrix : CSR
        The normalised A[target, source], on the device, values in the type of the products. In 16
        bits the rest of the network runs under autocast.
    epochs : int
        Full-batch steps of Adam.
    reorder : str
        Row order of sparsetile's plans.
    """
    device = matrix.device
    assert matrix.values is not None
    dtype = matrix.values.dtype
    generator = torch.Generator().manual_seed(seed)
    nodes = matrix.shape[0]
    x = torch.randn(nodes, FEATURES, generator=generator).to(device)
    labels = _taught(matrix, x, torch.randn(FEATURES, CLASSES, generator=generator).to(device))
    at_rest = 0
    if device.type == "cuda":
        gc.collect()  # what a run before this one left is not this one's
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        at_rest = torch.cuda.memory_allocated(device)
    path.load()
    with _tf32(tf32):
        _wait(device)
        before, begun = _allocated(device), time.perf_counter()
        prepared = path.prepare(matrix, setting.hidden, reorder)
        _wait(device)
        prepare_seconds = time.perf_counter() - begun
        after = _allocated(device)
        torch.manual_seed(seed)
        network = Network(setting, prepared.product).to(device)
        optimiser = torch.optim.Adam(network.parameters(), lr=0.01, capturable=path.captured)
        # Casts of weights that autocast keeps would belong to the capture's memory.
        cast = torch.autocast(
            device.type, dtype=dtype if dtype.itemsize == 2 else None,
            enabled=dtype.itemsize == 2, cache_enabled=not path.captured,
        )  # fmt: skip

        def step() -> Tensor:
            optimiser.zero_grad(set_to_none=True)
            with cast:
                out = network(x)
            loss = cross_entropy(out.float(), labels)
            loss.backward()
            optimiser.step()
            return loss.detach()

        losses = torch.zeros(epochs, device=device)
        clock = _Clock(device, epochs)
        _wait(device)
        begun = time.perf_counter()
        run = _captured(step, losses, clock) if path.captured else step
        for epoch in range(min(_WARM_EPOCHS, epochs) if path.captured else 0, epochs):
            with clock.epoch():
                losses[epoch] = run()
        _wait(device)
        train_seconds = time.perf_counter() - begun
    return Trained(
        losses=losses.tolist(),
        prepare_seconds=prepare_seconds,
        train_seconds=train_seconds,
        step=clock.steps(),
        host=clock.host(),
        peak_bytes=(
            torch.cuda.max_memory_allocated(device) - at_rest if device.type == "cuda" else None
        ),
        graph_bytes=None if before is None or after is None else after - before,
        choices=dict(prepared.choices),
    )


def _captured(step: Callable[[], Tensor], losses: Tensor, clock: _Clock) -> Callable[[], Tensor]:
    """Run the first epochs on a side stream, capture one more, and return its replay."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for epoch in range(min(_WARM_EPOCHS, losses.numel())):
            with clock.epoch():
                losses[epoch] = step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    def replay() -> Tensor:
        graph.replay()
        return loss

    return replay


class _Clock:
    """Times of epochs: on the device by events, on the host by the clock."""

    def __init__(self, device: torch.device, epochs: int) -> None:
        self._cuda = device.type == "cuda"
        self._host: list[float] = []
        self._events: list[tuple[Any, Any]] = []
        self._skip = min(_WARM_EPOCHS, epochs - 1)

    @contextlib.contextmanager
    def epoch(self) -> Iterator[None]:
        if self._cuda:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
        begun = time.perf_counter()
        yield
        self._host.append(time.perf_counter() - begun)
        if self._cuda:
            end.record()
            self._events.append((start, end))

    def host(self) -> Samples:
        return Samples(self._host[self._skip :], "clock", 1)

    def steps(self) -> Samples:
        """Seconds of each epoch after the first ones; the device must have finished."""
        if not self._cuda:
            return self.host()
        seconds = [start.elapsed_time(end) / 1e3 for start, end in self._events]
        return Samples(seconds[self._skip :], "events", 1)

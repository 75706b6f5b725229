"""Trains a GCN with PyG's products and with sparsetile's, and times it.

All runs of a network start from the same weights, features and labels, with the same normalised
matrix. Only the product differs, so losses must agree epoch by epoch. One path omits the products
to time the rest of a step, which in eager mode is mostly host time.

The host synchronises once, at the end: each epoch is timed by events on the device's stream, and
its host time by the clock.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sparsetile.core.epoch import changed
from sparsetile.core.timer import Samples
from sparsetile.formats.values import round_tf32
from sparsetile.intake import CSR
from sparsetile.plan.planner import build_plan

FEATURES = 128
CLASSES = 16
# The labels are the classes that a GCN of random weights gives. With random labels, runs drift
# apart: sums that differ by 3e-7 give losses 1.6e-2 apart after 300 epochs on PubMed, and 3e-4
# apart with these labels.
LABELS = "teacher"
# Epochs that fill caches, plan the transpose and warm up a capture. They count in the total.
_WARM_EPOCHS = 3
# Messages may take this share of a GPU's memory, since a network needs several at once, or this
# many bytes on a CPU.
_MESSAGE_SHARE, _MESSAGE_BYTES = 0.25, 8 * 2**30

# A layer's end: product of x, plus a bias, through ReLU or not.
Product = Callable[[Tensor, Tensor, bool], Tensor]


@dataclass(frozen=True)
class Prepared:
    """A product ready to train with, and what was chosen for it."""

    product: Product
    choices: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Path:
    """A method to multiply."""

    # Called with A[target, source] in the type of x, the width of x and a row order: does all work
    # that is done once per graph.
    prepare: Callable[[CSR, int, str], Prepared]
    kind: str = "baseline"
    # Called with the matrix and the width: why this path cannot run here, or None. Imports what the
    # path needs, so that imports are not timed as planning.
    missing: Callable[[CSR, int], str | None] = lambda matrix, width: None
    captured: bool = False  # whether the whole training step is captured into one CUDA graph


def _apart(multiply: Callable[[Tensor], Tensor]) -> Prepared:
    """Bias and ReLU as separate torch operations."""

    def product(x: Tensor, bias: Tensor, relu: bool) -> Tensor:
        out = multiply(x) + bias.to(x.dtype)
        return out.relu() if relu else out

    return Prepared(product)


def _sparse_tensor(matrix: CSR, dtype: torch.dtype | None = None) -> Tensor:
    """Return the matrix as a torch CSR tensor, in another dtype if one is given."""
    assert matrix.values is not None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        return torch.sparse_csr_tensor(
            matrix.indptr, matrix.indices.long(), matrix.values.to(dtype or matrix.values.dtype),
            matrix.shape, check_invariants=False,
        )  # fmt: skip


def _without_pyg(matrix: CSR, width: int) -> str | None:
    try:
        import torch_geometric.utils  # noqa: F401
    except ImportError:
        return "torch-geometric is not installed"
    return None


def _pyg_sparse(matrix: CSR, width: int, reorder: str) -> Prepared:
    """PyG's ``spmm`` of a torch sparse tensor ``adj_t``: cuSPARSE on a GPU."""
    from torch_geometric.utils import spmm

    adj_t = _sparse_tensor(matrix)
    return _apart(lambda x: spmm(adj_t, x))


def _pyg_rounded(matrix: CSR, width: int, reorder: str) -> Prepared:
    """The same with operands rounded to TF32, forward and backward.

    Its losses differ from those of ``pyg-sparse`` by the effect of rounding on this network.
    """
    from torch_geometric.utils import spmm

    assert matrix.values is not None
    adj_t = _sparse_tensor(matrix.with_values(round_tf32(matrix.values)))

    def multiply(x: Tensor) -> Tensor:
        # The rounded value, with the gradient of x: the difference is exact in float32.
        rounded = x + (round_tf32(x.detach().contiguous()) - x).detach()
        out = spmm(adj_t, rounded)
        if out.requires_grad:
            out.register_hook(lambda grad: round_tf32(grad.contiguous()))
        return out

    return _apart(multiply)


def _not_float32(matrix: CSR, width: int) -> str | None:
    if matrix.values is None or matrix.values.dtype is not torch.float32:
        return "TF32 is a precision of float32"
    return _without_pyg(matrix, width)


@functools.cache
def _message_passing() -> Any:
    """A layer of message passing; its class is made once, as PyG generates code for each."""
    from torch_geometric.nn import MessagePassing

    class Aggregate(MessagePassing):  # type: ignore[misc]
        def forward(self, x: Tensor, edges: Tensor, weight: Tensor, size: tuple[int, int]) -> Any:
            return self.propagate(edges, x=(x, None), weight=weight, size=size)

        def message(self, x_j: Tensor, weight: Tensor) -> Tensor:
            return x_j * weight.unsqueeze(-1)

    return Aggregate(aggr="sum")


def _large_messages(matrix: CSR, width: int) -> str | None:
    absent = _without_pyg(matrix, width)
    if absent is not None:
        return absent
    size, limit = 4 * matrix.nnz * width, _MESSAGE_BYTES
    if matrix.device.type == "cuda":
        memory = torch.cuda.get_device_properties(matrix.device).total_memory
        limit = int(_MESSAGE_SHARE * memory)
    if size > limit:
        return f"messages of a layer take {size / 2**30:.0f} GiB, over {limit / 2**30:.0f}"
    _message_passing()
    return None


def _pyg_edges(matrix: CSR, width: int, reorder: str) -> Prepared:
    """PyG's default: a message per edge, gathered and scattered."""
    layer = _message_passing()
    edges = torch.stack([matrix.indices.long(), matrix.row_ids()])
    size = (matrix.shape[1], matrix.shape[0])
    return _apart(lambda x: layer(x, edges, matrix.values, size))


def _torch_sparse(matrix: CSR, width: int, reorder: str) -> Prepared:
    """torch's product of a sparse CSR tensor, which needs no PyG."""
    A = _sparse_tensor(matrix)
    return _apart(lambda x: A @ x)


def _sparsetile(
    matrix: CSR, width: int, reorder: str, fused: bool = False, system: str = "auto",
    ablation: str | None = None,
) -> Prepared:  # fmt: skip
    """A plan instead of ``adj_t``; fused: with bias and ReLU in the product's kernel."""
    assert matrix.values is not None
    made = build_plan(
        matrix, width, dtype=matrix.values.dtype, reorder=reorder, system=system, ablation=ablation
    )
    info = made.info
    choices = {"system": made.system, "seconds": info["seconds"], "bytes": info["format_bytes"]}
    if not fused:
        return Prepared(_apart(made.run).product, choices)
    return Prepared(lambda x, bias, relu: made.run(x, bias=bias, relu=relu), choices)


_fused = functools.partial(_sparsetile, fused=True)


def _no_gpu(matrix: CSR, width: int) -> str | None:
    return None if matrix.device.type == "cuda" else "this system needs a GPU"


def _backend(system: str, ablation: str | None = None) -> Path:
    """A plan of one system, so that the papers' systems train the same network."""
    prepare = functools.partial(_fused, system=system, ablation=ablation)
    return Path(prepare, "system", missing=_no_gpu)


# One system each: the five papers', and csr beside them. By default brp runs as csr; 1x4 are the
# paper's groups.
BACKENDS: dict[str, Path] = {
    "sparsetile-csr": _backend("csr"),
    "sparsetile-acc": _backend("acc"),
    "sparsetile-rsh": _backend("rsh"),
    "sparsetile-brp": _backend("brp"),
    "sparsetile-brp-1x4": _backend("brp", "1x4"),
    "sparsetile-voltrix": _backend("voltrix"),
    "sparsetile-wcsr": _backend("wcsr"),
}
_WITHOUT_PYG = "torch-sparse"

# The others' losses are compared with those of the first: PyG's, or torch's where there is no PyG.
PATHS: dict[str, Path] = {
    "pyg-sparse": Path(_pyg_sparse, missing=_without_pyg),
    "pyg-rounded": Path(_pyg_rounded, "control", _not_float32),
    "pyg-edges": Path(_pyg_edges, missing=_large_messages),
    _WITHOUT_PYG: Path(_torch_sparse),
    "sparsetile": Path(_sparsetile, "system"),
    "sparsetile-fused": Path(_fused, "system"),
    "sparsetile-cudagraph": Path(
        _fused, "system", captured=True,
        missing=lambda matrix, width: (
            None if matrix.device.type == "cuda" else "CUDA graphs need a GPU"
        ),
    ),
    "no-product": Path(lambda matrix, width, reorder: _apart(lambda x: x), "bound"),
    **BACKENDS,
}  # fmt: skip
# What is trained if no path is named.
DEFAULT_PATHS = tuple(name for name in PATHS if name not in (_WITHOUT_PYG, *BACKENDS))


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

    def __init__(self, setting: Setting, product: Product) -> None:
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
    """The cost of a run. Bytes exclude matrix, features and labels; None on a CPU."""

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


@contextlib.contextmanager
def _tf32() -> Iterator[None]:
    """Let dense and sparse float32 products use TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _taught(matrix: CSR, x: Tensor, weights: Tensor) -> Tensor:
    """Return the classes that two products and these weights give, in float64."""
    A = _sparse_tensor(matrix, torch.float64)
    taught: Tensor = (A @ (A @ (x.double() @ weights.double()))).argmax(1)
    return taught


def train(
    path: Path, setting: Setting, matrix: CSR, epochs: int, *, reorder: str = "auto"
) -> Trained:
    """Train a network by full-batch steps of Adam, with TF32 allowed, and time it.

    ``matrix`` is the normalised A[target, source] on the device, its values in the type of the
    products. In 16 bits the rest of the network runs under autocast.
    """
    device = matrix.device
    assert matrix.values is not None
    dtype = matrix.values.dtype
    generator = torch.Generator().manual_seed(0)
    nodes = matrix.shape[0]
    x = torch.randn(nodes, FEATURES, generator=generator).to(device)
    labels = _taught(matrix, x, torch.randn(FEATURES, CLASSES, generator=generator).to(device))
    at_rest, on_gpu = 0, device.type == "cuda"
    if on_gpu:
        gc.collect()  # memory of earlier runs does not count
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        at_rest = torch.cuda.memory_allocated(device)
    with _tf32():
        _wait(device)
        begun = time.perf_counter()
        prepared = path.prepare(matrix, setting.hidden, reorder)
        _wait(device)
        prepare_seconds = time.perf_counter() - begun
        graph_bytes = torch.cuda.memory_allocated(device) - at_rest if on_gpu else None
        torch.manual_seed(0)
        network = Network(setting, prepared.product).to(device)
        optimiser = torch.optim.Adam(network.parameters(), lr=0.01, capturable=path.captured)
        # autocast's cache of cast weights would be in the capture's memory.
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
        peak_bytes=torch.cuda.max_memory_allocated(device) - at_rest if on_gpu else None,
        graph_bytes=graph_bytes,
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
        changed()  # torch does not count the writes of a replay
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

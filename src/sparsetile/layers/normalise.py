"""GCN's normalisation: values of a matrix divided by the square roots of its row sums.

    d[r] = sum of v over row r        y[e] = d[row]^-1/2 · v[e] · d[column]^-1/2

On a GPU these are two launches of ``normalise.cu``, and two for the gradient, without host
synchronisation; only the results and one number per row are allocated. On the CPU, for second
derivatives and under transforms, torch's operations compute them (:func:`torch_values`, which is
also the reference). Both are deterministic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparsetile.core.device import processors
from sparsetile.intake.csr import CSR
from sparsetile.jit.loader import (
    current_stream_handle,
    device_index,
    ensure_cuda_context,
    on_device,
)
from sparsetile.kernels import normalise as kernels
from sparsetile.kernels.csr import ELEMENTS
from sparsetile.plan.modes import plain_call

__all__ = ["WeightMap", "normalised_values", "scaled_by_degree", "torch_values"]

_MAX_COUNT = 2**31  # the kernel numbers entries and weights with 32 bits
# Thread blocks per SM. The grid has one size for all graphs, so its launch is prepared once.
_BLOCKS = 8

_FIELDS = [field.name for field in kernels.NORMALISE.params.fields]
_launches: dict[tuple[int, torch.dtype, int], Callable[..., None]] = {}


class WeightMap:
    """The weight of each entry of a square matrix. Made once per pattern, read by all calls.

    ``csr.entry_map`` maps edges to entries; parallel edges are summed. ``numbers`` has the number
    of each edge's weight, each at most once; -1 for an edge that was added, whose weight is
    ``fill``. None if edge k has weight k.
    """

    def __init__(self, csr: CSR, numbers: Tensor | None = None) -> None:
        self.csr = csr
        entry_map = csr.entry_map
        self.parallel = entry_map is not None and entry_map.numel() > csr.nnz
        self._numbers = numbers
        self._sources = numbers  # weight of each entry, if edges are not parallel
        if entry_map is not None and not self.parallel:
            if numbers is None:
                numbers = torch.arange(len(entry_map), device=entry_map.device)
            self._sources = torch.empty_like(entry_map)
            self._sources[entry_map] = numbers
        self._short = None if self._sources is None or self.parallel else self._sources.int()
        self._by_column: tuple[Tensor, Tensor] | None = None
        self._rows: Tensor | None = None
        # Parallel edges are summed first; entry k has sum k.
        self.of_sums = self
        if self.parallel:
            plain = CSR(csr.indptr, csr.indices, None, csr.shape, checked=csr.checked)
            self.of_sums = WeightMap(plain)

    @property
    def rows(self) -> Tensor:
        """The row of each entry; kept on the CPU, where torch's operations read it each time."""
        if self._rows is not None:
            return self._rows
        made = self.csr.row_ids()
        if made.device.type == "cpu" and not torch.is_inference_mode_enabled():
            self._rows = made
        return made

    @property
    def tensors(self) -> list[Tensor]:
        """Its tensors other than the matrix."""
        by_column = self.of_sums._by_column or ()
        found = [self._numbers, self._sources, self._short, *by_column]
        return [each for each in found if each is not None]

    @property
    def differentiable(self) -> bool:
        """Whether :meth:`prepare_gradients` was called."""
        return self.of_sums._by_column is not None

    def prepare_gradients(self) -> tuple[Tensor, Tensor]:
        """Return, and keep, where each column begins and the entries by column.

        Gradients call it. A caller whose streams share the map calls it before, and synchronises.
        """
        if self.parallel:
            return self.of_sums.prepare_gradients()
        if self._by_column is None:
            counts = torch.bincount(self.csr.indices, minlength=self.csr.shape[1])
            ptr = torch.zeros(counts.numel() + 1, dtype=torch.int64, device=counts.device)
            torch.cumsum(counts, 0, out=ptr[1:])
            self._by_column = ptr, self.csr.transpose_order().int()
        return self._by_column

    def entries(self, weight: Tensor, fill: float) -> Tensor:
        """Return one value per entry by torch's operations. Differentiable."""
        if self.parallel:
            return self.csr.canonical_values(_picked(weight, self._numbers, fill))
        return _picked(weight, self._sources, fill)


def _picked(weight: Tensor, numbers: Tensor | None, fill: float) -> Tensor:
    """``weight[numbers]``, ``fill`` for a number of -1."""
    if numbers is None:
        return weight
    if not weight.numel():
        return weight.new_full(numbers.shape, fill) + weight.sum()  # 0, and differentiable
    return torch.where(numbers < 0, fill, weight.index_select(0, numbers.clamp(min=0)))


def torch_values(weight_map: WeightMap, weight: Tensor, fill: float) -> Tensor:
    """As :func:`normalised_values`, in the weights' own type, by torch's operations.

    Differentiable any number of times, also by torch.func.
    """
    rows = weight_map.rows if plain_call() else None
    return scaled_by_degree(weight_map.csr, weight_map.entries(weight, fill), rows)


def scaled_by_degree(csr: CSR, values: Tensor, rows: Tensor | None = None) -> Tensor:
    """Return each value over the square roots of its row's and its column's sum of values.

    ``rows`` are those of the entries, if they are known.
    """
    rows = csr.row_ids() if rows is None else rows
    degree = csr.row_sums(values, rows)
    # Nodes without incoming weight are scaled by 0. The inner torch.where keeps gradients finite.
    empty = degree == 0
    scale = torch.where(empty, 0.0, torch.where(empty, 1.0, degree).pow(-0.5))
    return scale.index_select(0, rows) * values * scale.index_select(0, csr.indices)


def normalised_values(
    weight_map: WeightMap, weight: Tensor, fill: float, dtype: torch.dtype, *, fused: bool = True
) -> Tensor:
    """Return the normalised value of each entry, of float32 or float64. Differentiable in weights.

    ``fill`` is the weight of edges that were added. ``fused``: whether kernels may be launched: no
    transform, mode or tracer is active.
    """
    if not (fused and _takes(weight_map.csr, weight)):
        return torch_values(weight_map, weight.to(dtype), fill)
    other = weight.dtype not in ELEMENTS or (weight.dtype is torch.float64) != (
        dtype is torch.float64
    )
    if other or weight_map.parallel:
        weight = weight.to(dtype)
    if weight_map.parallel:
        weight_map, weight = weight_map.of_sums, weight_map.entries(weight, fill)
    weight = weight.contiguous()
    if torch.is_grad_enabled() and weight.requires_grad:
        return _Normalise.apply(weight, weight_map, fill)  # type: ignore[no-any-return]
    return _forward(weight_map, weight, fill)[0]


def _takes(csr: CSR, weight: Tensor) -> bool:
    counts = (csr.nnz, csr.shape[0], weight.numel())
    return weight.is_cuda and csr.nnz > 0 and max(counts) < _MAX_COUNT


def _launch(
    stage: int, weight_map: WeightMap, weight: Tensor, fill: float, **places: Tensor
) -> None:
    """Launch one stage of the kernel, with the results of those before it."""
    device = device_index(weight.device)
    csr, short = weight_map.csr, weight_map._short
    fields: dict[str, Any] = {name: tensor.data_ptr() for name, tensor in places.items()}
    fields |= {
        "indptr": csr.indptr.data_ptr(), "columns": csr.indices.data_ptr(),
        "sources": 0 if short is None else short.data_ptr(), "weights": weight.data_ptr(),
        "fill": fill, "rows": csr.shape[0],
    }  # fmt: skip
    with on_device(device):
        ensure_cuda_context(device)
        launch = _launches.get((device, weight.dtype, stage))
        if launch is None:
            spec, threads = kernels.NORMALISE, kernels.NORMALISE_THREADS
            kernel = spec.load(kernels.normalise_config(weight.dtype, stage), device)
            grid = (processors(torch.device("cuda", device)) * _BLOCKS, 1, 1)
            launch = kernel.prepare(grid, threads, spec.params.zeros, _FIELDS).launch
            _launches[device, weight.dtype, stage] = launch
        launch(current_stream_handle(device), *(fields.get(name, 0) for name in _FIELDS))


def _forward(weight_map: WeightMap, weight: Tensor, fill: float) -> tuple[Tensor, Tensor]:
    """Return the values and the rows' scales."""
    csr = weight_map.csr
    sums = torch.promote_types(weight.dtype, torch.float32)
    scales = weight.new_empty(csr.shape[0], dtype=sums)
    values = weight.new_empty(csr.nnz, dtype=sums)
    _launch(kernels.SCALES, weight_map, weight, fill, scales=scales)
    _launch(kernels.VALUES, weight_map, weight, fill, scales=scales, values=values)
    return values, scales


class _Normalise(torch.autograd.Function):
    """Both launches, and those of the gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, weight_map: WeightMap, fill: float) -> Tensor:
        values, scales = _forward(weight_map, weight, fill)
        weight_map.prepare_gradients()
        ctx.save_for_backward(weight, values, scales)
        ctx.weight_map, ctx.fill = weight_map, fill
        return values

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        weight, values, scales = ctx.saved_tensors
        weight_map, fill = ctx.weight_map, ctx.fill
        if torch.is_grad_enabled():  # the gradient is to be differentiated itself
            again = torch_values(weight_map, weight.to(values.dtype), fill)
            return (*torch.autograd.grad(again, weight, grad, create_graph=True), None, None)
        ptr, order = weight_map.prepare_gradients()
        grad = grad.contiguous()
        pulls, made = torch.empty_like(scales), torch.zeros_like(weight)
        places = {"scales": scales, "values": values, "grad": grad, "pulls": pulls}
        _launch(kernels.PULLS, weight_map, weight, fill, **places, column_ptr=ptr, order=order)
        _launch(kernels.GRADIENT, weight_map, weight, fill, **places, grad_weights=made)
        return made, None, None

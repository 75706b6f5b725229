"""A linear layer with a block-sparse weight: Y = activation(X·Wᵀ + bias), and how it is computed.

There is no CSR: the blocks are the weight (formats/block_pattern.py). The methods are those of
``block_layer_cost.py``:

    few      up to 16 tokens: linear_few.cu, sm_80 on
    blocks   any number: spmm_bcsr.cu (WGMMA), blocks of 64, sm_90a
    mma      any number: linear_blocks.cu (mma.sync), blocks of 16, 32 or 64, sm_80 on
    dense    the weight written out, torch's own product

``mma`` is offered if ``blocks`` is not. ``dense`` needs a dense copy of the weight. If the caller
has none and no kernel supports the call, the copy is made for the call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sparsetile.core.device import capability, machine
from sparsetile.formats.block_pattern import dense_of_blocks
from sparsetile.formats.values import round_tf32
from sparsetile.jit.loader import (
    current_device,
    current_stream_handle,
    ensure_cuda_context,
    on_device,
)
from sparsetile.kernels.bcsr import BLOCK, PRODUCT, STORE_COLUMNS
from sparsetile.kernels.linear_few import EIGHT_UNIT, FEW_TOKENS
from sparsetile.launch.epilogue import readable
from sparsetile.launch.geometry import ACCESS_BYTES, aligned
from sparsetile.launch.interface import Epilogue
from sparsetile.launch.kept import KeptLaunches, Kind, kind_of
from sparsetile.layers.block_layer_cost import LayerSize, choose_method
from sparsetile.systems.bcsr.few import FewTokens
from sparsetile.systems.bcsr.layer_blocks import LayerBlocks
from sparsetile.systems.bcsr.runner import BCSRRunner

__all__ = ["ACTIVATIONS", "BlockLayer", "BoundLayer", "activate", "work_of"]

# ``swiglu``: silu of the first half of the outputs times the second half.
ACTIVATIONS = ("none", "relu", "silu", "swiglu")
_HOPPER = (9, 0)
_SIXTEEN_BITS = (torch.bfloat16, torch.float16)
_Lists = tuple[Tensor, Tensor, Tensor]  # row_ptr, col_idx, work


def activate(Y: Tensor, activation: str) -> Tensor:
    """Apply an activation in torch."""
    if activation == "relu":
        return torch.relu(Y)
    if activation == "swiglu":
        gate, up = Y.chunk(2, -1)
        return functional.silu(gate) * up
    return functional.silu(Y) if activation == "silu" else Y


class BlockLayer:
    """One direction of a layer: the weight, or its transpose for the input's gradient."""

    def __init__(self, size: LayerSize) -> None:
        self.size = size
        self._able: dict[Any, tuple[str, ...]] = {}
        self.few = FewTokens(size.rows, size.cols, size.blocks, size.unit)
        self.mma = LayerBlocks(size.rows, size.cols, size.unit)
        self.runner = self._runner(size.rows, False) if size.unit == BLOCK else None

    def _runner(self, rows: int, paired: bool) -> BCSRRunner:
        size = self.size
        meta: Mapping[str, Any] = {
            "rows": rows, "cols": size.cols, "nnz": size.cells, "blocks": size.blocks,
            "tensors": ["work", "block_col_idx", "order", "indptr"],
            "step": PRODUCT, "columns": None, "paired": paired,
        }  # fmt: skip
        return BCSRRunner(meta, None)

    @functools.cached_property
    def _pair(self) -> FewTokens:
        size = self.size
        return FewTokens(size.rows, size.cols, size.blocks, size.unit, paired=True)

    @functools.cached_property
    def _pair_runner(self) -> BCSRRunner:
        return self._runner(self.size.rows // 2, True)

    @functools.cached_property
    def _pair_mma(self) -> LayerBlocks:
        return LayerBlocks(self.size.rows, self.size.cols, self.size.unit, paired=True)

    def mma_for(self, activation: str, dtype: torch.dtype) -> LayerBlocks:
        """As :meth:`runner_for`, for ``mma``."""
        joins = activation == "swiglu" and dtype in _SIXTEEN_BITS
        return self._pair_mma if joins else self.mma

    def few_for(self, activation: str) -> FewTokens:
        """Return the kernel of few tokens; for a SwiGLU, the one that joins both halves."""
        return self._pair if activation == "swiglu" else self.few

    def runner_for(self, activation: str, dtype: torch.dtype) -> BCSRRunner | None:
        """Return the kernel of any number of tokens; for a SwiGLU in 16 bits it joins both halves.

        None if blocks are not of its size.
        """
        if activation != "swiglu" or dtype not in _SIXTEEN_BITS or self.runner is None:
            return self.runner
        return self._pair_runner

    def reasons(self, dtype: torch.dtype, device: torch.device) -> list[str]:
        """Return why no kernel runs for any number of tokens; empty if one does."""
        return self.mma.reasons(dtype, device) if self._wgmma_reasons(dtype, device) else []

    def _wgmma_reasons(self, dtype: torch.dtype, device: torch.device) -> list[str]:
        """Return why ``blocks`` cannot run; empty if it can."""
        found = []
        if self.runner is None:
            found.append(f"multiplies blocks of {BLOCK}, not {self.size.unit}")
        if dtype is torch.float32:
            if not torch.backends.cuda.matmul.allow_tf32:
                found.append(
                    "rounds float32 to TF32, which torch does not allow now: set "
                    "torch.backends.cuda.matmul.allow_tf32 = True"
                )
        elif dtype not in _SIXTEEN_BITS:
            found.append(f"takes 16 bits and TF32, not {str(dtype).removeprefix('torch.')}")
        if device.type != "cuda" or capability(device) != _HOPPER:
            found.append("needs a Hopper GPU (sm_90a)")
        return found

    def methods(self, tokens: int, dtype: torch.dtype, device: torch.device) -> tuple[str, ...]:
        """Return the methods whose kernels support this number of tokens."""
        key = (dtype, device, torch.backends.cuda.matmul.allow_tf32)
        if key not in self._able:
            found = []
            if not self._wgmma_reasons(dtype, device):
                found.append("blocks")
            elif not self.mma.reasons(dtype, device):
                found.append("mma")
            if not self.few.reasons(dtype, device):
                found.append("few")
            self._able[key] = tuple(found)
        able = self._able[key]
        return able if tokens <= FEW_TOKENS else tuple(each for each in able if each != "few")

    def method(
        self, tokens: int, dtype: torch.dtype, device: torch.device, bias: bool, dense: bool
    ) -> str:
        """Return the method that is predicted to be fastest.

        ``dense``: whether a dense copy of the weight may be used. It is, anyway, if no kernel runs.
        """
        offered = self.methods(tokens, dtype, device)
        if dense or not offered:
            offered = (*offered, "dense")
        if len(offered) == 1:
            return offered[0]
        return choose_method(self.size, tokens, dtype.itemsize, bias, offered, machine(device))

    def run(
        self, lists: _Lists, blocks: Tensor, X: Tensor, bias: Tensor | None,
        dense: Tensor | None = None, activation: str = "none",
    ) -> Tensor:  # fmt: skip
        """Return activation(X·Wᵀ + bias) on a GPU, for X [tokens, columns] of any strides.

        ``dense`` is the same weight, if it may be used.
        """
        tokens, size = X.shape[0], self.size
        method = self.method(tokens, X.dtype, X.device, bias is not None, dense is not None)
        if method == "dense":
            if dense is None:
                dense = dense_of_blocks(blocks, lists[0], lists[1], (size.rows, size.cols))
            bias = None if bias is None else bias.to(X.dtype)
            return activate(functional.linear(X, dense, bias), activation)
        if not tokens or not size.rows:
            return activate(X.new_empty((tokens, size.rows)), activation)
        epilogue = Epilogue(row_bias=readable(bias), relu=activation == "relu")
        if not blocks.is_contiguous() or blocks.data_ptr() % ACCESS_BYTES:
            blocks = blocks.clone(memory_format=torch.contiguous_format)
        if method == "few":
            X = X if FewTokens.takes(X) else X.clone(memory_format=torch.contiguous_format)
            few = self.few_for(activation)
            Y = X.new_empty((tokens, few.rows))
            few.run(lists[:2], blocks, X, Y, epilogue, silu=activation == "silu")
            return Y
        if X.dtype is torch.float32:
            blocks = round_tf32(blocks)
        if method == "mma":
            X = X if LayerBlocks.takes(X) else X.clone(memory_format=torch.contiguous_format)
            mma = self.mma_for(activation, X.dtype)
            Y = X.new_empty((tokens, mma.rows))
            work = work_of(lists, activation, X.dtype)
            mma.run(work, lists[1], blocks, X, Y, epilogue, silu=activation == "silu")
            return activate(Y, activation) if activation == "swiglu" and mma is self.mma else Y
        runner = self.runner_for(activation, X.dtype)
        assert runner is not None  # `_wgmma_reasons` checks it
        Y = X.new_empty((tokens, runner.rows))
        tensors = _runner_tensors(lists, activation, X.dtype)
        runner.linear(tensors, blocks, X, Y, epilogue, activation == "silu")
        return activate(Y, activation) if activation == "swiglu" and runner is self.runner else Y


def work_of(lists: _Lists, activation: str, dtype: torch.dtype) -> Tensor:
    """Return the work items of ``spmm_bcsr`` and ``linear_blocks``: block rows, or pairs for a
    SwiGLU.

    A pair is a block row of the gate and the same one of up. Pairs with the most blocks come first.
    """
    row_ptr, _, work = lists
    if activation != "swiglu" or dtype not in _SIXTEEN_BITS:
        return work
    halves = torch.stack([row_ptr[:-1], row_ptr[1:] - row_ptr[:-1]], 1).view(2, -1, 2)
    order = torch.argsort(halves[:, :, 1].sum(0), descending=True, stable=True)
    label = order.to(halves.dtype).expand(2, -1)
    begin, length = halves[:, order].unbind(-1)
    items = torch.stack([label, begin, length, torch.zeros_like(label)], -1)
    return items.transpose(0, 1).reshape(-1, 4).to(torch.int32).contiguous()


def _runner_tensors(lists: _Lists, activation: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Name a pattern's lists as the runner does; it needs neither row order nor row pointers."""
    col_idx, work = lists[1], work_of(lists, activation, dtype)
    none = work.new_empty(0)
    return {"work": work, "block_col_idx": col_idx, "order": none, "indptr": none}


class BoundLayer:
    """A layer bound to its tensors, for inference: x [..., columns] -> Y with little host time.

    It keeps addresses: it sees what is written into the same memory; other tensors need another
    object. For 16 bits on a GPU, and a bias that kernels read as it is. With ``exponents``, blocks
    are FP8 with these powers of two as scales, x has type ``dtype``, and only ``few`` reads the
    blocks directly. ``dense``: whether the caller has a dense copy of the weight if that is
    predicted to be faster.
    """

    def __init__(
        self, layer: BlockLayer, lists: _Lists, blocks: Tensor, bias: Tensor | None,
        activation: str, dtype: torch.dtype | None = None, exponents: Tensor | None = None,
        dense: bool = False,
    ) -> None:  # fmt: skip
        self._layer, self._blocks = layer, blocks
        self.dtype, self.device = dtype or blocks.dtype, blocks.device
        self._exponents, self._dense = exponents, dense
        self._bias, self._activation = bias, activation
        self._lists = lists
        self._tensors = _runner_tensors(lists, activation, blocks.dtype)
        self._rows, self._cols = layer.size.rows, layer.size.cols
        self._index = blocks.device.index
        self._epilogue = Epilogue(row_bias=bias, relu=activation == "relu")
        # By shape, strides and alignment of x: the launch and the sizes of Y, or None.
        self._launches = KeptLaunches[Kind, tuple[Callable[..., None], tuple[int, ...]] | None]()
        self._methods = KeptLaunches[int, str]()

    def allow_dense(self, dense: bool) -> None:
        """Set whether the caller has a dense copy of the weight."""
        if dense is not self._dense:
            self._dense = dense
            self._methods.clear()
            self._launches.clear()

    def method(self, tokens: int) -> str:
        """Return the method for a number of tokens; the caller computes ``dense``."""
        found = self._methods.get(tokens)
        if found is None:
            blocks, bias = self._blocks, self._bias is not None
            found = self._layer.method(tokens, self.dtype, blocks.device, bias, self._dense)
            self._methods.keep(tokens, found)
        return found

    def __call__(self, x: Tensor) -> Tensor | None:
        """Multiply by a kernel of kept blocks; None if the caller must multiply."""
        pointer = x.data_ptr()
        key = kind_of(x, pointer)
        try:
            found = self._launches[key]
        except KeyError:
            if torch.jit.is_tracing():  # whose sizes are tensors
                return None
            found = self._bind(x)
            self._launches.keep(key, found)
        if found is None:
            return self._unbound(x)
        start, sizes = found
        Y = x.new_empty(*sizes)  # twice as fast as with a tuple
        index = self._index
        ensure_cuda_context(index)
        if current_device() == index:
            start(current_stream_handle(index), pointer, Y.data_ptr())
        else:
            with torch.cuda.device(index):
                start(current_stream_handle(index), pointer, Y.data_ptr())
        return Y

    def _unbound(self, x: Tensor) -> Tensor | None:
        """The same, with copies or other kernels."""
        if not x.dim() or x.shape[-1] != self._cols or self._exponents is not None:
            return None
        X = x.reshape(x.shape[:-1].numel(), self._cols)
        if self.method(X.shape[0]) == "dense":
            return None
        Y = self._layer.run(self._lists, self._blocks, X, self._bias, None, self._activation)
        return Y.view(*x.shape[:-1], Y.shape[-1])

    def _bind(self, x: Tensor) -> tuple[Callable[..., None], tuple[int, ...]] | None:
        """Return the launch for inputs like x and the sizes of its result.

        None if copies or other kernels are needed.
        """
        if not x.dim() or x.shape[-1] != self._cols or not x.numel() or not self._rows:
            return None
        X = x.reshape(x.shape[:-1].numel(), self._cols)
        if X.data_ptr() != x.data_ptr() or X.stride(1) != 1 or not aligned(X):
            return None  # tokens without a uniform stride are copied
        method, lead = self.method(X.shape[0]), tuple(x.shape[:-1])
        if method == "dense" or (self._exponents is not None and not self._takes_eight(X, method)):
            return None
        with on_device(self._index):
            ensure_cuda_context(self._index)
            silu = self._activation == "silu"
            if method == "few":
                few = self._layer.few_for(self._activation)
                prepared = few.prepare(
                    self._lists[:2], self._blocks, X, self._epilogue, silu, self._exponents
                )
                return prepared.launch, (*lead, few.rows)
            if method == "mma":
                mma = self._layer.mma_for(self._activation, X.dtype)
                work, col_idx = self._tensors["work"], self._tensors["block_col_idx"]
                prepared = mma.prepare(work, col_idx, self._blocks, X, self._epilogue, silu)
                return prepared.launch, (*lead, mma.rows)
            runner = self._layer.runner_for(self._activation, X.dtype)
            if runner is None or runner.rows % STORE_COLUMNS:
                return None
            launch = runner.prepare_blocks(self._tensors, self._blocks, X, self._epilogue, silu)
            return None if launch is None else (launch.launch, (*lead, runner.rows))

    def _takes_eight(self, X: Tensor, method: str) -> bool:
        """Whether the kernel converts FP8 blocks itself."""
        return method == "few" and self._blocks.shape[-1] == EIGHT_UNIT and FewTokens.takes(X)

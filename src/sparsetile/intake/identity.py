"""A cheap identity of a matrix's content, to notice in-place changes.

A tensor's *key* is its storage (a number that is never reused), its address, shape, strides and
dtype, and torch's count of writes (``_version``). Identity of each kind of input:

- Patterns given as tensors: the key.
- Values given as tensors: the key and the epoch of the last optimiser step that may have written to
  them (``core/epoch.py``), because fused optimisers do not raise the count. Trained values (a
  Parameter, or anything that requires a gradient) count as changed at every call.
- Tensors whose writes torch does not count (inference tensors, memory that torch did not allocate
  or that other processes write): the bytes are digested at every call.
- Sparse tensors: all parts share one counter, which cannot separate values from pattern and misses
  writes through the tensors that the matrix was built from. The pattern is therefore digested, once
  per count. On the CPU the values are digested at every call; on a GPU, where that would stop the
  stream, they count as changed at every call.
- numpy and scipy keep no count: the bytes are digested at every call.
- Files: path, modification time and size.

Not noticed: writes that bypass torch's counter (``.data``, ``.numpy()``, foreign kernels, replayed
CUDA graphs) into a tuple's tensors, until ``sparsetile.changed()`` is called for values; and writes
to the index tensors that a sparse tensor was built from.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
import zlib
from collections.abc import Hashable
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from sparsetile.core.checks import matrix_shape
from sparsetile.core.epoch import written
from sparsetile.intake.arrays import as_tensor
from sparsetile.intake.recognise import Kind, kind_of
from sparsetile.intake.torch_inputs import components
from sparsetile.intake.tuples import edge_parts, graph_parts, known_shape, plain_edges

__all__ = [
    "counter_tells", "edges_fingerprint", "fingerprint", "is_trained", "tensor_key",
    "values_key",
]  # fmt: skip

# Multipliers of splitmix64, as signed 64-bit numbers.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX = 0xBF58476D1CE4E5B9 - 2**64

# id of a storage -> (its number, weak reference). Addresses of freed memory and tensors are soon
# reused; these numbers never are. torch keeps one Python object per storage while the storage
# lives.
_Numbered: TypeAlias = tuple[int, weakref.ref[torch.UntypedStorage]]
_numbers: dict[int, _Numbered] = {}
_next_number, _numbering = itertools.count(), threading.Lock()
# torch has no public function for this.
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
# Sparse tensor -> (its counter, digest of its pattern then).
_patterns = WeakIdKeyDictionary()


def fingerprint(A: Any) -> tuple[Hashable, Hashable] | None:
    """Return ``(pattern_key, values_key)``: equal to an earlier one while the content is the same.

    A different key means that the content may have changed; a change of the values alone leaves
    ``pattern_key`` equal. Trained values, and those of a sparse tensor on a GPU, never equal an
    earlier reading: read them again (a copy on the GPU, without waiting). Keys hold no reference to
    the matrix, and another tensor at the same address never gets the same key. A is not validated.
    None if it cannot be identified, such as a missing file.
    """
    kind = kind_of(A)
    try:
        if kind is Kind.CSR:
            return (_key(A.indptr), _key(A.indices), A.shape), values_key(A.values)
        if kind is Kind.PATH:
            status = os.stat(A)
            place = (os.path.realpath(A), status.st_mtime_ns, status.st_size)
            return place, place
        if kind is Kind.TENSOR:
            return None if A.layout == torch.strided else _of_sparse_tensor(A)
        if kind is Kind.EDGE_INDEX or kind is Kind.EDGE_TUPLE or kind is Kind.GRAPH:
            parts = graph_parts("fingerprint", A) if kind is Kind.GRAPH else A
            edges, weight, shape = (A, None, None) if kind is Kind.EDGE_INDEX else edge_parts(parts)
            size = known_shape("fingerprint", edges, shape)
            return ("edges", _key(plain_edges(edges)), size), values_key(weight)
        if kind is Kind.CSR_TUPLE:
            size = matrix_shape("fingerprint", A[3])
            return ("csr", _key(A[0]), _key(A[1]), size), values_key(A[2])
        if kind is Kind.TORCH_SPARSE:
            rowptr, col, value = A.csr()
            pattern = ("csr", _key(rowptr), _key(col), tuple(A.sparse_sizes()))
            return pattern, values_key(value)
        if kind is Kind.SCIPY or kind is Kind.CUPYX:
            return _of_scipy(A)
    except (TypeError, ValueError, OSError, RuntimeError):
        return None  # reading A will raise the error
    return None


def _of_sparse_tensor(A: Tensor) -> tuple[Hashable, Hashable]:
    first, second, values = components(A)
    counted = not A.is_inference()
    stamp = counted and (tensor_key(first), tensor_key(second), A._version)
    remembered = _patterns.get(A)
    if counted and remembered is not None and remembered[0] == stamp:
        pattern = remembered[1]
    else:
        pattern = (str(A.layout), tuple(A.shape), _digest(first), _digest(second))
        _patterns[A] = (stamp, pattern)
    form = (values.dtype, tuple(values.shape[1:]))  # the block size is part of the pattern
    on_cpu = values.device.type == "cpu"
    return (pattern, form[1]), (form[0], _digest(values) if on_cpu else object())


def _of_scipy(A: Any) -> tuple[Hashable, Hashable]:
    if A.format in ("lil", "dok"):
        A = A.tocoo()
    parts = {"coo": ("row", "col"), "dia": ("offsets",)}.get(A.format, ("indptr", "indices"))
    pattern = tuple(_key(getattr(A, part)) for part in parts)
    if A.format == "dia":  # its zeros are not entries
        pattern += (_key(A.data != 0),)
    form = (A.format, tuple(A.shape), tuple(A.data.shape))
    return (form, pattern), _key(A.data)


def edges_fingerprint(
    edges: Tensor, weight: Tensor | None, shape: tuple[int, int], key: Hashable | None
) -> tuple[Hashable, Hashable]:
    """A quicker version for ``(edges, weight, shape)`` with checked types and sizes.

    ``key`` is the edges' :func:`tensor_key` if :func:`counter_tells` of their writes, else None.
    """
    pattern = _digest(edges) if key is None else key
    return ("edges", pattern, shape), None if weight is None else values_key(weight)


def is_trained(values: Any) -> bool:
    """Whether values must be read in every product: optimisers write to them.

    An argument of a torch.func transform counts as trained, too: it ends with the transform.
    """
    return isinstance(values, Tensor) and (
        isinstance(values, torch.nn.Parameter) or values.requires_grad or _is_wrapped(values)
    )


def values_key(values: Any) -> Hashable:
    """Return the identity of values, including writes that torch does not count."""
    if is_trained(values):
        return object()
    if isinstance(values, Tensor) and counter_tells(values):
        return tensor_key(values), written(values)
    return _key(values)


def _key(array: Any) -> Hashable:
    """Return the identity of one array's content."""
    if array is None:
        return None
    if isinstance(array, Tensor) and counter_tells(array):
        return tensor_key(array)
    return _digest(array if isinstance(array, np.ndarray) else as_tensor("fingerprint", "A", array))


def tensor_key(tensor: Tensor) -> Hashable:
    """Return the key of a tensor whose writes torch counts; see the module's docstring."""
    place = (_storage_number(tensor), tensor.data_ptr(), tensor._version)
    return place, tensor.shape, tensor.stride(), tensor.dtype


def _storage_number(tensor: Tensor) -> int:
    """Return the number of a tensor's storage, which is never reused."""
    storage = tensor.untyped_storage()
    address = id(storage)
    known = _numbers.get(address)
    if known is None or known[1]() is not storage:
        known = _give_number(storage, address)
    return known[0]


def _give_number(storage: torch.UntypedStorage, address: int) -> _Numbered:
    """Number a storage; threads that ask at once get the same number."""

    def forget(end: weakref.ref[torch.UntypedStorage]) -> None:
        if address in _numbers and _numbers[address][1] is end:
            del _numbers[address]

    with _numbering:
        known = _numbers.get(address)
        if known is None or known[1]() is not storage:
            known = _numbers[address] = next(_next_number), weakref.ref(storage, forget)
    return known


def counter_tells(tensor: Tensor) -> bool:
    """Whether torch's counter counts every write to the tensor's memory."""
    if tensor.is_inference() or not tensor.untyped_storage().resizable():
        return False
    return not (tensor.device.type == "cpu" and tensor.is_shared())


def _digest(array: Tensor | np.ndarray) -> Hashable:
    """Return a digest of type, shape and bytes; it guards against accident, not malice."""
    if isinstance(array, Tensor):
        if array.device.type != "cpu":
            return str(array.device), array.dtype, tuple(array.shape), *_device_digest(array)
        form: Hashable = (array.dtype, tuple(array.shape))
        content = _flat(array).view(torch.uint8).numpy()
    else:
        form = (array.dtype.str, array.shape)
        content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    # crc32 runs at 3 GB/s, blake2b at 0.6. The sum of words shares no algebra with crc32, so an
    # accidental match of both is as unlikely as one of a 64-bit hash.
    words = content[: content.size // 8 * 8].view(np.int64)
    return form, zlib.crc32(content.data), int(words.sum())


def _flat(tensor: Tensor) -> Tensor:
    """Return the elements one after the other; torch calls one element contiguous at any stride."""
    flat = tensor.detach().reshape(-1).contiguous()
    return flat.clone(memory_format=torch.contiguous_format) if flat.stride(0) != 1 else flat


def _device_digest(tensor: Tensor) -> tuple[int, ...]:
    """Return two 64-bit sums over (position, content), computed on the tensor's device."""
    same_size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    flat = _flat(tensor)
    words = flat.view(same_size[flat.element_size()]).to(torch.int64)
    mixed = torch.arange(words.numel(), device=words.device).mul_(_GOLDEN).bitwise_xor_(words)
    mixed = mixed.mul_(_MIX)
    mixed = mixed.bitwise_xor_(mixed >> 29).mul_(_GOLDEN)
    mixed = mixed.bitwise_xor_(mixed >> 32)
    return tuple(torch.stack([mixed.sum(), words.sum()]).tolist())

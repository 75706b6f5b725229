"""What the decoders of built matrices share: a matrix as a system builds it, bits, the sum tree.

Each ``test_decode_*.py`` holds a decoder written from the documented layout of a format. It reads
the tensors that a kernel would be given, computes A·B on small whole numbers, where every order of
additions is exact, and compares with scipy. This proves the format and the schedule: what is
packed can be decoded, each entry once, each row of C once. It proves nothing about device code:
the GPU tests and the mutation run do.

Rows of B that no entry of A refers to are NaN: a column id that is wrong shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from sparsetile import CSR
from sparsetile.engines.request import Request
from sparsetile.reorder import Permutation
from sparsetile.systems import SYSTEMS, runner
from tests.contracts.cases import csr_of

__all__ = [
    "Built",
    "Pieces",
    "bits",
    "build",
    "damaged",
    "row_order",
    "whole_numbers",
    "with_tiles",
]

COLUMNS = 3  # of B


def whole_numbers(matrix: sp.csr_array, *, pattern: bool = False) -> CSR:
    """The pattern of ``matrix``, values of 1 to 61 with either sign; neighbours differ."""
    matrix = sp.csr_array(matrix)
    number = np.arange(matrix.nnz)
    matrix.data = (number % 61 + 1.0) * (-1.0) ** number
    return csr_of(matrix, pattern=pattern)


def with_tiles(
    tiles: list[int], dtype: torch.dtype, pattern: bool = False, *, stack: int = 1, last: int = 5
) -> CSR:
    """A matrix whose windows of ``stack`` times eight rows have these tiles.

    They have no columns in common; the last window has ``last`` rows.
    """
    random = np.random.default_rng(5)
    blocks = []
    for window, count in enumerate(tiles):
        height = last if window == len(tiles) - 1 else 8 * stack
        held = random.random((height, 8 * count)) < 0.3
        held[random.integers(0, height, 8 * count), np.arange(8 * count)] = True
        blocks.append(sp.csr_array(held * random.choice([-2.0, -1.0, 1.0, 3.0], held.shape)))
    matrix = sp.block_diag([*blocks, sp.csr_array((0, 2))], format="csr")
    return csr_of(matrix, pattern=pattern, dtype=dtype)


@dataclass(frozen=True, eq=False)
class Built:
    """A matrix as a system built it.

    Attributes
    ----------
    tensors : dict of str to ndarray
        What the kernel reads, by name.
    packed : ndarray
        Packed values as the kernel reads them, in float64; empty where it reads none.
    values : ndarray
        Canonical values, ones for a pattern, in float64.
    pack : callable
        Tensors to packed values.
    meta : dict
        The recipe's sizes.
    B, C : ndarray
        An operand, and what a decoder must find.
    """

    tensors: dict[str, np.ndarray]
    packed: np.ndarray
    values: np.ndarray
    pack: Callable[[Mapping[str, np.ndarray]], np.ndarray]
    meta: dict[str, Any]
    csr: CSR
    B: np.ndarray
    C: np.ndarray

    def __getitem__(self, name: str) -> np.ndarray:
        return self.tensors[name]

    def check(self, by_position: np.ndarray, order: np.ndarray | None = None) -> None:
        """Compare sums at positions of the row order; those past the last row must be zero."""
        rows = self.csr.shape[0]
        found = np.full_like(self.C, np.nan)
        found[slice(None) if order is None or not order.size else order] = by_position[:rows]
        np.testing.assert_array_equal(found, self.C)
        assert not by_position[rows:].any(), "rows past the end of A have entries"


def row_order(csr: CSR, permuted: bool) -> Tensor | None:
    """A random order of A's rows, or None for the given one."""
    return torch.randperm(csr.shape[0]) if permuted else None


def build(
    system: str,
    csr: CSR,
    *,
    n: int = 16,
    order: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    ablation: str | None = None,
) -> Built:
    """Let ``system`` build and pack ``csr`` for products of ``n`` columns."""
    request = Request(csr, n, dtype, Permutation("given", order), ablation=ablation)
    built = SYSTEMS[system].build(request)
    run = runner(built.recipe)

    def pack(tensors: Mapping[str, np.ndarray]) -> np.ndarray:
        named = {name: torch.from_numpy(array) for name, array in tensors.items()}
        packed = run.pack(named, csr.values, dtype).values()
        return np.concatenate([np.empty(0), *(each.double().numpy().ravel() for each in packed)])

    values = np.ones(csr.nnz) if csr.values is None else csr.values.double().numpy()
    indices = csr.indices.numpy()
    A = sp.csr_array((values, indices, csr.indptr.numpy()), shape=csr.shape)
    B = np.random.default_rng(4).integers(-3, 4, (csr.shape[1], COLUMNS)).astype(float)
    C = A @ B
    B[np.setdiff1d(np.arange(csr.shape[1]), indices)] = np.nan
    tensors = {name: tensor.numpy() for name, tensor in built.tensors.items()}
    return Built(tensors, pack(tensors), values, pack, dict(run.meta), csr, B, C)


def bits(words: np.ndarray) -> np.ndarray:
    """Bits of 64-bit words, lowest first: bool [words, 64]."""
    octets = np.ascontiguousarray(words).reshape(-1, 1).view(np.uint8)
    return np.unpackbits(octets, axis=1, bitorder="little").astype(bool)


class Pieces:
    """Partial sums of units that were cut, by slot, and the tree that adds them.

    ``nodes[p]`` is first child slot, children, own slot or -1 at the root, 0; ``parent_of_slot[s]``
    is the node that adds slot s. Slots that no node owns are those of the pieces.
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[int, np.ndarray]] = {}

    def put(self, slot: int, label: int, partial: np.ndarray) -> None:
        """Keep a piece's sum; ``label`` is the unit that it belongs to."""
        assert slot >= 0 and slot not in self._held
        self._held[slot] = label, partial

    def take(self, slot: int, label: int) -> np.ndarray:
        """Remove and return a sum that must belong to ``label``."""
        found, partial = self._held.pop(slot)
        assert found == label
        return partial

    def sums(self, parents: np.ndarray, nodes: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Yield each cut unit's label and whole sum; every slot is used once."""
        # A node's own slot lies behind those of its children: nodes come in the order of levels.
        assert len(parents) == len(self._held) + int((nodes[:, 2] >= 0).sum())
        for node, (first, children, own, _) in enumerate(nodes.tolist()):
            slots = range(first, first + children)
            assert all(parents[slot] == node for slot in slots)
            label = self._held[first][0]
            total = sum(self.take(slot, label) for slot in slots)
            if own < 0:
                yield label, total
            else:
                self.put(own, label, total)
        self.done()

    def done(self) -> None:
        """Every slot was used."""
        assert not self._held


def damaged(built: Built, harmless: tuple[str, ...] = ()) -> Iterator[Built]:
    """Yield the matrix with one element of one array changed: a decoder must notice each."""
    for name, array in built.tensors.items():
        if array.size and name not in harmless:
            tensors = {**built.tensors, name: _changed(array)}
            yield replace(built, tensors=tensors, packed=built.pack(tensors))
    if built.packed.size:
        yield replace(built, packed=_changed(built.packed))


def _changed(array: np.ndarray) -> np.ndarray:
    changed = array.copy()
    changed.flat[array.size // 2] += 1
    return changed

"""Exact systems on matrices of 2^31 entries or more: the same kernels, piece by piece of the rows.

Kernels and schedules number entries with 32 bits. Pieces of whole rows (intake/pieces.py) have
fewer; columns and values are read where A has them, from the piece's first entry on. So a build
adds the schedules alone, and C is written in place. Rows are independent, so bits are those of
products of the pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparsetile.core.settings import entry_limit
from sparsetile.engines.request import EngineBuild, Request, part, prefixed
from sparsetile.engines.runner import ExactRunner
from sparsetile.intake.csr import CSR
from sparsetile.intake.pieces import RowPiece, row_pieces
from sparsetile.launch.interface import PLAIN, Epilogue, Tensors
from sparsetile.reorder import Permutation

__all__ = ["PieceRunner", "build_pieces", "in_pieces"]


def in_pieces(request: Request) -> bool:
    """Whether a matrix has too many entries for one schedule."""
    return request.csr.nnz >= entry_limit()


def _of_piece(request: Request, piece: RowPiece) -> Request:
    """Return the request of a piece's rows, which are visited in the same order."""
    csr, order = request.csr, request.permutation.perm
    values = None if csr.values is None else csr.values[piece.entries]
    if order is not None:
        inside = (order >= piece.first_row) & (order < piece.end_row)
        order = order[inside] - piece.first_row
    rows = CSR(
        piece.pointers(csr.indptr), csr.indices[piece.entries], values,
        (piece.end_row - piece.first_row, csr.shape[1]), checked=csr.checked,
    )  # fmt: skip
    # Bundles of rows would copy the values: they are read in place.
    return replace(
        request, csr=rows, permutation=Permutation(request.permutation.name, order), in_place=True
    )


def build_pieces(request: Request, build: Callable[[Request], EngineBuild]) -> EngineBuild:
    """Build every piece; ``meta`` of the pieces is beside their places."""
    tensors = {"indptr": request.csr.indptr, "columns": request.csr.indices}
    found, seconds = list[tuple[RowPiece, EngineBuild]](), {"format": 0.0, "schedule": 0.0}
    for piece in row_pieces(request.csr.indptr, entry_limit()):
        made = build(_of_piece(request, piece))
        found.append((piece, made))
        for name, each in made.seconds.items():
            seconds[name] += each
    # The places of winners have one type in all pieces.
    longest = max((made.meta.get("longest", 0) for _, made in found), default=0)
    pieces = []
    for number, (piece, made) in enumerate(found):
        own = {name: each for name, each in made.tensors.items() if name != "columns"}
        tensors |= prefixed(f"piece{number}", own)
        meta = made.meta | ({"longest": longest} if "longest" in made.meta else {})
        sizes = {
            "rows": piece.end_row - piece.first_row, "cols": request.csr.shape[1],
            "nnz": piece.end - piece.begin, "tensors": list(made.tensors),
        }  # fmt: skip
        pieces.append({"place": list(piece), "meta": meta | sizes})
    choices = {
        "format": f"rows, {len(found)} pieces of fewer than {entry_limit()} entries",
        **{name: text for name, text in (found[0][1].choices if found else {}).items()
           if name != "format"},
    }  # fmt: skip
    return EngineBuild(tensors, choices, seconds, {"pieces": pieces})


class _Piece:
    """A piece's place and its runner."""

    def __init__(self, number: int, text: Mapping[str, Any], runner: ExactRunner) -> None:
        self.place, self.runner, self._name = RowPiece(*text["place"]), runner, f"piece{number}"

    def tensors(self, tensors: Tensors) -> Tensors:
        """Return the piece's own tensors."""
        columns = tensors["columns"][self.place.entries]
        return {**part(self._name, tensors), "columns": columns}

    def values(self, values: Tensor | None) -> Tensor | None:
        """Return the values of the piece's entries, in place."""
        return None if values is None else values[self.place.entries]

    def rows(self, dense: Tensor) -> Tensor:
        """Return the piece's rows of C or its gradient, in place."""
        return dense[..., self.place.rows, :]


def _each_matrix(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Matrices of a batch, side by side: rows of one are contiguous."""
    if tensors[0].dim() == 2:
        yield tensors
    else:
        yield from zip(*(each.unbind() for each in tensors), strict=True)


class PieceRunner(ExactRunner):
    """An exact system's runners over pieces of A, each of which owns rows of C.

    Parameters
    ----------
    meta : Mapping
        What :func:`build_pieces` made for the recipe.
    make : callable
        Returns a piece's runner.
    """

    def __init__(
        self, meta: Mapping[str, Any], make: Callable[[Mapping[str, Any]], ExactRunner]
    ) -> None:
        super().__init__(meta)
        self._pieces = [
            _Piece(number, text, make(text["meta"])) for number, text in enumerate(meta["pieces"])
        ]

    def spmm(
        self, tensors: Tensors, values: Tensor | None, packed: Tensors | None, B: Tensor,
        out: Tensor, epilogue: Epilogue = PLAIN,
    ) -> None:  # fmt: skip
        for each in self._pieces:
            each.runner.spmm(
                each.tensors(tensors), each.values(values), None, B, each.rows(out), epilogue
            )

    def prepare(self, n: int, dtype: torch.dtype, weighted: bool, device: torch.device) -> None:
        for each in self._pieces:
            each.runner.prepare(n, dtype, weighted, device)

    def extremum(
        self, tensors: Tensors, values: Tensor | None, B: Tensor, out: Tensor, args: Tensor | None,
        maximum: bool,
    ) -> None:  # fmt: skip
        places = out if args is None else args
        for each in self._pieces:
            own, weights = each.tensors(tensors), each.values(values)
            for b, c, place in _each_matrix(B, each.rows(out), each.rows(places)):
                winners = None if args is None else place
                each.runner.extremum(own, weights, b, c, winners, maximum)

    @property
    def place_dtype(self) -> torch.dtype:
        return self._pieces[0].runner.place_dtype

    def won(
        self, tensors: Tensors, values: Tensor | None, grad: Tensor, args: Tensor, order: Tensor,
        indptr: Tensor, out: Tensor,
    ) -> None:  # fmt: skip
        for each in self._pieces:
            own, weights, cut = (
                each.tensors(tensors),
                each.values(values),
                order[each.place.entries],
            )
            for g, arg, c in _each_matrix(grad, args, each.rows(out)):
                each.runner.won(own, weights, g, arg, cut, indptr, c)

    def sddmm(self, tensors: Tensors, G: Tensor, B: Tensor) -> Tensor:
        wide = torch.float64 if B.dtype is torch.float64 else torch.float32
        found = torch.empty(self.nnz, dtype=wide, device=B.device)
        for each in self._pieces:
            found[each.place.entries] = each.runner.sddmm(each.tensors(tensors), each.rows(G), B)
        return found

    def repair(
        self, tensors: Tensors, values: Tensor | None, B: Tensor, out: Tensor,
        epilogue: Epilogue = PLAIN, only_if: Tensor | None = None,
    ) -> None:  # fmt: skip
        for each in self._pieces:
            own, weights = each.tensors(tensors), each.values(values)
            each.runner.repair(own, weights, B, each.rows(out), epilogue, only_if)

    def prepare_repair(
        self, n: int, dtype: torch.dtype, weighted: bool, device: torch.device
    ) -> None:
        for each in self._pieces:
            each.runner.prepare_repair(n, dtype, weighted, device)

"""The matrix files of a run: those of the data folder, and generated ones, made once and kept.

Generated matrices lie in the user's data folder under ``generated``, named by what they are and a
digest of how they were made, so that every worker reads the same file and the next run does too.
What is missing is made by processes in the background while workers start and other matrices are
measured, and so are the row orders that the run will ask for.
"""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import signal
from collections.abc import Mapping, Sequence
from multiprocessing.pool import AsyncResult, Pool
from pathlib import Path

from sparsetile import __version__
from sparsetile.bench.expansion import MatrixSpec
from sparsetile.core import settings

__all__ = ["Matrices", "NotReady", "generated_folder", "materialise"]

# A graph of a hundred million entries takes 4 GB while it is made.
_MAX_PROCESSES = 6


class NotReady(RuntimeError):
    """A matrix was not made in the time given."""


def generated_folder() -> Path:
    """Return the folder in which generated matrices are kept."""
    return settings.data_dir() / "generated"


def _file(spec: MatrixSpec, folder: Path) -> Path:
    from sparsetile.data.standins import STAND_INS

    if spec.source == "stand-in":
        recipe = repr(STAND_INS[spec.name])
    else:
        recipe = f"{spec.generator}({sorted(spec.params.items())})"
    digest = hashlib.sha256(f"{__version__} {recipe}".encode()).hexdigest()[:8]
    return folder / f"{spec.name}-{digest}.npz"


def materialise(spec: MatrixSpec, folder: Path | None = None) -> str:
    """Return the path of a matrix file, generating it where it is no file yet."""
    if spec.path is not None:
        return spec.path
    from sparsetile.data.registry import generate
    from sparsetile.data.standins import stand_in
    from sparsetile.intake import write_npz

    folder = folder or generated_folder()
    path = _file(spec, folder)
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        if spec.source == "stand-in":
            csr = stand_in(spec.name)
        else:
            csr = generate(str(spec.generator), **dict(spec.params))
        write_npz(path, csr)
    return str(path)


def _make(spec: MatrixSpec, folder: Path, orders: Sequence[str], scratch: str) -> str:
    """Make a matrix file and find row orders of it, in a process of its own."""
    path = materialise(spec, folder)
    if orders:
        from sparsetile.bench.orders import find_order, matrix_hash, save_order
        from sparsetile.intake import read_matrix

        csr = read_matrix(path, function="bench")
        for name in orders:
            with contextlib.suppress(ValueError, MemoryError):  # planning will say so itself
                order = find_order(csr, name)
                if order is not None:
                    save_order(scratch, matrix_hash(csr), order)
    return path


class Matrices:
    """The matrices of one run, by name.

    Parameters
    ----------
    specs : sequence of MatrixSpec
        All that the run will ask for. Where two or more have to be generated, processes begin to
        do so at once; a single one is made when it is asked for.
    folder : Path, optional
        Where generated matrices are kept; :func:`generated_folder` when None.
    orders : dict, optional
        Row orders to find in the background, by the matrix's name.
    scratch : str
        Folder for these orders.
    """

    def __init__(
        self,
        specs: Sequence[MatrixSpec],
        folder: Path | None = None,
        *,
        orders: Mapping[str, Sequence[str]] | None = None,
        scratch: str = "",
    ) -> None:
        self._folder = folder or generated_folder()
        orders = orders or {}
        self._pool: Pool | None = None
        self._made: dict[str, AsyncResult[str]] = {}
        to_make = {
            spec.name: spec
            for spec in specs
            if spec.path is None and not _file(spec, self._folder).exists()
        }
        to_make |= {spec.name: spec for spec in specs if orders.get(spec.name)}
        if len(to_make) > 1 or orders:
            processes = min(len(to_make), max(1, (os.cpu_count() or 1) // 2), _MAX_PROCESSES)
            # spawn: a fork would copy whatever threads and CUDA state this process has. Ctrl-C is
            # for the run itself, which then ends these processes without a word from them.
            self._pool = multiprocessing.get_context("spawn").Pool(
                processes, signal.signal, (signal.SIGINT, signal.SIG_IGN)
            )
            for spec in to_make.values():
                work = (spec, self._folder, orders.get(spec.name, ()), scratch)
                self._made[spec.name] = self._pool.apply_async(_make, work)

    def ready(self, name: str) -> bool:
        """True when :meth:`path` would not wait for a matrix in the making."""
        return name not in self._made or self._made[name].ready()

    def path(self, spec: MatrixSpec, seconds: float | None = None) -> str:
        """Return the file of a matrix, waiting for it at most ``seconds``.

        Raises
        ------
        NotReady
            It was not made in time.
        OSError, ValueError, MemoryError
            It could not be made.
        """
        job = self._made.get(spec.name)
        if job is None:
            return materialise(spec, self._folder)
        try:
            return job.get(seconds)
        except multiprocessing.TimeoutError:
            raise NotReady(f"{spec.name} was not generated within {seconds:.0f} s") from None

    def close(self) -> None:
        """End whatever is still being made; a half-written file never bears a matrix's name."""
        if self._pool is not None:
            self._pool.terminate()
            self._pool.join()
            self._pool = None

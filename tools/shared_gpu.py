"""Processes that share a GPU through NVIDIA's Multi-Process Service (MPS).

Without it, their kernels take turns, a time slice each. The fuzzer's processes launch small kernels
and wait for each, so that with it they are about four times as fast.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator

MPS = "nvidia-cuda-mps-control"
_FOLDER = "CUDA_MPS_PIPE_DIRECTORY"


# Seconds for an answer of the daemon; it waits for processes that are ending.
_ANSWER_SECONDS = 20.0


def _ask(program: str, environment: dict[str, str], request: str) -> str:
    """Return the daemon's answer; empty if it gives none in time."""
    try:
        done = subprocess.run(
            [program], input=f"{request}\n", env=environment, check=False, text=True,
            timeout=_ANSWER_SECONDS, stdout=subprocess.PIPE,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout


@contextlib.contextmanager
def shared_gpu() -> Iterator[dict[str, str]]:
    """Run the daemon of MPS; yields the environment of processes that share the GPU.

    A daemon whose folder is in the environment already is used as it is. Without its program,
    processes take turns.
    """
    program = shutil.which(MPS)
    if program is None or os.environ.get(_FOLDER):
        yield dict(os.environ)
        return
    with tempfile.TemporaryDirectory(prefix="sparsetile-mps-") as place:
        around = {**os.environ, _FOLDER: place, "CUDA_MPS_LOG_DIRECTORY": place}
        subprocess.run([program, "-d"], env=around, check=False, timeout=30)
        try:
            yield around
        finally:
            _ask(program, around, "quit")


def is_shared(environment: dict[str, str]) -> bool:
    """Whether a server of MPS runs: the daemon starts one for the first process that needs it."""
    program = shutil.which(MPS)
    if program is None:
        return False
    return any(line.isdigit() for line in _ask(program, environment, "get_server_list").split())

"""Ctrl-C during imports ends the process; at other times it is a KeyboardInterrupt, as ever."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

__all__ = ["INTERRUPTED", "STOPPED", "interruptible"]

INTERRUPTED = 130
STOPPED = "sparsetile: stopped"
_SHOW_CURSOR = "\x1b[?25h"  # progress bars hide it


def _interrupt(number: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            shown = _SHOW_CURSOR if os.isatty(2) else ""
            os.write(2, f"{shown}{STOPPED}\n".encode())
            os._exit(INTERRUPTED)  # no exception: modules that are half imported may catch it
        frame = frame.f_back
    raise KeyboardInterrupt


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C end the process during imports; otherwise it is a KeyboardInterrupt, as ever."""
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # a caller's own handler stays, and threads may not set one
        return
    signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)

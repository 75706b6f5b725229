"""Python programs in processes of their own that find torch imported, which takes longest."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

__all__ = ["Interpreter"]

# One process imports torch; each program runs in a fork of it. It has no threads yet.
_SCRIPT = """
import json, os, sys, traceback
import torch
for line in sys.stdin:
    given = json.loads(line)
    pid = os.fork()
    if pid == 0:
        for number, name in ((0, os.devnull), (1, given["out"]), (2, given["err"])):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
        os.environ.update(given["env"])
        sys.path[:0] = given["path"]
        sys.argv = ["-c", *given["words"]]
        code = 1
        try:
            exec(compile(given["code"], "<program>", "exec"), {"__name__": "__main__"})
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Interpreter:
    """Call it with a program and words of its command line; it runs in a new process.

    What sparsetile imports, starts and keeps is as in a fresh interpreter. Tests of how an
    interpreter ends, or of what torch does at its import, need a real one.
    """

    def __init__(self, folder: Path) -> None:
        self._streams = folder / "out", folder / "err"
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SCRIPT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(
        self, code: str, *words: str, path: tuple[str, ...] = (), **env: str
    ) -> subprocess.CompletedProcess[str]:
        out, err = self._streams
        asked = {"code": code, "words": words, "path": path, "env": env}
        assert self._process.stdin is not None and self._process.stdout is not None
        print(
            json.dumps({**asked, "out": str(out), "err": str(err)}),
            file=self._process.stdin, flush=True,
        )  # fmt: skip
        status = int(self._process.stdout.readline())
        return subprocess.CompletedProcess(code, status, out.read_text(), err.read_text())

    def close(self) -> None:
        """End the process that imported torch."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

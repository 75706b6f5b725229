"""Exceptions and the one sentence pattern every error follows.

``<function>: <argument> must be <expected>, got <actual>. <what to do>.``
"""

from __future__ import annotations

__all__ = [
    "CompileError", "DataError", "PlanFileError", "UnsupportedError", "describe", "type_error",
    "value_error",
]  # fmt: skip


class UnsupportedError(NotImplementedError):
    """No system supports the request; the message lists every system with its reason.

    Examples
    --------
    >>> import torch
    >>> import sparsetile as st
    >>> A = torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 3.0]]).to_sparse_csr()
    >>> try:
    ...     st.plan(A, n=2, system="csr")
    ... except st.UnsupportedError as error:
    ...     print("csr: runs on cuda, A is on cpu" in str(error))
    True
    """


class CompileError(RuntimeError):
    """NVRTC could not compile a kernel; carries the compiler's log and the path of the source.

    Examples
    --------
    >>> import sparsetile as st
    >>> error = st.CompileError("text", log="the compiler's log", source_path="kernel.cu")
    >>> error.log, error.source_path
    ("the compiler's log", 'kernel.cu')
    """

    def __init__(self, text: str, *, log: str = "", source_path: str = "") -> None:
        super().__init__(text)
        self.log = log
        self.source_path = source_path


class DataError(ValueError):
    """A file or download does not contain the expected matrix.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> import sparsetile as st
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "a.mtx")
    ...     _ = path.write_text("not a matrix")
    ...     try:
    ...         st.plan(path, n=2)
    ...     except st.DataError:
    ...         print("refused")
    refused
    """


class PlanFileError(ValueError):
    """A plan file is damaged, truncated, of another version, or not a plan file.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> import sparsetile as st
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "a.safetensors")
    ...     _ = path.write_bytes(b"not a plan")
    ...     try:
    ...         st.load_plan(path)
    ...     except st.PlanFileError:
    ...         print("refused")
    refused
    """


def describe(function: str, argument: str, expected: str, actual: object, remedy: str) -> str:
    """Return the error sentence; ``remedy`` is a full sentence without its full stop."""
    return f"{function}: {argument} must be {expected}, got {actual}. {remedy}."


def value_error(
    function: str, argument: str, expected: str, actual: object, remedy: str
) -> ValueError:
    """Build (not raise) a ValueError in that pattern: wrong shape, range or content."""
    return ValueError(describe(function, argument, expected, actual, remedy))


def type_error(
    function: str, argument: str, expected: str, actual: object, remedy: str
) -> TypeError:
    """Build (not raise) a TypeError in that pattern: wrong type or dtype."""
    return TypeError(describe(function, argument, expected, actual, remedy))

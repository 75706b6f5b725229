"""The source of a kernel: one .cu of the device tree plus a generated header.

The header has constexpr values and the fields of the parameter struct (``params.py``); Python
generates nothing else. The device tree's digest is part of every cache key and of the GPU record,
so a changed header recompiles every kernel and outdates the record.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from sparsetile.core.errors import value_error
from sparsetile.jit.params import ParamStruct

__all__ = [
    "DEVICE_TREE", "ConfigValue", "KernelSource", "config_header", "device_tree_digest",
]  # fmt: skip

DEVICE_TREE = Path(__file__).resolve().parent.parent / "kernels" / "cuda"

ConfigValue = bool | int | str


@dataclass(frozen=True)
class KernelSource:
    """One kernel to compile."""

    file: str  # relative to the device tree: ``"rows/spmm_csr.cu"``
    entry: str  # name of its only ``extern "C" __global__`` function
    # Constants of the generated header, sorted by name. A ``str``
    # is a macro's text, usually the name of a device type.
    config: tuple[tuple[str, ConfigValue], ...]
    # Without one a kernel can be compiled, not launched.
    params: ParamStruct | None = None
    # Folder of the file if not in the device tree; headers still come from there.
    folder: Path | None = None

    @staticmethod
    def make(
        file: str, entry: str, config: Mapping[str, ConfigValue], params: ParamStruct | None = None
    ) -> KernelSource:
        """Return the source of a kernel of the device tree."""
        if Path(file).is_absolute() or ".." in Path(file).parts:
            raise value_error(
                "KernelSource.make", "file", "a file of the device tree", repr(file),
                "Give its path from the device tree on",
            )  # fmt: skip
        return KernelSource(file, entry, tuple(sorted(config.items())), params)

    def in_folder(self, folder: Path) -> KernelSource:
        """Return the same with the file in another folder, which tests of headers use."""
        return replace(self, folder=folder)

    @property
    def path(self) -> Path:
        return (self.folder or DEVICE_TREE) / self.file

    @property
    def label(self) -> str:
        """Readable name: ``spmm_csr[kVec=4 kLanes=8 …]``."""
        inner = " ".join(f"{name}={_literal(value)}" for name, value in self.config)
        return f"{self.entry}[{inner}]"

    def text(self) -> str:
        """Return the whole translation unit: generated header, then the file as it stands."""
        header = config_header(self.config, self.params)
        return f'{header}#line 1 "{self.file}"\n{self.path.read_text()}'


def _literal(value: ConfigValue) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def config_header(
    config: tuple[tuple[str, ConfigValue], ...], params: ParamStruct | None = None
) -> str:
    """Return C++ text that declares each constant, types as macros, and the parameters' fields."""
    lines = ["// Generated: the configuration of this kernel.\n"]
    for name, value in config:
        if isinstance(value, bool):
            lines.append(f"constexpr bool {name} = {_literal(value)};\n")
        elif isinstance(value, int):
            lines.append(f"constexpr int {name} = {value};\n")
        else:
            lines.append(f"#define {name} {value}\n")
    if params is not None:
        lines.append(params.header())
    return "".join(lines)


def _digest_of(paths: list[Path], root: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(paths):
        name = path.relative_to(root).as_posix().encode()
        body = path.read_bytes()
        digest.update(len(name).to_bytes(4, "little") + name)
        digest.update(len(body).to_bytes(8, "little") + body)
    return digest.hexdigest()


@lru_cache(maxsize=1)
def device_tree_digest() -> str:
    """SHA-256 over names and bytes of every ``.cu`` and ``.cuh`` of the device tree."""
    return _digest_of([*DEVICE_TREE.rglob("*.cu"), *DEVICE_TREE.rglob("*.cuh")], DEVICE_TREE)

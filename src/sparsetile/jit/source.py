"""What a kernel is compiled from: one .cu of the device tree plus a header of constexpr values.

Python generates nothing but that header. The device tree's digest is part of every cache key and
of the GPU record, so a changed header recompiles every kernel and outdates the record.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

__all__ = [
    "DEVICE_TREE",
    "ConfigValue",
    "KernelSource",
    "code_digest",
    "config_header",
    "device_tree_digest",
]

DEVICE_TREE = Path(__file__).resolve().parent.parent / "kernels" / "cuda"

ConfigValue = bool | int | str


@dataclass(frozen=True)
class KernelSource:
    """One kernel to compile.

    Attributes
    ----------
    file : str
        Name of a ``.cu`` file in the device tree.
    entry : str
        Name of its only ``extern "C" __global__`` function.
    config : tuple of (str, bool | int | str)
        Constants of the generated header, sorted by name. A ``str`` is a macro's text, as a rule
        the name of a device type.
    """

    file: str
    entry: str
    config: tuple[tuple[str, ConfigValue], ...]

    @staticmethod
    def make(file: str, entry: str, config: Mapping[str, ConfigValue]) -> KernelSource:
        return KernelSource(file, entry, tuple(sorted(config.items())))

    @property
    def path(self) -> Path:
        return DEVICE_TREE / self.file

    @property
    def label(self) -> str:
        """Readable name: ``spmm_csr[kVec=4 kLanes=8 …]``."""
        inner = " ".join(f"{name}={_literal(value)}" for name, value in self.config)
        return f"{self.entry}[{inner}]"

    def text(self) -> str:
        """Return the whole translation unit: generated header, then the file as it stands."""
        return f'{config_header(self.config)}#line 1 "{self.file}"\n{self.path.read_text()}'


def _literal(value: ConfigValue) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def config_header(config: tuple[tuple[str, ConfigValue], ...]) -> str:
    """Return C++ text that declares each constant: ``constexpr`` values and ``using`` types."""
    lines = ["// Generated: the configuration of this kernel.\n"]
    for name, value in config:
        if isinstance(value, bool):
            lines.append(f"constexpr bool {name} = {_literal(value)};\n")
        elif isinstance(value, int):
            lines.append(f"constexpr int {name} = {value};\n")
        else:
            lines.append(f"#define {name} {value}\n")
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


def code_digest() -> str:
    """SHA-256 over ``kernels/`` and ``jit/``: what the GPU record vouches for.

    The CPU's own kernels (``kernels/cpu_*.py``) run in every test and take no part.
    """
    root = DEVICE_TREE.parent.parent
    paths = [
        path
        for folder in ("kernels", "jit")
        for path in (root / folder).rglob("*")
        if path.suffix in {".py", ".cu", ".cuh"} and not path.name.startswith("cpu_")
    ]
    return _digest_of(paths, root)

"""KernelSpec: the description of one device kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import PurePosixPath
from typing import Any

from sparsetile.jit import KernelSource, LoadedKernel, ParamStruct, load
from sparsetile.jit.source import ConfigValue

__all__ = ["KernelSpec"]


def _number(arch: str) -> int:
    """``sm_90a`` -> 90."""
    return int(arch.removeprefix("sm_").rstrip("af"))


def _distinct(
    configs: Callable[[], Iterator[dict[str, ConfigValue]]],
) -> Iterator[dict[str, ConfigValue]]:
    """Yield each configuration once: choices of several shapes may agree."""
    return iter({tuple(config.items()): config for config in configs()}.values())


@dataclass(frozen=True)
class KernelSpec:
    """One kernel file."""

    file: str  # the ``.cu`` file, relative to the device tree: ``"rows/spmm_csr.cu"``
    params: ParamStruct  # fields of the kernel's only parameter
    # Yields every configuration that the library may use, once each; the tests compile them all.
    configs: Callable[[], Iterator[dict[str, ConfigValue]]]
    # Targets the kernel is written for; empty means all from sm_80 on. One without a letter also
    # stands for all newer ones.
    architectures: tuple[str, ...] = ()
    # Most bytes of register spills of any configuration, known and explained.
    allowed_spills: int = 0
    shared_memory: bool = False  # whether the kernel uses shared memory

    def __post_init__(self) -> None:
        object.__setattr__(self, "configs", partial(_distinct, self.configs))

    @property
    def name(self) -> str:
        """Stem of the file, which is the name of its entry point."""
        return PurePosixPath(self.file).stem

    def source(self, config: Mapping[str, ConfigValue]) -> KernelSource:
        """Return the compilable source of one configuration."""
        return KernelSource.make(self.file, self.name, config, self.params)

    def runs_on(self, arch: str) -> bool:
        """Whether a target, also a virtual one, can have this kernel."""
        if not self.architectures:
            return True
        name = arch.replace("compute_", "sm_")
        return any(
            name == each or (each[-1].isdigit() and _number(name) >= _number(each))
            for each in self.architectures
        )

    def load(
        self, config: Mapping[str, ConfigValue], device: int, dynamic_shared: int = 0
    ) -> LoadedKernel:
        """Compile if needed and load on a CUDA device."""
        # Builds ask often, and the hash of a source takes as long as several launches.
        asked = (device, dynamic_shared, *config.items())
        found = self._loaded.get(asked)
        if found is None:
            found = self._loaded[asked] = load(self.source(config), dynamic_shared, device)
        return found

    @cached_property
    def _loaded(self) -> dict[tuple[Any, ...], LoadedKernel]:
        return {}

"""The interface of a system: what it can run, its predicted time, its build and its runner."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparsetile.engines.request import BuiltSystem, EngineBuild, Request, make_recipe
from sparsetile.engines.runner import Runner

__all__ = ["System"]


class System(ABC):
    """One method of multiplication. Subclasses are stateless; each has one registered instance."""

    name: ClassVar[str]
    summary: ClassVar[str]
    devices: ClassVar[tuple[str, ...]]
    dtypes: ClassVar[tuple[torch.dtype, ...]]
    deterministic: ClassVar[bool]  # whether the same product has the same bits each time
    architectures: ClassVar[str] = "any"  # GPUs, in words for the capability table
    ordered: ClassVar[bool] = False  # whether it visits rows in the plan's order
    # Device types whose exact system it is: its runners are :class:`ExactRunner`.
    exact_on: ClassVar[tuple[str, ...]] = ()
    # Device types on which predicting and building take about as long as the exact system's.
    quick_on: ClassVar[tuple[str, ...]] = ()
    rounds_to_tf32: ClassVar[bool] = False  # takes float32 only if torch allows TF32
    follows_tf32: ClassVar[bool] = False  # rounds float32 to TF32 if and only if torch allows it
    # Whether the exact system computes autocast's products in types that this one does not support;
    # otherwise such a product keeps the plan's type.
    casts_to_exact: ClassVar[bool] = False
    # Whether :meth:`predict` needs exact counts of distinct (window, column) pairs. They cost a
    # sort of all entries, which is skipped if no candidate needs it.
    counts_pairs: ClassVar[bool] = False
    kernels: ClassVar[tuple[str, ...]] = ()  # our device kernels that it launches, for checkers
    ablations: ClassVar[tuple[str, ...]] = ()  # that a benchmark may request
    # Ablations that the contract suites and checkers run, to cover parts that small matrices would
    # not use.
    contract_ablations: ClassVar[tuple[str | None, ...]] = (None,)
    runner: ClassVar[type[Runner]]  # unless :meth:`make_runner` chooses
    varying: ClassVar[tuple[str, ...]] = ()  # ablations whose products' bits vary

    def repeats(self, ablation: str | None) -> bool:
        """Whether the same product has the same bits each time with this ablation."""
        return self.deterministic and ablation not in self.varying

    def reasons(self, request: Request) -> list[str]:
        """Return every reason why this system cannot serve the request; empty if it can."""
        found = []
        if request.device.type not in self.devices:
            found.append(f"runs on {' or '.join(self.devices)}, A is on {request.device.type}")
        if request.dtype not in self.dtypes:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
            found.append(f"takes {names}, not {str(request.dtype).removeprefix('torch.')}")
        if request.deterministic and not self.repeats(request.ablation):
            found.append("is not bit-reproducible, and determinism was asked for")
        return [*found, *self.further_reasons(request)]

    def further_reasons(self, request: Request) -> list[str]:
        """Return reasons beyond device, dtype and determinism."""
        return []

    @abstractmethod
    def predict(self, request: Request) -> float:
        """Return the seconds that one product is expected to take on ``request.machine``."""

    @abstractmethod
    def build(self, request: Request) -> BuiltSystem:
        """Do all the work that is independent of B."""

    def built_by(self, request: Request, made: EngineBuild, **meta: Any) -> BuiltSystem:
        """Return an engine's build as this system's build."""
        return self.built(
            request, made.tensors, made.choices, made.seconds, **{**made.meta, **meta}
        )

    def make_runner(self, meta: Mapping[str, Any]) -> Runner:
        """Return the runner for a recipe of this system."""
        return self.runner(meta)

    def built(
        self, request: Request, tensors: Mapping[str, Tensor], choices: Mapping[str, str],
        seconds: Mapping[str, float], **meta: Any,
    ) -> BuiltSystem:  # fmt: skip
        """Return the result of :meth:`build`; ``meta`` is for the runner."""
        named = dict(tensors)
        if request.ablation is not None:
            choices = {**choices, "ablation": request.ablation}
        recipe = make_recipe(self.name, request.csr, named, **meta)
        return BuiltSystem(self.name, named, recipe, choices, seconds)

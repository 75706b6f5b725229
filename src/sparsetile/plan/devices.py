"""Devices as people name them, checked before torch is asked to use them."""

from __future__ import annotations

import torch

from sparsetile.core.errors import value_error

__all__ = ["usable_device"]


def usable_device(function: str, device: object, operand: str | None = None) -> torch.device:
    """Return the device of this machine that ``device`` names, a GPU with its number.

    ``operand`` is the tensor whose device that is, if no device was named.
    """
    argument, remedy = "device", "Name one of those, or omit device="
    if operand is not None:
        argument, remedy = f"the device of {operand}", f"Move {operand} there"
    try:
        chosen = torch.device(device)  # type: ignore[call-overload]
    except (RuntimeError, TypeError):
        raise value_error(
            function, argument, "a device such as cpu or cuda:0", repr(device), remedy
        ) from None
    if chosen.type not in ("cpu", "cuda"):
        raise value_error(function, argument, "cpu or cuda", chosen, remedy)
    if chosen.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise value_error(
            function, "device", "a device of this machine", f"{chosen} where there is no GPU",
            "Omit device=, or run `sparsetile doctor` to see what is missing",
        )  # fmt: skip
    if chosen.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    if chosen.index >= torch.cuda.device_count():
        raise value_error(
            function, "device", f"below cuda:{torch.cuda.device_count()}", chosen,
            "Name a GPU of this machine, or omit device=",
        )  # fmt: skip
    return chosen

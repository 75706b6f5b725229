"""Ranks compare their arguments before an exchange, so that all of them raise an error or none."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from sparsetile.dist.group import Ranks

__all__ = ["Agreement"]


class Agreement:
    """The arguments that the ranks of a group have agreed on.

    Errors begin with ``function``. Facts named in ``free`` may change at every call, and do not
    identify an exchange.
    """

    def __init__(self, ranks: Ranks, function: str, free: tuple[str, ...] = ()) -> None:
        self._ranks, self._function, self._free = ranks, function, free
        self._known: set[Hashable] = set()

    def _signature(self, facts: Mapping[str, Any]) -> Hashable:
        return tuple(fact for name, fact in facts.items() if name not in self._free)

    def known(self, facts: Mapping[str, Any]) -> bool:
        """Whether the ranks have agreed on an exchange of these facts."""
        return self._signature(facts) in self._known

    def reach(
        self, facts: Mapping[str, Any] | None, error: Exception | None, *, first: bool
    ) -> None:
        """Raise on every rank if arguments are wrong on one rank or differ between ranks.

        ``facts`` are what an exchange depends on, by name; None if this rank's arguments are wrong,
        with ``error``. ``first``: compare only facts that are not known yet. After the first
        comparison the others are expected in the exchange, so a rank whose arguments are wrong
        raises alone.
        """
        if facts is None:
            assert error is not None
            if self._ranks.size == 1 or (first and self._known):
                raise error
        elif first and self.known(facts):
            return

        def mine() -> Mapping[str, Any]:
            if facts is None:
                assert error is not None
                raise error
            return facts

        if self._ranks.size > 1:
            self._ranks.together(self._function, "the arguments", mine, dict)
        self._known.add(self._signature(mine()))

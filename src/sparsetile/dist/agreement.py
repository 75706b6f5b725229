"""What ranks compare before an exchange, so that an error is raised on every rank or on none.

Ranks compare whole numbers, in one small all-gather. Texts travel only after a rank has failed:
by then every rank knows of it, and takes part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sparsetile.dist.group import Ranks

__all__ = ["Agreement"]


class Agreement:
    """The arguments that the ranks of a group have agreed on.

    Parameters
    ----------
    function : str
        What errors begin with.
    names : sequence of str
        What each fact is called in errors.
    text : callable
        Turns the name of a fact and its number into text.
    signature : int
        How many of the facts, from the first, decide whether an exchange is known. The others may
        change at every call.
    """

    def __init__(
        self,
        ranks: Ranks,
        function: str,
        names: Sequence[str],
        text: Callable[[str, int], str],
        signature: int,
    ) -> None:
        self._ranks = ranks
        self._function, self._names, self._text = function, tuple(names), text
        self._signature = signature
        self._known: set[tuple[int, ...]] = set()

    def known(self, facts: tuple[int, ...]) -> bool:
        """Whether the ranks have agreed on an exchange of this signature."""
        return facts[: self._signature] in self._known

    def reach(
        self,
        facts: tuple[int, ...] | None,
        error: Exception | None,
        device: torch.device,
        *,
        first: bool,
    ) -> None:
        """Raise on every rank if arguments are wrong on one or differ among them.

        Parameters
        ----------
        facts : tuple of int, optional
            What an exchange depends on; None if this rank's arguments are wrong.
        error : Exception, optional
            What is wrong with this rank's arguments.
        first : bool
            Compare only signatures that are not known yet. After the first comparison the others
            are expected in the exchange, so a rank whose arguments are wrong raises alone.
        """
        if facts is None:
            assert error is not None
            if self._ranks.size == 1 or (first and self._known):
                raise error
        elif first and self.known(facts):
            return
        if self._ranks.size > 1:
            self._compare(facts, error, device)
        assert facts is not None
        self._known.add(facts[: self._signature])

    def _compare(
        self, facts: tuple[int, ...] | None, error: Exception | None, device: torch.device
    ) -> None:
        ranks, function = self._ranks, self._function
        mine = (1, *(0 for _ in self._names)) if facts is None else (0, *facts)
        everyone = ranks.numbers(mine, device, function).tolist()
        if any(wrong for wrong, *_ in everyone):

            def again() -> None:
                if error is not None:
                    raise error

            ranks.together(function, "the arguments", again)
        if any(others != everyone[0] for others in everyone):
            for place, name in enumerate(self._names, start=1):
                ranks.same(function, name, [self._text(name, others[place]) for others in everyone])

"""What was made of callers' objects, kept while these live: for ``spmm``, graphs and norms.

An object is watched through a weak reference: the cache never keeps it alive, and what was made of
it ends with it. Ids of objects that ended are given out again, so an id is looked up only while the
object behind it is watched.

An object may end while its thread, or another one, holds the lock of a cache or of what is kept in
it. So whoever notices the end does not wait for a lock: it is worked off before the next look-up.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Generic, TypeAlias, TypeVar

__all__ = ["Kept", "note_read", "noted_reads"]

_Value = TypeVar("_Value")
_Reads: TypeAlias = list[tuple[Any, list[Any]]]

_readers: list[_Reads] = []


@contextlib.contextmanager
def noted_reads() -> Iterator[_Reads]:
    """Collect (value, its owners) of all that caches return inside, in any thread: a CUDA graph
    that is captured inside reads the memory of these values at every replay."""
    found: _Reads = []
    _readers.append(found)
    try:
        yield found
    finally:
        _readers[:] = [each for each in _readers if each is not found]


def note_read(tensor: Any, value: Any = None) -> None:
    """Tell :func:`noted_reads` of a value that depends on a tensor, where no cache of :class:`Kept`
    returns it with that owner."""
    for found in tuple(_readers):
        found.append((value, [tensor]))


class _Owner:
    """An object that lives: the keys of what was made of it, and what callers noted about it."""

    def __init__(self, watch: weakref.ref[Any]) -> None:
        self.watch = watch
        self.keys: set[Hashable] = set()
        self.notes: dict[Hashable, Any] = {}


class Kept(Generic[_Value]):
    """Values by key; each ends with the first of its owners, or when it is the oldest of too many.

    Callers that read and then write hold :attr:`lock`, which may be taken again by its holder.

    Parameters
    ----------
    most : int, optional
        Values that are kept: of more, the one that was not asked for the longest is dropped.
    ended : callable, optional
        Called, under the lock, with a value that ended with its owner, or was dropped.
    """

    def __init__(
        self, most: int | None = None, ended: Callable[[_Value], object] | None = None
    ) -> None:
        self.lock = threading.RLock()
        self._over: deque[tuple[int, weakref.ref[Any]]] = deque()  # ended, and not worked off
        self.most, self._ended = most, ended
        self._values: OrderedDict[Hashable, tuple[_Value, tuple[int, ...]]] = OrderedDict()
        self._owners: dict[int, _Owner] = {}

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Hashable) -> _Value | None:
        """Return the value of a key, which is now the one that was asked for last."""
        with self.lock:
            self._sweep()
            found = self._values.get(key)
            if found is None:
                return None
            self._values.move_to_end(key)
            if _readers:
                self._note(*found)
            return found[0]

    def peek(self, key: Hashable) -> _Value | None:
        """The same without the lock and without a new order; None also if it may have ended."""
        found = self._values.get(key)
        if found is None or self._over:
            return None
        if _readers:
            self._note(*found)
        return found[0]

    def values(self) -> list[_Value]:
        """All values, the oldest first."""
        with self.lock:
            self._sweep()
            return [value for value, _ in self._values.values()]

    def items(self) -> list[tuple[Hashable, _Value]]:
        """Keys and values of all, the oldest first."""
        with self.lock:
            self._sweep()
            return [(key, value) for key, (value, _) in self._values.items()]

    def keep(self, key: Hashable, value: _Value, *owners: Any) -> _Value:
        """Keep a value while all its owners live, in place of another of the key."""
        with self.lock:
            self._sweep()
            self._forget(key)
            for each in owners:
                self._owner(each).keys.add(key)
            self._values[key] = value, tuple(id(each) for each in owners)
            while self.most is not None and len(self._values) > self.most:
                self._forget(next(iter(self._values)))
            if _readers:
                self._note(value, tuple(id(each) for each in owners))
        return value

    def drop(self, key: Hashable) -> None:
        """Forget a value."""
        with self.lock:
            value = self._forget(key)
            if value is not None and self._ended is not None:
                self._ended(value)

    def of(self, owner: Any) -> list[tuple[Hashable, _Value]]:
        """Keys and values of one owner."""
        with self.lock:
            self._sweep()
            found = self._owners.get(id(owner))
            keys = () if found is None else tuple(found.keys)
            return [(key, self._values[key][0]) for key in keys]

    def notes(self, owner: Any) -> dict[Hashable, Any]:
        """Return what callers noted about an object; it is forgotten with the object."""
        with self.lock:
            self._sweep()
            return self._owner(owner).notes

    def owners(self) -> list[Any]:
        """Return the objects that are watched."""
        with self.lock:
            self._sweep()
            return [owner for each in self._owners.values() if (owner := each.watch()) is not None]

    def noted(self, owner: Any) -> dict[Hashable, Any] | None:
        """The same of an object that may not be watched: None then."""
        with self.lock:
            self._sweep()
            found = self._owners.get(id(owner))
            return None if found is None else found.notes

    def clear(self) -> None:
        """Forget everything."""
        with self.lock:
            self._values.clear()
            self._owners.clear()
            self._over.clear()

    def _note(self, value: _Value, owners: tuple[int, ...]) -> None:
        watched = [self._owners.get(each) for each in owners]
        known = [each.watch() for each in watched if each is not None]
        for found in tuple(_readers):
            found.append((value, known))

    def _owner(self, owner: Any) -> _Owner:
        found = self._owners.get(id(owner))
        if found is None:
            end = functools.partial(self._end, id(owner))
            found = self._owners[id(owner)] = _Owner(weakref.ref(owner, end))
        return found

    def _end(self, owner: int, watch: weakref.ref[Any]) -> None:
        """Note that an object has ended; forget what was made of it if nobody is at work here."""
        self._over.append((owner, watch))
        if self.lock.acquire(blocking=False):
            try:
                self._sweep()
            finally:
                self.lock.release()

    def _sweep(self) -> None:
        """Forget what was made of objects that have ended. Needs the lock."""
        while self._over:
            owner, watch = self._over.popleft()
            found = self._owners.get(owner)
            if found is not None and found.watch is watch:  # else forgotten before
                del self._owners[owner]
                for key in tuple(found.keys):
                    self.drop(key)

    def _forget(self, key: Hashable) -> _Value | None:
        found = self._values.pop(key, None)
        if found is None:
            return None
        value, owners = found
        for each in owners:
            if each in self._owners:
                self._owners[each].keys.discard(key)
        return value

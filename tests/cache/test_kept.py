"""``Kept``: values end with their owners, at once or before the next look-up."""

from __future__ import annotations

import gc
import threading

import pytest

from sparsetile.cache.kept import Kept, note_read, noted_reads
from tests.locks import waits_for


class Owner:
    """Something that can be watched."""


def test_a_value_ends_with_the_first_of_its_owners():
    ended: list[str] = []
    kept = Kept[str](ended=ended.append)
    one, other = Owner(), Owner()
    kept.keep("both", "a", one, other)
    kept.keep("one", "b", one)
    assert kept.get("both") == "a" and kept.peek("one") == "b" and len(kept) == 2
    assert sorted(kept.of(one)) == [("both", "a"), ("one", "b")]
    del other
    assert kept.get("both") is None and ended == ["a"] and kept.owners() == [one]
    assert kept.of(one) == [("one", "b")]
    del one
    assert len(kept) == 0 and ended == ["a", "b"] and kept.owners() == []


def test_the_one_not_asked_for_the_longest_is_dropped():
    ended: list[int] = []
    kept, owner = Kept[int](2, ended.append), Owner()
    for number in range(2):
        kept.keep(number, number, owner)
    kept.get(0)
    kept.keep(2, 2, owner)
    assert kept.values() == [0, 2] and ended == [], "too many is no end"
    assert kept.of(owner) == [(0, 0), (2, 2)]
    kept.drop(0)
    kept.drop("unknown")
    assert ended == [0] and kept.values() == [2]


def test_notes_are_forgotten_with_their_object():
    kept, owner = Kept[int](), Owner()
    assert kept.noted(owner) is None
    kept.notes(owner)["calls"] = 3
    assert kept.noted(owner) == {"calls": 3} and kept.notes(owner) == {"calls": 3}
    del owner
    assert kept.owners() == []
    kept.notes(other := Owner())["calls"] = 1
    kept.clear()
    assert kept.noted(other) is None


def test_an_owner_that_ends_while_another_thread_holds_the_lock_waits_for_nobody():
    """A finaliser may run in a thread that holds what the other thread waits for."""
    kept, owner = Kept[str](), Owner()
    key = id(owner)
    kept.keep(key, "old", owner)
    held, free = threading.Event(), threading.Event()

    def hold() -> None:
        with kept.lock:
            held.set()
            free.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30)
    del owner  # returns at once
    gc.collect()
    assert kept.peek(key) is None, "another object may have the id by now"
    free.set()
    thread.join(30)
    assert kept.get(key) is None and len(kept) == 0


def test_a_value_in_place_of_another_has_its_own_owners():
    kept, first, second = Kept[str](), Owner(), Owner()
    kept.keep("key", "old", first)
    kept.keep("key", "new", second)
    del first
    assert kept.get("key") == "new"
    del second
    assert kept.get("key") is None


@pytest.mark.parametrize(
    "name", ["get", "values", "keep", "drop", "of", "notes", "owners", "noted", "clear"]
)
def test_every_look_up_waits_for_a_thread_that_is_at_work(name: str):
    kept, owner = Kept[str](), Owner()
    kept.keep("key", "value", owner)
    arguments = {"get": ["key"], "drop": ["key"], "keep": ["other", "value", owner]}
    arguments |= {each: [owner] for each in ("of", "notes", "noted")}
    assert waits_for(kept.lock, lambda: getattr(kept, name)(*arguments.get(name, [])))
    assert kept.peek("key") == (None if name in ("drop", "clear") else "value")


def test_what_is_read_and_kept_is_noted_with_its_owners():
    kept, one, other = Kept[str](), Owner(), Owner()
    kept.keep("before", "a", one)
    with noted_reads() as outer:
        kept.get("before")
        with noted_reads() as inner:
            kept.peek("before")
            kept.keep("new", "b", one, other)
        kept.get("none")
        note_read(other)
    kept.get("before")
    assert inner == [("a", [one]), ("b", [one, other])]
    assert outer == [("a", [one]), *inner, (None, [other])]

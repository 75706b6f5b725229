"""Shared memory filled by asynchronous copies, in NumPy, and the rules that its users must keep.

A copy is under way from its issue until its group has been waited for; until then the bytes it
goes to are rubbish. What landed is there for all lanes after the next ``__syncwarp``, and what
lanes have read may be overwritten after the next one. Whoever copies says how often each byte will
be read: so often it must have been before it is overwritten, and when all is over.
"""

from __future__ import annotations

import numpy as np

CHUNK = 16  # bytes of a copy of B
WORD = 4  # bytes of the smallest copy
UNIT = 2  # bytes of the smallest read
BANKS = 32  # of four bytes
FREE, PENDING, LANDED, VISIBLE = range(4)


def assert_no_conflicts(at: np.ndarray, width: int) -> None:
    """Addresses [warps, 32] of ``width`` bytes a lane; lanes go by turns of 128 bytes together."""
    banks = (at[..., None] // 4 + np.arange(width // 4)) % BANKS
    turns = np.sort(banks.reshape(-1, BANKS), axis=-1)
    assert (turns == np.arange(BANKS)).all(), "bank conflict"


class Ring:
    """The rings of some warps, one after the other; state by words of four bytes.

    ``warp`` and ``at`` of copies and reads broadcast to one element an access.
    """

    def __init__(self, warps: int, size: int) -> None:
        assert size % CHUNK == 0, "stages are whole chunks"
        self.size = size
        words, units = warps * size // WORD, warps * size // UNIT
        self.data = np.full(units, 0xFFFF, dtype=np.uint16)
        self.coming = self.data.copy()
        self.state = np.full(words, FREE, dtype=np.uint8)
        self.group = np.zeros(words, dtype=np.int64)
        self.being_read = np.zeros(words, dtype=bool)
        self.lane = np.zeros(words, dtype=np.int64)  # of the latest copy
        self.due = np.zeros(units, dtype=np.int16)  # reads still to come
        self.committed = np.zeros(warps, dtype=np.int64)

    def _places(self, warp: np.ndarray, at: np.ndarray, width: int, step: int) -> np.ndarray:
        """Numbers of the words or units of each access: [..., width / step]."""
        assert ((at >= 0) & (at + width <= self.size)).all(), "outside the warp's ring"
        assert not (at % width).any(), "misaligned"
        first = (np.asarray(warp) * self.size + at) // step
        return first[..., None] + np.arange(max(width // step, 1))

    def copy(
        self,
        warp: np.ndarray,
        at: np.ndarray,
        data: np.ndarray,
        reads: np.ndarray | int = 1,
    ) -> None:
        """``cp.async`` of the bytes ``data`` [..., 4, 8 or 16] to ``at``.

        ``reads``: how often each byte, by twos, will be read before it is overwritten.
        """
        width = data.shape[-1]
        words = self._places(warp, at, width, WORD)
        units = self._places(warp, at, width, UNIT)
        number = np.arange(words.size).reshape(words.shape)
        self.lane[words] = number
        assert (self.lane[words] == number).all(), "two lanes copy to one place"
        state = self.state[words]
        assert not ((state == PENDING) | (state == LANDED)).any(), "overwritten before it was read"
        assert not self.due[units].any(), "overwritten before it was read"
        assert not self.being_read[words].any(), "overwritten while lanes may still read"
        group = self.committed[warp] + 1
        self.state[words] = PENDING
        self.group[words] = np.broadcast_to(group, words.shape[:-1])[..., None]
        self.data[units] = 0xFFFF
        self.coming[units] = np.ascontiguousarray(data).view(np.uint16)
        self.due[units] = reads

    def commit(self, warp: np.ndarray) -> None:
        self.committed[warp] += 1

    def _by_warp(self, array: np.ndarray) -> np.ndarray:
        return array.reshape(self.committed.size, -1)

    def wait(self, warp: np.ndarray, pending: int) -> None:
        """``cp.async.wait_group``."""
        due = (self.committed[warp] - pending)[:, None]
        state, group = self._by_warp(self.state)[warp], self._by_warp(self.group)[warp]
        row, word = np.nonzero((state == PENDING) & (group <= due))
        word = warp[row] * (self.size // WORD) + word
        unit = word[:, None] * (WORD // UNIT) + np.arange(WORD // UNIT)
        self.data[unit], self.state[word] = self.coming[unit], LANDED

    def sync(self, warp: np.ndarray) -> None:
        """``__syncwarp``."""
        state = self._by_warp(self.state)
        mine = state[warp]
        state[warp] = np.where(mine == LANDED, VISIBLE, mine)
        self._by_warp(self.being_read)[warp] = False

    def read(self, warp: np.ndarray, at: np.ndarray, width: int) -> np.ndarray:
        """``width`` bytes from each of ``at``, as bytes."""
        words = self._places(warp, at, width, WORD)
        assert (self.state[words] == VISIBLE).all(), "read before it was copied"
        self.being_read[words] = True
        units = self._places(warp, at, width, UNIT)
        np.subtract.at(self.due, units.reshape(-1), 1)
        assert (self.due[units] >= 0).all(), "read more often than its copy said"
        return self.data[units].view(np.uint8)

    def end(self) -> None:
        """Nothing was copied in vain."""
        copied = self.state != FREE
        assert (self.state[copied] == VISIBLE).all() and not self.due.any(), "copied and not read"

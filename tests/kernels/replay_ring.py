"""Shared memory filled by asynchronous copies, in NumPy, and the rules that its users must keep.

A copy is under way from its issue until its group has been waited for; until then the bytes it
goes to are rubbish. What landed is there for all lanes after the next ``__syncwarp``, and what
lanes have read may be overwritten after the next one. Each byte copied is read exactly once.
"""

from __future__ import annotations

import numpy as np

CHUNK = 16  # bytes of a copy
BANKS = 32  # of four bytes
FREE, PENDING, LANDED, VISIBLE = range(4)


def assert_no_conflicts(at: np.ndarray, width: int) -> None:
    """Addresses [warps, 32] of ``width`` bytes a lane; lanes go by turns of 128 bytes together."""
    banks = (at[..., None] // 4 + np.arange(width // 4)) % BANKS
    turns = np.sort(banks.reshape(-1, BANKS), axis=-1)
    assert (turns == np.arange(BANKS)).all(), "bank conflict"


class Ring:
    """The ring of each warp: [warps, chunks of 16 bytes]."""

    def __init__(self, warps: int, size: int) -> None:
        chunks = size // CHUNK
        self.size = size
        self.data = np.full((warps, chunks, CHUNK), 0xFF, dtype=np.uint8)
        self.coming = self.data.copy()
        self.state = np.full((warps, chunks), FREE, dtype=np.uint8)
        self.group = np.zeros((warps, chunks), dtype=np.int64)
        self.reads = np.zeros((warps, chunks, CHUNK), dtype=np.int64)
        self.being_read = np.zeros((warps, chunks), dtype=bool)
        self.committed = np.zeros(warps, dtype=np.int64)

    def _chunks(self, at: np.ndarray, width: int) -> np.ndarray:
        assert ((at >= 0) & (at + width <= self.size)).all(), "outside the warp's ring"
        assert not (at % width).any(), "misaligned"
        return at // CHUNK

    def copy(self, warp: np.ndarray, at: np.ndarray, data: np.ndarray) -> None:
        """``cp.async`` of 16 bytes a lane: data [warps, 32, 16] to ``at`` [warps, 32]."""
        chunk = self._chunks(at, CHUNK)
        ordered = np.sort(chunk, axis=1)
        assert (ordered[:, 1:] != ordered[:, :-1]).all(), "two lanes copy to one place"
        here = warp[:, None], chunk
        state = self.state[here]
        assert not ((state == PENDING) | (state == LANDED)).any(), "overwritten before it was read"
        assert (self.reads[here][state == VISIBLE] == 1).all(), "overwritten before it was read"
        assert not self.being_read[here].any(), "overwritten while lanes may still read"
        self.state[here], self.group[here] = PENDING, self.committed[warp][:, None] + 1
        self.data[here], self.coming[here], self.reads[here] = 0xFF, data, 0

    def commit(self, warp: np.ndarray) -> None:
        self.committed[warp] += 1

    def wait(self, warp: np.ndarray, pending: int) -> None:
        """``cp.async.wait_group``."""
        due = (self.committed[warp] - pending)[:, None]
        row, chunk = np.nonzero((self.state[warp] == PENDING) & (self.group[warp] <= due))
        here = warp[row], chunk
        self.data[here], self.state[here] = self.coming[here], LANDED

    def sync(self, warp: np.ndarray) -> None:
        """``__syncwarp``."""
        state = self.state[warp]
        self.state[warp] = np.where(state == LANDED, VISIBLE, state)
        self.being_read[warp] = False

    def read(self, warp: np.ndarray, at: np.ndarray, width: int) -> np.ndarray:
        """``width`` bytes a lane from ``at`` [warps, 32], as bytes."""
        chunk = self._chunks(at, width)
        here = warp[:, None], chunk
        assert (self.state[here] == VISIBLE).all(), "read before it was copied"
        assert_no_conflicts(at, width)
        self.being_read[here] = True
        places = warp[:, None, None], chunk[..., None], (at % CHUNK)[..., None] + np.arange(width)
        np.add.at(self.reads, places, 1)
        return self.data[places]

    def end(self) -> None:
        """Nothing was copied in vain."""
        copied = self.state != FREE
        assert (self.state[copied] == VISIBLE).all() and (self.reads[copied] == 1).all(), (
            "copied and not read"
        )

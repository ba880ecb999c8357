"""Key/value caches: a full one, and a ring for sliding-window layers."""

from typing import Protocol

import numpy as np

from cuq1.reference.ops import F32, TILE_KEYS, TILE_ROWS


def ring_slots(window: int) -> int:
    """Slots of a sliding layer's ring: the window and one tile of slack.

    A round writes up to eight rows before the first of them is read, so a ring
    of exactly `window` slots would lose keys that the earlier rows still see.
    The slack for eight rows is rounded up to a tile of 64 (4,096 + 64 in the
    released model), and it is also what rewinding can draw on.
    """
    slack = -(-TILE_ROWS // TILE_KEYS) * TILE_KEYS
    return window + slack


class Cache(Protocol):
    """One layer's keys and values, [kv_heads, position, head_dim] each, addressed by position."""

    @property
    def window(self) -> int | None:
        """How many positions a query sees, its own included; None for all."""

    def write(self, start: int, k: F32, v: F32) -> None:
        """Store rows k, v [rows, kv_heads, head_dim] at positions start, start + 1, …"""

    def read(self, first: int, last: int) -> tuple[F32, F32, int]:
        """Tiles that cover positions first..last, as `ops.attention` takes them, and their first position."""

    def oldest(self) -> int:
        """The lowest position that has not been overwritten."""


class FullCache:
    """Every position up to `capacity`; memory is taken as it is written."""

    window: int | None = None

    def __init__(self, kv_heads: int, head_dim: int, capacity: int) -> None:
        slots = -(-capacity // TILE_KEYS) * TILE_KEYS
        # zeros, not empty: a masked slot's value is multiplied by zero and must be finite
        self.k = np.zeros((kv_heads, slots, head_dim), np.float32)
        self.v = np.zeros((kv_heads, slots, head_dim), np.float32)

    def write(self, start: int, k: F32, v: F32) -> None:
        self.k[:, start : start + len(k)] = k.swapaxes(0, 1)
        self.v[:, start : start + len(v)] = v.swapaxes(0, 1)

    def read(self, first: int, last: int) -> tuple[F32, F32, int]:
        low, high = first // TILE_KEYS, last // TILE_KEYS + 1
        heads, _, dim = self.k.shape
        shape = (heads, high - low, TILE_KEYS, dim)
        span = slice(low * TILE_KEYS, high * TILE_KEYS)
        return self.k[:, span].reshape(shape), self.v[:, span].reshape(shape), low * TILE_KEYS

    def oldest(self) -> int:
        return 0


class RingCache:
    """The last `slots` positions: position p lies in slot p mod slots."""

    def __init__(self, kv_heads: int, head_dim: int, window: int, slots: int | None = None) -> None:
        self.window = window
        self.slots = ring_slots(window) if slots is None else slots
        self.k = np.zeros((kv_heads, self.slots, head_dim), np.float32)
        self.v = np.zeros((kv_heads, self.slots, head_dim), np.float32)
        self.end = 0  # one past the highest position ever written, rejected rows included

    def write(self, start: int, k: F32, v: F32) -> None:
        slots = (start + np.arange(len(k))) % self.slots
        self.k[:, slots] = k.swapaxes(0, 1)
        self.v[:, slots] = v.swapaxes(0, 1)
        self.end = max(self.end, start + len(k))

    def read(self, first: int, last: int) -> tuple[F32, F32, int]:
        low, high = first // TILE_KEYS, last // TILE_KEYS + 1
        # tiles are cut by position, not by slot, so that sums run in the same order wherever the ring stands
        slots = np.arange(low * TILE_KEYS, high * TILE_KEYS) % self.slots
        heads, _, dim = self.k.shape
        shape = (heads, high - low, TILE_KEYS, dim)
        return self.k[:, slots].reshape(shape), self.v[:, slots].reshape(shape), low * TILE_KEYS

    def oldest(self) -> int:
        return max(0, self.end - self.slots)

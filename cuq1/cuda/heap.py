"""Pieces of memory that was taken once: which of its bytes are free."""

from bisect import insort

ALIGNMENT = 256


class Heap:
    """Offsets of pieces within `size` bytes. The smallest gap that fits is taken, the first of equal ones."""

    def __init__(self, size: int) -> None:
        self.size = size // ALIGNMENT * ALIGNMENT
        self._gaps = [(0, self.size)] if self.size else []  # (start, end), ascending, never touching
        self._taken: dict[int, int] = {}

    def take(self, size: int) -> int | None:
        """The offset of `size` bytes, 256-byte aligned; None where no gap is as large."""
        size = max(1, -(-size // ALIGNMENT)) * ALIGNMENT
        fitting = [(end - start, start, end) for start, end in self._gaps if end - start >= size]
        if not fitting:
            return None
        _, start, end = min(fitting)
        self._gaps.remove((start, end))
        if start + size < end:
            insort(self._gaps, (start + size, end))
        self._taken[start] = start + size
        return start

    def give(self, start: int) -> None:
        """Give a piece back. Raises KeyError for what is none."""
        end = self._taken.pop(start)
        for gap in [gap for gap in self._gaps if gap[1] == start or gap[0] == end]:
            self._gaps.remove(gap)
            start, end = min(start, gap[0]), max(end, gap[1])
        insort(self._gaps, (start, end))

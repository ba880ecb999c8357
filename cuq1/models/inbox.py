"""Where the ranks' exchanges lie: one allocation of each rank, laid out alike, which all of them map.

It holds abi.INBOXES buffers that layers take in turn (kernels_cu/common/exchange.cuh), in each of them:

    o, router_attended, router_residual   [ranks, ROWS, hidden] and twice [ranks, ROWS, experts]: o_proj's parts
    eh                                    [eh_splits, ROWS, hidden]: the draft's entry, a rank's columns from each
    y                                     [ranks, ROWS, hidden]: down's parts
    values, ids                           [ROWS, ranks, MAX_TOP_K]: candidates
    status                                [ranks, STATUS_WORDS]

A turn is a layer's number; draft depth d has the one after the last layer's and d more. Candidates have the turn of the
layer before them.
"""

from dataclasses import dataclass
from functools import cached_property
from math import prod

from cuq1.cuda import abi
from cuq1.cuda.kernels import draft
from cuq1.plan.dims import MAX_TOP_K, ROWS, Dims
from cuq1.plan.types import Buffer, Ref

ALIGNMENT = 256


@dataclass(frozen=True)
class Inbox:
    """The layout for ranks of `dims`. place: this rank's, which is its number among those that exchange."""

    dims: Dims
    place: int

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        d = self.dims
        return {
            "o": (d.ranks, ROWS, d.hidden),
            "router_attended": (d.ranks, ROWS, d.experts),
            "router_residual": (d.ranks, ROWS, d.experts),
            "eh": (draft.eh_splits(d), ROWS, d.hidden),
            "y": (d.ranks, ROWS, d.hidden),
            "values": (ROWS, d.ranks, MAX_TOP_K),
            "ids": (ROWS, d.ranks, MAX_TOP_K),
            "status": (d.ranks, abi.STATUS_WORDS),
        }

    @cached_property
    def _offsets(self) -> dict[str, int]:
        found, end = {}, 0
        for name in self._shapes:
            found[name] = end
            end += self._padded(name)
        return found

    def _padded(self, name: str) -> int:
        """Bytes of a piece, in whole 16-byte words."""
        return -(-prod(self._shapes[name]) * 4 // 16) * 16

    @cached_property
    def buffer_bytes(self) -> int:
        """Of one of the buffers."""
        return -(-sum(map(self._padded, self._shapes)) // ALIGNMENT) * ALIGNMENT

    @property
    def bytes(self) -> int:
        """Of all buffers; the allocation is NOT_READY, all bits set, before first use."""
        return self.buffer_bytes * abi.INBOXES

    def buffers(self) -> list[Buffer]:
        """The inbox, and the distances to the ranks' inboxes from it, int64 [MAX_RANKS]."""
        return [
            Buffer("inbox", (self.bytes // 4,), "float32", self.bytes),
            Buffer("peers", (abi.MAX_RANKS,), "int64", abi.MAX_RANKS * 8),
        ]

    def whole(self, name: str, turn: int) -> Ref:
        """The first byte of a piece."""
        return Ref("inbox", turn % abi.INBOXES * self.buffer_bytes + self._offsets[name])

    def own(self, name: str, turn: int) -> Ref:
        """Where this rank's part of a piece begins; not of `eh`, of which it has columns."""
        axis = {"values": 1, "ids": 1}.get(name, 0)
        return Ref("inbox", self.whole(name, turn).offset + self.place * prod(self._shapes[name][axis + 1 :]) * 4)

    def pieces(self, first: str, last: str) -> int:
        """16-byte words from the piece `first` to the end of `last`."""
        return (self._offsets[last] + self._padded(last) - self._offsets[first]) // 16

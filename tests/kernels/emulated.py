"""Ranks that are emulated on one GPU: an inbox each, all in one allocation, and streams of their own."""

from copy import copy
from functools import cache
from time import sleep

import numpy as np

from cuq1.cuda import abi
from cuq1.cuda.graph import stream, synchronize
from cuq1.cuda.launch import launch
from cuq1.cuda.module import build
from cuq1.models.inbox import Inbox
from cuq1.plan.dims import ROWS

NOT_READY = 0xFFFFFFFF


@cache
def streams(gpu):
    """One of each place."""
    return [stream() for _ in range(abi.MAX_RANKS)]


class Ranks:
    """dims.ranks inboxes, NOT_READY."""

    def __init__(self, gpu, dims):
        self.gpu, self.dims = gpu, dims
        self.places = range(dims.ranks)
        self.inboxes = [Inbox(dims, place) for place in self.places]
        self.bytes = self.inboxes[0].bytes
        self.memory = gpu.array(np.full((dims.ranks, self.bytes // 4), NOT_READY, np.uint32))
        apart = np.arange(abi.MAX_RANKS) - np.arange(dims.ranks)[:, None]
        self._peers = gpu.array(apart.astype(np.int64) * self.bytes)

    def peers(self, place):
        return self._peers.data.ptr + place * abi.MAX_RANKS * 8

    def whole(self, place, name, turn):
        return self.memory.data.ptr + place * self.bytes + self.inboxes[place].whole(name, turn).offset

    def own(self, place, name, turn):
        return self.memory.data.ptr + place * self.bytes + self.inboxes[place].own(name, turn).offset

    def where(self, name, turn):
        """The words of a piece, as a slice of an inbox, and their shape."""
        first = self.inboxes[0].whole(name, turn).offset // 4
        width = self.dims.hidden if name in ("o", "y") else self.dims.experts
        return slice(first, first + self.dims.ranks * ROWS * width), (self.dims.ranks, ROWS, width)

    def parts(self, name, turn):
        """What lies in every rank's inbox: uint32 [owner, rank, ROWS, width]."""
        where, shape = self.where(name, turn)
        return self.memory.get()[:, where].reshape(self.dims.ranks, *shape)

    def put(self, name, turn, values):
        """float32 or uint32 [rank, ROWS, width] into every inbox."""
        where, _ = self.where(name, turn)
        self.memory[:, where] = self.gpu.array(values.view(np.uint32).reshape(1, -1))

    def ready_words(self):
        """How many words of all inboxes are not NOT_READY."""
        return int((self.memory != NOT_READY).sum())

    def run(self, *stages, pause=None):
        """Launches each stage [place][(kernel, args, patch)] and waits: what was reported, or None.

        pause: seconds between the first stage's launch and the second one's, which does not wait for it then: places
        have streams of their own in the first one, and the second one has another.
        """
        built = [
            [[(build(k, self.gpu.device.arch, patch), a) for k, a, patch in calls] for calls in stage]
            for stage in stages
        ]
        self.gpu.cupy.cuda.Device().synchronize()
        for number, stage in enumerate(built):
            apart = pause is None or number == 0
            for where, calls in zip(streams(self.gpu), stage, strict=False):
                for function, args in calls:
                    launch(function, args, where if apart else self.gpu.stream)
            if pause is None:
                self._wait()
            else:
                sleep(pause)
        self._wait()
        found = copy(self.gpu.fault.read())
        self.gpu.fault.clear()
        return found

    def _wait(self):
        for handle in (*streams(self.gpu), self.gpu.stream):
            synchronize(handle)

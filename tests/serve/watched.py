"""An engine that counts what is asked of it, can be held at a gate or slowed, and fails on command."""

import threading
import time

from cuq1.sampling import DecodeStream


class Watched:
    """Around an engine. steps: prompt steps and rounds so far; gate: cleared, it holds the next one.

    pause: seconds that each takes longer.
    """

    def __init__(self, engine):
        self._engine = engine
        self.steps = 0
        self.gate = threading.Event()
        self.gate.set()
        self.failure = None
        self.pause = 0.0

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def _step(self):
        self.gate.wait()
        self.steps += 1
        time.sleep(self.pause)
        if self.failure is not None:
            raise self.failure

    def prefill(self, ids, **options):
        self._step()
        return self._engine.prefill(ids, **options)

    def decode(self, params=None, **options):
        stream = self._engine.decode(params, **options)
        return DecodeStream(stream.seed, self._rounds(stream))

    def _rounds(self, stream):
        try:
            while True:
                self._step()
                step = next(stream, None)
                if step is None:
                    return stream.finish_reason
                yield step
        finally:
            stream.close()

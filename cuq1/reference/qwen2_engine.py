"""The NumPy engine of Qwen2 models."""

from collections.abc import Callable, Iterator

import numpy as np

from cuq1.checkpoint.qwen2 import Qwen2Model
from cuq1.config_qwen2 import Qwen2Config
from cuq1.reference.cache import Cache
from cuq1.reference.cpu import CpuEngine
from cuq1.reference.qwen2 import Qwen2Forward
from cuq1.reference.qwen2_weights import load_qwen2
from cuq1.sampling.filter import filtered
from cuq1.sampling.logprobs import token_logprobs
from cuq1.sampling.mask import masked
from cuq1.sampling.params import DecodeParams
from cuq1.sampling.rng import Purpose, uniform
from cuq1.sampling.rounds import Round
from cuq1.sampling.speculative import draw


class Qwen2Engine(CpuEngine):
    """One request at a time on the CPU, in FP32, a token a round: these models have no draft.

    Every position is kept, so that the sequence can be rewound to any length.
    """

    def __init__(
        self,
        model: Qwen2Model,
        *,
        progress: Callable[[int, int], None] | None = None,
        context: int | None = None,
    ) -> None:
        super().__init__()
        self.config: Qwen2Config = model.config
        self._take_context(context)
        self.default_params = DecodeParams(**vars(model.config.sampling))
        self._weights = load_qwen2(model, progress)
        self._reset()

    def _new_caches(self) -> None:
        self._model = self._forward(self.context)

    def _forward(self, room: int) -> Qwen2Forward:
        return Qwen2Forward(self._weights, self.config, room)

    def caches(self) -> Iterator[Cache]:
        """Every layer's."""
        return (layer.cache for layer in self._model.layers)

    @property
    def max_drafts(self) -> int:
        """0: these models have no draft."""
        return 0

    def _restart(self, length: int) -> int:
        """The last of the first `length` tokens, for its logits."""
        return self._done if length == len(self._tokens) else max(0, length - 1)

    def _forget(self, rows: int) -> None:
        if rows > 0:
            self._done -= rows
            self._logits = None

    def _catch_up(self, chunk: int) -> None:
        """Run the tokens that the caches do not hold yet through the model; keep the last one's logits."""
        self._need_logits()
        while self._done < len(self._tokens):
            rows = np.asarray(self._tokens[self._done : self._done + chunk], np.int64)
            hidden = self._model.forward(rows, self._done)
            self._done += len(rows)
            if self._done == len(self._tokens):
                self._logits = self._model.logits(hidden[-1:])[0]

    def _next(self, params: DecodeParams, seed: int, *, from_prompt: bool) -> Round:
        """The token after the sequence."""
        self._catch_up(self.chunk)
        assert self._logits is not None
        logits = masked(self._logits, self._masks.after(()))
        p = filtered(logits, params.temperature, params.top_k, params.top_p)
        token = draw(p, uniform(seed, len(self._tokens), Purpose.TARGET))
        logprobs = token_logprobs(self._logits[None], (token,), params.logprobs)
        return Round((token,), 0, 0, from_prompt=from_prompt, logprobs=logprobs)

    def _first(self, params: DecodeParams, seed: int) -> Round:
        return self._next(params, seed, from_prompt=True)

    def _round(self, params: DecodeParams, seed: int) -> Round:
        return self._next(params, seed, from_prompt=False)

    def _release(self) -> None:
        for name in ("_model", "_weights", "_logits"):
            self.__dict__.pop(name, None)

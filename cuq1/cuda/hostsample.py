"""Sampling on the host, for what needs whole logits: many candidates, a mask, log-probabilities. A step at a time."""

import numpy as np
from numpy.typing import NDArray

from cuq1.cuda import abi
from cuq1.cuda.runtime import Runtime
from cuq1.models.family import plans_of
from cuq1.plan.dims import ROWS
from cuq1.sampling.depth import FEATURE_TOP_K, DepthRule
from cuq1.sampling.filter import Distribution, filtered
from cuq1.sampling.logprobs import token_logprobs
from cuq1.sampling.mask import Allowed, MaskPath, masked
from cuq1.sampling.params import DecodeParams
from cuq1.sampling.rng import Purpose, uniform
from cuq1.sampling.rounds import Round
from cuq1.sampling.speculative import draw, verify


class HostSampler:
    """Drives the target's and the draft's forward passes, and samples from their whole logits.

    Of several ranks, all have the same logits to the bit, and so draw the same.
    """

    def __init__(self, runtime: Runtime, rule: DepthRule) -> None:
        self._runtime = runtime
        self._rule = rule
        self._plans = plans_of(runtime.model)
        self._state = abi.State()
        self._logits = np.empty((ROWS, runtime.model.dims.vocab_total), np.float32)
        self._drafts: list[int] = []
        self._q: list[Distribution] = []

    def first(self, params: DecodeParams, masks: MaskPath, seed: int, done: int, limit: int) -> Round:
        """The first token, from the logits' row 0, which belongs to position done - 1."""
        logits = self._rows(1)
        token = draw(self._distribution(logits[0], params, masks.after(())), uniform(seed, done, Purpose.TARGET))
        logprobs = token_logprobs(logits, (token,), params.logprobs)
        self._state = self._runtime.request(params, seed, done, limit)
        self._draft(params, masks, seed, [token], [0], limit)
        return Round((token,), 0, 0, from_prompt=True, logprobs=logprobs)

    def round(self, params: DecodeParams, masks: MaskPath, seed: int, limit: int) -> Round:
        """Verifies the pending token and its drafts, and drafts after what was committed."""
        state, rows = self._state, len(self._drafts) + 1
        for i, token in enumerate((state.tokens[0], *self._drafts)):
            state.tokens[i], state.positions[i] = token, state.done + i
        self._runtime.send(state)
        self._runtime.target(rows, state.done)
        drafts, logits = self._drafts, self._rows(rows)
        p = [self._distribution(row, params, masks.after(drafts[:i])) for i, row in enumerate(logits)]
        accepted, token = verify(drafts, self._q, p, seed, state.done + 1)
        tokens = [*drafts[:accepted], token]
        logprobs = token_logprobs(logits, tokens, params.logprobs)
        state.done += accepted + 1
        self._draft(params, masks, seed, tokens, list(range(accepted + 1)), limit)
        return Round(tuple(tokens), len(drafts), accepted, logprobs=logprobs)

    def _rows(self, rows: int) -> NDArray[np.float32]:
        self._runtime.read_logits("logits", self._logits[:rows])
        return self._logits[:rows]

    def _distribution(self, logits: NDArray[np.float32], params: DecodeParams, allowed: Allowed | None) -> Distribution:
        return filtered(masked(logits, allowed), params.temperature, params.top_k, params.top_p)

    def _draft(
        self, params: DecodeParams, masks: MaskPath, seed: int, tokens: list[int], hidden: list[int], limit: int
    ) -> None:
        """Settles the draft's rows of the newly committed `tokens`, whose hidden states are rows `hidden`, and drafts.

        The last token is pending: it goes with the hidden state before it, at position done - 1.
        """
        state, model = self._state, self._runtime.model
        state.tokens[0] = tokens[-1]
        self._drafts, self._q = [], []
        if model.draft is None:
            return
        count = len(tokens)
        state.depth_rows[0] = count
        for row in range(count):  # newest first
            state.draft_tokens[row] = tokens[count - 1 - row]
            state.draft_positions[row] = state.done - 1 - row
            state.draft_hidden[row] = hidden[count - 1 - row]
        served: list[float] = []
        entropies: list[float] = []
        for depth in range(max(limit, 1)):
            settle = limit == 0
            self._runtime.send(state)
            self._runtime.run(
                "settle" if settle else "depth",
                1,
                depth,
                lambda depth=depth, settle=settle: self._plans.depth_of(depth, settle_only=settle),  # type: ignore[misc]
            )
            if settle:
                return
            logits, allowed = self._rows(1)[0], masks.after([*tokens, *self._drafts])
            q = self._distribution(logits, params, allowed)
            token = draw(q, uniform(seed, state.done + 1 + depth, Purpose.DRAFT))
            self._q.append(q)
            self._drafts.append(token)
            if params.draft == "auto":
                greedy = params.temperature == 0
                shape = filtered(masked(logits, allowed), 1.0, FEATURE_TOP_K, 1.0) if greedy else q
                served.append(shape.prob(token))
                entropies.append(shape.entropy())
                if not self._rule.more(served, entropies, greedy=greedy):
                    return
            state.depth_rows[depth + 1] = 1
            state.draft_tokens[0], state.draft_positions[0], state.draft_hidden[0] = token, state.done + depth, -1

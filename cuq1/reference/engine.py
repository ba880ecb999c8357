"""The NumPy engine: the CPU's engine, and what every kernel is checked against."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from cuq1.checkpoint import Checkpoint
from cuq1.config import Q1Config, load_sampling_defaults
from cuq1.reference.cache import Cache
from cuq1.reference.cpu import CpuEngine
from cuq1.reference.mtp import DraftForward
from cuq1.reference.ops import F32
from cuq1.reference.q1 import TargetForward
from cuq1.reference.weights import load_draft, load_target
from cuq1.sampling.depth import FEATURE_TOP_K, DepthRule, default_rule
from cuq1.sampling.filter import Distribution, filtered
from cuq1.sampling.logprobs import token_logprobs
from cuq1.sampling.mask import Allowed, masked
from cuq1.sampling.params import DecodeParams
from cuq1.sampling.rng import Purpose, uniform
from cuq1.sampling.rounds import Round
from cuq1.sampling.speculative import Verdict, draw, verify


class ReferenceEngine(CpuEngine):
    """One request at a time on the CPU, in FP32, with no activation quantisation.

    tp > 1 computes with that many ranks' shares and sums them as the ranks of a
    tensor-parallel run would; it is a check, not a speed-up. The sequence that
    the engine holds grows by `prefill` and `decode` and shrinks by `rewind`.
    """

    def __init__(
        self,
        model_dir: str | Path,
        tp: int = 1,
        *,
        progress: Callable[[int, int], None] | None = None,
        depth_rule: DepthRule | None = None,
        context: int | None = None,
    ) -> None:
        super().__init__()
        checkpoint = Checkpoint.open(model_dir)
        self.config: Q1Config = checkpoint.config
        self._take_context(context)
        self.default_params = DecodeParams(**vars(load_sampling_defaults(model_dir, checkpoint.config)))
        self._target_weights = load_target(checkpoint, tp, progress)
        self._draft_weights = load_draft(checkpoint, tp)
        self._draft_config = checkpoint.draft_config
        self._rule = depth_rule or default_rule()
        self._reset()

    saved_counts = ("_done", "_settled")
    saved_arrays = ("_hidden",)

    def _reset(self) -> None:
        """An empty sequence. Raises DeviceError where memory does not hold the caches."""
        super()._reset()
        self._settled = 0  # positions whose draft rows are final
        # Hidden states of positions done - len(hidden) .. done - 1: those that the draft has still to settle.
        self._hidden: F32 = np.empty((0, self.config.hidden_size), np.float32)

    def _clear(self) -> None:
        super()._clear()
        self._settled = 0
        self._hidden = self._hidden[:0]

    def _new_caches(self) -> None:
        self._target = self._forward(self.context)
        self._draft: DraftForward | None = None
        if self._draft_weights is not None and self._draft_config is not None:
            self._draft = DraftForward(self._draft_weights, self._draft_config)

    def _forward(self, room: int) -> TargetForward:
        return TargetForward(self._target_weights, self.config, room)

    def caches(self) -> Iterator[Cache]:
        """Every layer's and rank's, the draft's among them."""
        for layer in self._target.layers:
            yield from layer.caches
        if self._draft is not None:
            yield from self._draft.layer.caches

    @property
    def max_drafts(self) -> int:
        """The most drafts that a round can have; 0 where the checkpoint has no draft."""
        return 0 if self._draft_config is None else self._draft_config.num_draft_slots

    def _restart(self, length: int) -> int | None:
        """Where computing must start again for the first `length` tokens to stand; None where the rings forbid it.

        That is the last of them, for its logits and hidden state, or so much earlier
        that hidden states for the draft's whole window come with it.
        """
        if length == len(self._tokens):
            return self._done
        if length == 0:
            return 0
        first = length - 1
        if self._draft is not None and not self._draft_holds(self._draft, length):
            first = max(0, length - self._draft.config.sliding_window)
        return first if self._target.oldest() <= max(0, first + 1 - self.config.sliding_window) else None

    def _draft_holds(self, draft: DraftForward, length: int) -> bool:
        """Whether the draft's rows before position length - 1 lie in its ring, or can be made from held states."""
        need = max(0, length - draft.config.sliding_window)
        held = self._done - len(self._hidden)
        return need >= held or (need >= draft.oldest() and min(held, length - 1) <= self._settled)

    def _release(self) -> None:
        for name in ("_target", "_draft", "_target_weights", "_draft_weights", "_hidden", "_logits"):
            self.__dict__.pop(name, None)

    def _catch_up(self, chunk: int) -> None:
        """Run the tokens that the caches do not hold yet through the target; keep the last one's logits."""
        self._need_logits()
        while self._done < len(self._tokens):
            rows = np.asarray(self._tokens[self._done : self._done + chunk], np.int64)
            hidden = self._target.forward(rows, self._done)
            self._advance(hidden)
            if self._done == len(self._tokens):
                self._logits = self._target.logits(hidden[-1:])[0]

    def _advance(self, hidden: F32) -> None:
        """Count rows as held by the target's caches, and keep what the draft needs of their hidden states."""
        self._done += len(hidden)
        if self._draft is not None:
            self._hidden = np.concatenate((self._hidden, hidden))[-self._draft.slots :]

    def _distribution(self, logits: F32, params: DecodeParams, allowed: Allowed | None = None) -> Distribution:
        return filtered(masked(logits, allowed), params.temperature, params.top_k, params.top_p)

    def _first(self, params: DecodeParams, seed: int) -> Round:
        """The first token, from the logits after the sequence."""
        self._catch_up(self.chunk)
        assert self._logits is not None
        p = self._distribution(self._logits, params, self._masks.after(()))
        token = draw(p, uniform(seed, len(self._tokens), Purpose.TARGET))
        return Round(
            (token,), 0, 0, from_prompt=True, logprobs=token_logprobs(self._logits[None], (token,), params.logprobs)
        )

    def _forget(self, rows: int) -> None:
        """No longer count the last `rows` positions as held by the caches."""
        if rows > 0:
            self._done -= rows
            self._hidden = self._hidden[: max(0, len(self._hidden) - rows)]
            self._settled = min(self._settled, self._done)

    def _round(self, params: DecodeParams, seed: int) -> Round:
        """Draft from the pending token on, verify all rows at once, apply the rejection rule."""
        drafts, q = self._drafts(params, seed)
        hidden, logits, (accepted, token) = self._verified(drafts, q, params, seed)
        self._advance(hidden[: accepted + 1])
        tokens = (*drafts[:accepted], token)
        return Round(tokens, len(drafts), accepted, logprobs=token_logprobs(logits, tokens, params.logprobs))

    def _verified(
        self, drafts: Sequence[int], q: Sequence[Distribution], params: DecodeParams, seed: int
    ) -> tuple[F32, F32, Verdict]:
        """Hidden states [drafts + 1, H] and logits of the pending token and the drafts, and what the rule says."""
        start = self._done
        hidden = self._target.forward(np.asarray([self._tokens[start], *drafts], np.int64), start)
        logits = self._target.logits(hidden)
        p = [self._distribution(row, params, self._masks.after(drafts[:i])) for i, row in enumerate(logits)]
        return hidden, logits, verify(drafts, q, p, seed, start + 1)

    def _drafts(self, params: DecodeParams, seed: int) -> tuple[list[int], list[Distribution]]:
        """The drafts after the pending token, each with the distribution that it was drawn from."""
        pending = self._done  # the position of the pending token, the last committed one
        limit = min(self.max_drafts, self.context - len(self._tokens) - 1)
        if isinstance(params.draft, int):
            limit = min(limit, params.draft)
        if self._draft is None or params.draft == "off" or limit < 1:
            return [], []
        self._settle(self._draft)
        hidden = self._hidden[-1:]
        token = self._tokens[pending]
        drafts: list[int] = []
        q: list[Distribution] = []
        served: list[float] = []
        entropies: list[float] = []
        while True:
            depth = len(drafts)
            hidden, logits = self._draft.forward(np.asarray([token], np.int64), hidden, pending - 1 + depth)
            allowed = self._masks.after(drafts)
            q.append(self._distribution(logits[0], params, allowed))
            token = draw(q[-1], uniform(seed, pending + 1 + depth, Purpose.DRAFT))
            drafts.append(token)
            if len(drafts) == limit:
                return drafts, q
            if params.draft == "auto":
                greedy = params.temperature == 0
                shape = filtered(masked(logits[0], allowed), 1.0, FEATURE_TOP_K, 1.0) if greedy else q[-1]
                served.append(shape.prob(token))
                entropies.append(shape.entropy())
                if not self._rule.more(served, entropies, greedy=greedy):
                    return drafts, q

    def _settle(self, draft: DraftForward) -> None:
        """Overwrite the draft's rows of newly committed positions with the true tokens and hidden states.

        The last of them is left to the first draft depth, which computes it whole.
        """
        last = self._done - 1
        first = max(self._settled, self._done - len(self._hidden))
        if first < last:
            held = self._done - len(self._hidden)
            draft.settle(
                np.asarray(self._tokens[first + 1 : last + 1], np.int64),
                self._hidden[first - held : last - held],
                first,
            )
        self._settled = last
        self._hidden = self._hidden[-1:]

"""Masked requests: what is committed is allowed, and follows the target's masked distribution; broken rules do not."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from cuq1 import open_engine
from cuq1.errors import Cuq1Error, RequestError
from cuq1.reference import engine as engine_module
from cuq1.reference.engine import ReferenceEngine
from cuq1.sampling import DecodeParams, MaskPath, filtered, masked, token_logprob
from tests.masks import Lenient, Walk
from tests.paths import NANO
from tests.unit.test_distribution import IDS, PARAMS, ROUNDS
from tests.unit.test_distribution import engine as engine  # noqa: PLC0414  (a fixture)
from tools.check_distribution import FALSE_ALARM, p_values
from tools.checkpoint_qwen2 import qwen2_config
from tools.make_checkpoint import write_qwen2_checkpoint


def test_two_tokens_follow_the_masked_distribution(engine):
    found = p_values(engine, IDS, replace(PARAMS, draft="auto"), range(ROUNDS // 8), mask=Walk)
    assert min(found.values()) > FALSE_ALARM, found


def test_the_bonus_token_follows_too(engine):
    found = p_values(engine, IDS, PARAMS, range(ROUNDS // 10), length=3, mask=lambda: Walk(share=8))
    assert min(found.values()) > FALSE_ALARM, found


def test_a_target_without_the_mask_is_rejected(engine, monkeypatch):
    def only_drafts(self, drafts, q, params, seed):
        masks, self._masks = self._masks, MaskPath()
        try:
            return verified(self, drafts, q, params, seed)
        finally:
            self._masks = masks

    verified = ReferenceEngine._verified
    monkeypatch.setattr(ReferenceEngine, "_verified", only_drafts)
    assert min(p_values(engine, IDS, PARAMS, range(ROUNDS // 100), mask=Lenient).values()) < FALSE_ALARM


@pytest.mark.parametrize("drawn", ["masked", "unmasked"])
def test_drafts_judged_by_another_q_are_rejected(engine, monkeypatch, drawn):
    """The mask on p, and on q only where drafts are drawn, or only where they are judged."""
    verify, rows = engine_module.verify, []

    def both(logits, temperature, top_k, top_p):
        rows.append((logits, filtered(logits, temperature, top_k, top_p)))
        return rows[-1][1]

    def misjudged(drafts, q, p, seed, position):
        return verify(drafts, others[-len(q) :] if q else q, p, seed, position)

    others = []

    def apart(self, logits, params, allowed=None):
        without = filtered(logits, params.temperature, params.top_k, params.top_p)
        within = filtered(masked(logits, allowed), params.temperature, params.top_k, params.top_p)
        if logits.ndim == 1 and self._drafting:
            others.append(without if drawn == "masked" else within)
            return within if drawn == "masked" else without
        return within

    def drafting(self, params, seed):
        self._drafting = True
        others.clear()
        try:
            return drafts(self, params, seed)
        finally:
            self._drafting = False

    drafts = ReferenceEngine._drafts
    monkeypatch.setattr(ReferenceEngine, "_drafting", False, raising=False)
    monkeypatch.setattr(ReferenceEngine, "_drafts", drafting)
    monkeypatch.setattr(ReferenceEngine, "_distribution", apart)
    monkeypatch.setattr(engine_module, "verify", misjudged)
    assert min(p_values(engine, IDS, PARAMS, range(ROUNDS // 10), mask=Lenient).values()) < FALSE_ALARM


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("draft", ["off", 3, "auto"])
def test_every_committed_token_is_allowed_and_the_mask_knows_them(temperature, draft):
    with ReferenceEngine(NANO) as opened:
        for salt in range(2):
            mask = Walk(opened.vocab_size, salt)
            opened.prefill([5, 6, 7, 8, salt])
            params = DecodeParams(max_tokens=60, temperature=temperature, top_k=20, seed=salt, draft=draft)
            drafted = 0
            for step in opened.decode(params, mask=mask):
                drafted += step.drafted
                assert tuple(mask.tokens) == opened.tokens[5:]
            assert len(mask.tokens) == 60
            assert (drafted > 0) == (draft != "off")


def test_a_mask_changes_nothing_where_it_allows_all():
    class Everything(Lenient):
        def allowed(self):
            return None

    with ReferenceEngine(NANO) as opened:
        params = DecodeParams(max_tokens=50, top_k=20, seed=4)
        texts = []
        for mask in (None, Everything(), Lenient(opened.vocab_size, share=1), Walk(opened.vocab_size)):
            opened.prefill([5, 6, 7])
            texts.append([tuple(step) for step in opened.decode(params, mask=mask)])
    assert texts[0] == texts[1] == texts[2] != texts[3]


def test_a_mask_that_allows_nothing_ends_the_request_alone():
    class Nothing(Lenient):
        def allowed(self):
            return np.zeros(self.vocab, np.bool_)

    with ReferenceEngine(NANO) as opened:
        params = DecodeParams(max_tokens=20, top_k=20, seed=4)
        opened.prefill([5, 6, 7])
        expected = list(opened.decode(params))
        opened.prefill([5, 6, 7])
        with pytest.raises(Cuq1Error, match="allows no token"):
            list(opened.decode(params, mask=Nothing(opened.vocab_size)))
        opened.prefill([5, 6, 7])
        assert list(opened.decode(params)) == expected


def test_the_path_goes_back_as_far_as_it_must():
    rng = random.Random()
    for _ in range(200):
        mask, committed = Walk(share=1), []
        path = MaskPath(mask)
        for _ in range(6):
            tokens = [rng.randrange(3) for _ in range(rng.randrange(5))]
            for end in sorted({rng.randrange(len(tokens) + 1) for _ in range(4)}, key=lambda _: rng.random()):
                alone = Walk(share=1)
                alone.tokens = [*committed, *tokens[:end]]
                assert (path.after(tokens[:end]) == alone.allowed()).all()
            final = [*tokens[: rng.randrange(len(tokens) + 1)], rng.randrange(3)]
            path.commit(final)
            committed += final
            assert mask.tokens == committed
    assert MaskPath().after([1, 2]) is None


def all_allowed(tokens):
    walk = Walk(512)
    for token in tokens:
        if not walk.allowed()[token]:
            return False
        walk.push(token)
    return True


def log_softmax(logits):
    top = max(logits)
    total = math.fsum(math.exp(x - top) for x in logits)
    return [x - top - math.log(total) for x in logits]


def test_log_probabilities_are_the_models_own():
    """Whatever temperature, filters and mask make of them."""
    with ReferenceEngine(NANO) as opened:
        for params in (
            DecodeParams(max_tokens=40, temperature=0.3, top_k=3, top_p=0.5, seed=1, logprobs=4),
            DecodeParams(max_tokens=40, temperature=0, logprobs=0, draft=7),
        ):
            ids = [5, 6, 7, 8]
            opened.prefill(ids)
            mask = Walk(opened.vocab_size) if params.seed else None
            steps = list(opened.decode(params, mask=mask))
            tokens = [token for step in steps for token in step]
            entries = [entry for step in steps for entry in step.logprobs]
            assert len(entries) == len(tokens) == 40
            rows = opened.score([*ids, *tokens])[3:-1].astype(np.float64).tolist()
            for row, token, entry in zip(rows, tokens, entries, strict=True):
                expected = log_softmax(row)
                assert entry.logprob == pytest.approx(expected[token], abs=1e-4)
                ranked = sorted(range(len(row)), key=lambda i: (-row[i], i))[: params.logprobs]
                assert [i for i, _ in entry.top] == ranked
                assert [x for _, x in entry.top] == pytest.approx([expected[i] for i in ranked], abs=1e-4)
            opened.prefill(ids)
            assert not any(step.logprobs for step in opened.decode(replace(params, logprobs=None)))


def test_log_probabilities_of_ties_and_edges():
    logits = np.array([1, 3, 3, -np.inf, 3], np.float32)
    entry = token_logprob(logits, 4, 2)
    assert [i for i, _ in entry.top] == [1, 2]
    assert entry.logprob == pytest.approx(math.log(math.exp(3) / (3 * math.exp(3) + math.exp(1))))
    assert token_logprob(logits, 3, 0) == (-math.inf, ())
    assert len(token_logprob(logits, 0, 20).top) == 5
    for wrong in (-1, 21, 1.5, True, "2"):
        with pytest.raises(RequestError, match="logprobs must be an integer from 0 to 20"):
            DecodeParams(logprobs=wrong)


def test_qwen2_models_too(tmp_path):
    config = qwen2_config("qwen2.5-coder-0.5b-tiny", max_position_embeddings=300, tie_word_embeddings=False)
    ids, params, mask = list(range(20)), DecodeParams(seed=5, max_tokens=40, logprobs=1), Walk(512)
    with open_engine(write_qwen2_checkpoint(tmp_path / "hf", config, seed=3), "cpu") as opened:
        opened.prefill(ids)
        steps = list(opened.decode(params, mask=mask))
        tokens = [token for step in steps for token in step]
        assert mask.tokens == tokens
        rows = opened.score([*ids, *tokens])[len(ids) - 1 : -1].tolist()
        for row, token, (entry,) in zip(rows, tokens, (step.logprobs for step in steps), strict=True):
            expected = log_softmax(row)
            assert entry.logprob == pytest.approx(expected[token], abs=1e-4)
            assert entry.top == ((int(np.argmax(row)), pytest.approx(max(expected), abs=1e-4)),)
        opened.prefill(ids)
        free = [token for step in opened.decode(replace(params, logprobs=None)) for token in step]
        assert not all_allowed(free)
        assert all_allowed(tokens)


def test_cut_rounds_keep_as_many_log_probabilities_as_tokens():
    with ReferenceEngine(NANO) as opened:
        for count in range(1, 9):
            opened.prefill([5, 6, 7])
            for step in opened.decode(DecodeParams(max_tokens=count, seed=2, top_k=20, logprobs=1, draft=7)):
                assert len(step.logprobs) == len(step)

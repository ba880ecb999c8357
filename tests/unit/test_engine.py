"""The engine's bookkeeping: drafts, chunks, rewinds and earlier requests must not show in what it computes."""

import sys

import numpy as np
import pytest

from cuq1 import DecodeParams, open_engine
from cuq1.errors import Cuq1Error, RequestError
from cuq1.reference import q1
from cuq1.reference.cache import RingCache
from cuq1.reference.engine import ReferenceEngine
from tools.make_checkpoint import tiny_config, write_checkpoint

DRAFTS = ["off", 1, 2, 3, 4, 5, 6, 7, "auto"]


def prompt(length, seed=None):
    return np.random.default_rng(seed).integers(0, 96, length).tolist()


def generate(engine, ids=None, **params):
    """All tokens of one request; with ids, of a fresh prompt."""
    if ids is not None:
        engine.prefill(ids)
    return [token for step in engine.decode(DecodeParams(**params)) for token in step]


def cache_rows(engine):
    """Every cache's keys and values at the positions that a later query can see, target then draft."""
    rows = []
    done = engine._done
    for layer in [*engine._target.layers, engine._draft.layer]:
        end = done if layer is not engine._draft.layer else engine._settled
        for cache in layer.caches:
            first = 0 if cache.window is None else max(0, end - cache.window + 1)
            if first < end:
                keys, values, start = cache.read(first, end - 1)
                span = slice(first - start, end - start)
                flat_shape = (keys.shape[0], -1, keys.shape[-1])
                rows += [keys.reshape(flat_shape)[:, span].copy(), values.reshape(flat_shape)[:, span].copy()]
    return rows


def equal(a, b):
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture
def engine(tiny):
    with ReferenceEngine(tiny) as opened:
        yield opened


@pytest.fixture
def other(tiny):
    with ReferenceEngine(tiny) as opened:
        yield opened


def test_greedy_output_does_not_depend_on_drafts(engine):
    """Through several wraps of both rings (88 and 72 slots)."""
    for length in (1, 30, 150):
        ids = prompt(length)
        expected = generate(engine, ids, temperature=0, draft="off", max_tokens=200)
        for draft in DRAFTS[1:]:
            assert generate(engine, ids, temperature=0, draft=draft, max_tokens=200) == expected


def test_greedy_check_notices_a_ring_without_slack(engine, monkeypatch):
    ids = prompt(90, seed=1)
    expected = generate(engine, ids, temperature=0, draft="off", max_tokens=120)

    class Tight(RingCache):
        def __init__(self, kv_heads, head_dim, window):
            super().__init__(kv_heads, head_dim, window, slots=window)

    monkeypatch.setattr(q1, "RingCache", Tight)
    engine.rewind(0)
    assert generate(engine, ids, temperature=0, draft=7, max_tokens=120) != expected


def test_first_rows_logits_are_scores(engine):
    """Verification computes what `score` computes: the same bits."""
    ids = prompt(40)
    engine.prefill(ids)
    assert np.array_equal(engine._logits, engine.score(ids)[-1])
    tokens = generate(engine, temperature=0, draft=5, max_tokens=60)
    scores = engine.score([*ids, *tokens])
    assert scores[len(ids) - 1 : -1].argmax(axis=1).tolist() == tokens


@pytest.mark.parametrize("chunk", [1, 3, 8, 31, 64, 65, 300])
def test_prefill_does_not_depend_on_the_chunk(engine, other, chunk):
    ids = prompt(230)
    engine.prefill(ids)
    other.prefill(ids, chunk=chunk)
    assert np.array_equal(engine._logits, other._logits)
    for each in (engine, other):
        each._settle(each._draft)
    assert equal(cache_rows(engine), cache_rows(other))
    params = {"seed": 9, "max_tokens": 40}
    assert generate(engine, **params) == generate(other, **params)


@pytest.mark.parametrize("draft", [1, 4, 7, "auto"])
def test_a_round_leaves_what_a_fresh_computation_would(engine, other, draft):
    """After every round, caches and the next drafts equal those of an engine that prefilled the committed tokens."""
    engine.prefill(prompt(70))
    steps = engine.decode(DecodeParams(seed=3, draft=draft, max_tokens=90))
    for step in steps:
        assert len(step) == step.accepted + 1 or steps.finish_reason != "stop"
        committed = engine.tokens
        other.rewind(0)
        other.prefill(committed[:-1])
        other._tokens.append(committed[-1])
        for each in (engine, other):
            each._settle(each._draft)
        assert equal(cache_rows(engine), cache_rows(other))
        assert np.array_equal(engine._hidden[-1:], other._hidden[-1:])


def test_settling_check_notices_rows_left_by_drafting(engine, other):
    """Control: skipping the settlement leaves rows made from drafted tokens and the draft's own hidden states."""
    engine.prefill(prompt(70, seed=2))
    for _ in engine.decode(DecodeParams(seed=3, draft=7, max_tokens=30)):
        pass
    other.prefill(engine.tokens[:-1])
    other._settle(other._draft)
    engine._settled = engine._done - 1  # pretend
    assert not equal(cache_rows(engine), cache_rows(other))


@pytest.mark.parametrize("draft", ["off", 3, "auto"])
def test_same_seed_same_output(tiny, engine, draft):
    ids = prompt(100)
    params = {"seed": 2**63 + 12345, "draft": draft, "top_k": 20, "top_p": 0.95, "max_tokens": 50}
    first = generate(engine, ids, **params)
    generate(engine, prompt(33), max_tokens=50)  # another request in between
    assert generate(engine, ids, **params) == first
    engine.rewind(len(ids) - 3)
    engine.prefill(ids)
    assert generate(engine, **params) == first
    engine.rewind(len(ids))
    assert generate(engine, **params) == first
    with ReferenceEngine(tiny) as fresh:
        assert generate(fresh, ids, **params) == first
    assert generate(engine, ids, **{**params, "seed": 1}) != first


def test_a_smaller_budget_gives_a_prefix(engine):
    ids = prompt(20)
    whole = generate(engine, ids, seed=4, max_tokens=60)
    for budget in range(1, 25):
        assert generate(engine, ids, seed=4, max_tokens=budget) == whole[:budget]


def test_unseeded_requests_get_fresh_seeds(engine):
    ids = prompt(10)
    outputs, seeds = set(), set()
    for _ in range(5):
        engine.prefill(ids)
        stream = engine.decode(DecodeParams(max_tokens=12))
        outputs.add(tuple(token for step in stream for token in step))
        seeds.add(stream.seed)
    assert len(seeds) == len(outputs) == 5
    seed = seeds.pop()
    assert tuple(generate(engine, ids, seed=seed, max_tokens=12)) in outputs


def test_a_conversation_reuses_what_is_held(engine, other):
    ids = prompt(60)
    assert engine.prefill(ids) == 0
    answer = generate(engine, seed=1, max_tokens=10)
    turn = [*ids, *answer, *prompt(15)]
    assert engine.prefill(turn) == len(ids) + len(answer) - 1  # the last token had not been through the target
    other.prefill(turn)
    assert np.array_equal(engine._logits, other._logits)
    assert generate(engine, seed=1, max_tokens=30) == generate(other, seed=1, max_tokens=30)
    assert engine.prefill(prompt(50, seed=8)) == 0


def test_rewind_inside_the_rings_equals_a_fresh_prefill(engine, other):
    ids = prompt(140)
    engine.prefill(ids)
    generate(engine, seed=6, draft=7, max_tokens=20)
    whole = engine.tokens
    for length in (158, 150, 140, 131):
        engine.rewind(length)
        assert engine.tokens == whole[:length]
        other.rewind(0)
        other.prefill(whole[:length])
        for draft in ("auto", "off"):
            params = {"seed": 8, "draft": draft, "max_tokens": 12}
            assert generate(engine, **params) == generate(other, **params)
            engine.rewind(length)
            other.rewind(length)


def test_rewind_beyond_the_rings_is_refused_and_harmless(engine):
    ids = prompt(140)
    engine.prefill(ids)
    oldest = engine._target.oldest()
    assert oldest == 140 - 88
    lowest = oldest + 24  # the window of 24 below it is still held
    with pytest.raises(RequestError, match=r"rewind to 75 .* prefill"):
        engine.rewind(lowest - 1)
    assert engine.tokens == tuple(ids)
    engine.rewind(lowest)
    after = generate(engine, seed=1, max_tokens=20)
    assert generate(engine, ids[:lowest], seed=1, max_tokens=20) == after
    with pytest.raises(RequestError, match="outside the sequence"):
        engine.rewind(10_000)
    engine.prefill(ids[:10])  # further back than the rings hold: computed afresh
    assert engine.tokens == tuple(ids[:10])
    engine.rewind(0)
    assert engine.tokens == ()


@pytest.mark.parametrize("draft", ["off", 7])
def test_rewind_beyond_the_drafts_ring_recomputes_its_rows(tmp_path, draft):
    """The target's ring of 264 still holds everything when the draft's, of 72, has wrapped twice."""
    raw = tiny_config(sliding_window=200)
    folder = write_checkpoint(tmp_path / "model", *raw, seed=5)
    ids = prompt(60)
    with ReferenceEngine(folder) as engine, ReferenceEngine(folder) as other:
        engine.prefill(ids)
        generate(engine, seed=1, draft=draft, max_tokens=190)
        for length in (200, 70, 60, 3, 1):
            engine.rewind(length)
            other.rewind(0)
            other.prefill(engine.tokens)
            assert generate(engine, seed=2, draft=7, max_tokens=30) == generate(other, seed=2, draft=7, max_tokens=30)
            engine.rewind(length)


def test_rewind_after_decoding_without_drafts(engine, other):
    """The draft's cache lags then, and is filled from hidden states that are still held."""
    engine.prefill(prompt(100))
    generate(engine, seed=1, draft="off", max_tokens=150)
    for length in (240, 215):
        engine.rewind(length)
        other.rewind(0)
        other.prefill(engine.tokens)
        assert generate(engine, seed=2, draft=7, max_tokens=9) == generate(other, seed=2, draft=7, max_tokens=9)


def test_stop_tokens_end_the_request_anywhere_in_a_round(engine):
    ids = prompt(20, seed=3)
    whole = generate(engine, ids, seed=12, draft=7, max_tokens=40)
    for i in range(1, 30):
        if whole[i] in whole[:i]:
            continue
        engine.prefill(ids)
        stream = engine.decode(DecodeParams(seed=12, draft=7, max_tokens=40, stop_tokens=(whole[i], 1000)))
        assert [token for step in stream for token in step] == whole[: i + 1]
        assert stream.finish_reason == "stop"
        assert engine.tokens == (*ids, *whole[: i + 1])
        # and the engine goes on from exactly there
        fresh = generate(engine, list(engine.tokens), seed=5, max_tokens=8)
        engine.rewind(0)
        assert generate(engine, [*ids, *whole[: i + 1]], seed=5, max_tokens=8) == fresh


def test_decode_continues_where_the_last_one_ended(engine, other):
    engine.prefill(prompt(30, seed=4))
    for _ in range(3):
        generate(engine, seed=1, max_tokens=7)
    other.prefill(engine.tokens)
    assert generate(engine, seed=2, max_tokens=9) == generate(other, seed=2, max_tokens=9)


def test_leaving_the_loop_early_keeps_what_was_yielded(engine, other):
    ids = prompt(30)
    engine.prefill(ids)
    seen = []
    for step in engine.decode(DecodeParams(seed=1, draft=5, max_tokens=50)):
        seen += step
        if len(seen) > 12:
            break
    assert engine.tokens == (*ids, *seen)
    other.prefill(engine.tokens)
    assert generate(engine, seed=2, max_tokens=9) == generate(other, seed=2, max_tokens=9)


@pytest.mark.parametrize("draft", ["off", 3, 7, "auto"])
@pytest.mark.parametrize("short", [1, 2, 5, 9])
def test_the_context_ends_at_its_last_position(engine, draft, short):
    ids = prompt(512 - short)
    engine.prefill(ids)
    stream = engine.decode(DecodeParams(seed=1, draft=draft))
    tokens = [token for step in stream for token in step]
    assert len(tokens) == short
    assert stream.finish_reason == "length"
    assert len(engine.tokens) == engine.context == 512
    with pytest.raises(RequestError, match="512"):
        engine.decode()


def test_requests_that_cannot_be_served(engine, tiny):
    with pytest.raises(RequestError, match="prefill a prompt"):
        engine.decode()
    with pytest.raises(RequestError, match="prompt is empty"):
        engine.prefill([])
    with pytest.raises(RequestError, match=r"prompt has 512 tokens.* 512"):
        engine.prefill(prompt(512))
    with pytest.raises(RequestError, match=r"700 tokens.* 512 is smaller"):
        engine.score(prompt(700))
    assert engine.score(prompt(512)).shape == (512, 96)
    for bad in (96, -1):
        with pytest.raises(RequestError, match=rf"id {bad} is outside the vocabulary of 96"):
            engine.prefill([1, bad])
    for chunk in (0, 2.5, "a"):
        with pytest.raises(RequestError, match="chunk"):
            engine.prefill([1], chunk=chunk)
    with pytest.raises(RequestError, match="number of tokens"):
        engine.rewind("x")
    engine.prefill([1])
    with pytest.raises(RequestError, match="DecodeParams"):
        engine.decode({"temperature": 0})
    for bad_ids in ("text", [1.5], [None]):
        with pytest.raises(RequestError, match="integer token ids"):
            engine.prefill(bad_ids)
    for device, error in (("cuda", Cuq1Error), ("tpu", RequestError)):
        with pytest.raises(error, match="device"):
            open_engine(tiny, device=device)
    with pytest.raises(RequestError, match="tp must be"):
        open_engine(tiny, tp=0)


def test_a_closed_engine_says_so(tiny):
    engine = open_engine(tiny, "cpu")
    engine.close()
    engine.close()
    for call in (lambda: engine.prefill([1]), engine.decode, lambda: engine.score([1])):
        with pytest.raises(RequestError, match="closed"):
            call()


def test_a_superseded_request_does_not_go_on(engine):
    for disturb in (lambda: engine.prefill(prompt(9)), lambda: engine.rewind(11), engine.decode, engine.close):
        engine.prefill(prompt(10))
        stream = engine.decode(DecodeParams(max_tokens=50))
        next(stream)
        disturb()
        with pytest.raises(RequestError, match="decode again"):
            next(stream)


def interrupted_after(count):
    """A trace function that presses Ctrl-C at the `count`-th line executed in the reference."""

    def trace(frame, event, arg):
        nonlocal count
        if "/cuq1/reference/" not in frame.f_code.co_filename:
            return None
        if event == "line":
            count -= 1
            if count == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    return trace


@pytest.mark.parametrize("call", ["prefill", "decode", "rewind"])
def test_an_interrupt_anywhere_leaves_a_usable_engine(engine, other, call):
    """At random lines of the computation; afterwards the engine continues as a fresh one does."""
    rng = np.random.default_rng()
    reached = 0
    for _ in range(12):
        engine.prefill(prompt(100))
        generate(engine, seed=1, max_tokens=10)
        longer = [*engine.tokens, *prompt(20)]
        calls = {
            "prefill": lambda ids=longer: engine.prefill(ids),
            "decode": lambda: generate(engine, seed=2, max_tokens=12),
            "rewind": lambda: engine.rewind(80),
        }
        limit = {"prefill": 900, "decode": 6000, "rewind": 25}[call]
        sys.settrace(interrupted_after(int(rng.integers(1, limit))))
        try:
            calls[call]()
        except KeyboardInterrupt:
            reached += 1
        finally:
            sys.settrace(None)
        other.rewind(0)
        other.prefill(engine.tokens)
        assert generate(engine, seed=3, max_tokens=12) == generate(other, seed=3, max_tokens=12)
    assert reached > 3


def test_an_interrupted_prefill_forgets_the_old_logits(engine, other, monkeypatch):
    ids = prompt(30)
    engine.prefill(ids[:20])
    with monkeypatch.context() as patch:
        patch.setattr(q1, "head_logits", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            engine.prefill(ids)
    other.prefill(ids)
    assert generate(engine, temperature=0, max_tokens=5) == generate(other, temperature=0, max_tokens=5)


def test_score_leaves_the_sequence_alone(engine):
    ids = prompt(50)
    engine.prefill(ids)
    expected = generate(engine, seed=1, max_tokens=20)
    engine.prefill(ids)
    engine.score(prompt(200))
    assert generate(engine, seed=1, max_tokens=20) == expected


def test_checkpoint_without_a_draft(tmp_path):
    target, _ = tiny_config()
    folder = write_checkpoint(tmp_path / "model", target, None, seed=5)
    with ReferenceEngine(folder) as engine:
        ids = prompt(20)
        expected = generate(engine, ids, seed=1, draft="off", max_tokens=20)
        assert generate(engine, ids, seed=1, draft="auto", max_tokens=20) == expected
        with pytest.raises(RequestError, match=r"3 drafts .* no draft model"):
            engine.decode(DecodeParams(draft=3))


def test_fewer_draft_slots_limit_the_rounds(tmp_path):
    target, draft = tiny_config(num_draft_slots=2)
    with ReferenceEngine(write_checkpoint(tmp_path / "model", target, draft, seed=5)) as engine:
        engine.prefill(prompt(20))
        assert max(step.drafted for step in engine.decode(DecodeParams(max_tokens=30))) == 2


def test_rounds_report_what_was_drafted_and_accepted(engine):
    engine.prefill(prompt(20))
    steps = list(engine.decode(DecodeParams(seed=1, draft=4, max_tokens=50)))
    assert steps[0].from_prompt
    assert (steps[0].drafted, len(steps[0])) == (0, 1)
    for step in steps[1:-1]:
        assert not step.from_prompt
        assert step.drafted == 4
        assert 0 <= step.accepted <= 4
        assert len(step) == step.accepted + 1
    assert sum(map(len, steps)) == 50


def test_default_params_come_from_the_checkpoint(tiny):
    with ReferenceEngine(tiny) as engine:
        assert engine.default_params == DecodeParams(temperature=1.0, top_k=20, top_p=0.95, stop_tokens=(0,))

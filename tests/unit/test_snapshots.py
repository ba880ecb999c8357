"""Conversations that take turns on one engine: each finds what was remembered of it, and the answers stay the same."""

import random

import numpy as np
import pytest

from cuq1 import open_engine
from cuq1.reference.cpu import EngineSaver
from cuq1.reference.engine import ReferenceEngine
from cuq1.sampling import DecodeParams
from cuq1.snapshots import SnapshotStore, common
from tools.checkpoint_qwen2 import qwen2_config
from tools.make_checkpoint import write_qwen2_checkpoint

SEED = random.randrange(10**6)
PLENTY = 1 << 30


class FakeCopy:
    def __init__(self, saver, values):
        self.saver, self.values, self.first_tier, self.freed = saver, values, True, False
        saver.copies.append(self)

    @property
    def nbytes(self):
        return 10 * len(self.values)

    def spill(self):
        assert self.first_tier
        assert not self.freed
        self.first_tier = False
        return True

    def free(self):
        assert not self.freed
        self.freed = True


class FakeSaver:
    """Caches that hold one number a position, and a state of three."""

    padding = 0

    def __init__(self, slack=2):
        self.slack, self.state_bytes, self.copies = slack, 30, []
        self.rows = np.zeros(1000, np.int64)
        self.state = None

    def row_bytes(self):
        return 10

    def written(self, marks):
        return marks

    def copy_rows(self, start, end):
        return FakeCopy(self, self.rows[start:end].copy())

    def put_rows(self, copy, first, start, end):
        assert not copy.freed
        self.rows[start:end] = copy.values[start - first : end - first]

    def held(self):
        return [copy for copy in self.copies if not copy.freed]


class FakeEngine:
    """Follows tokens as SequenceEngine does; a position's row is its token."""

    def __init__(self, first, second=0, slack=2):
        self.saver = FakeSaver(slack)
        self.store = SnapshotStore(self.saver, first, second)
        self.tokens = []

    def prefill(self, ids):
        held = common(np.array(self.tokens, np.int32), np.array(ids, np.int32))
        live = held if len(self.tokens) - held <= 2 else 0  # as rings do
        found = self.store.best(ids, live)
        if found is not None:
            self.store.restore(found)
            self.tokens = found.tokens.tolist()
            assert self.saver.rows[: len(found)].tolist() == self.tokens, "rows that are not the sequence's"
            live = common(found.tokens, np.array(ids, np.int32))
        self.store.reached(ids, live)
        self.store.overwrite(live, len(ids), ids)
        self.tokens = list(ids)
        self.saver.rows[live : len(ids)] = ids[live:]
        return live

    def remember(self, hint="", turn=True):
        if self.store.find(self.tokens, hint, turn=turn) is not None:
            return
        state = self.store.copied(self.saver.state_bytes, lambda: FakeCopy(self.saver, np.zeros(3)))
        if state is not None:
            self.store.add(self.tokens, state, len(self.tokens), hint=hint, turn=turn)

    def check(self):
        store = self.store
        first, second = store.nbytes
        assert first <= store._first
        assert second <= store._second
        assert first + second == sum(copy.nbytes for copy in self.saver.held())
        for one in store._snapshots:
            assert (self.saver.rows[: len(one)][one.intact] == one.tokens[one.intact]).all()
            for piece in one.pieces:
                assert (
                    piece.copy.values[: piece.end - piece.start].tolist()
                    == one.tokens[piece.start : piece.end].tolist()
                )
            assert (one.intact | ~one.lacking()).all()


def conversation(rng):
    return [rng.randrange(3) for _ in range(rng.randrange(1, 30))]


def play(rng, engine, steps=50):
    conversations = [conversation(rng) for _ in range(4)]
    kept = []
    for _ in range(steps):
        i = rng.randrange(4)
        kept.append(engine.prefill(conversations[i]) / len(conversations[i]))
        engine.check()
        engine.remember(rng.choice(["", "main"]), turn=rng.random() < 0.8)
        engine.check()
        if rng.random() < 0.1:
            engine.store.lost()
            engine.saver.rows[:] = -1
            engine.tokens = []
            engine.check()
        if len(conversations[i]) > 200:
            conversations[i] = conversation(rng)
        cut = rng.choice([0, 0, 1, 2, 5])
        conversations[i] = conversations[i][: len(conversations[i]) - cut] + conversation(rng)
    return float(np.mean(kept))


def plays(make, count):
    for number in range(count):
        play(random.Random(SEED + number), make(PLENTY))


@pytest.mark.parametrize(("first", "second"), [(PLENTY, 0), (3000, 0), (800, 0), (40, 0), (800, 3000), (200, PLENTY)])
@pytest.mark.parametrize("slack", [2, None])
def test_rows_come_back_as_they_were_and_bounds_hold(first, second, slack):
    kept = []
    for number in range(5):
        rng = random.Random(SEED + number)
        engine = FakeEngine(first, second, slack)
        kept.append(play(rng, engine))
        engine.store.clear()
        assert engine.saver.held() == []
    assert first + second < 2000 or np.mean(kept) > 0.3, np.mean(kept)


def test_without_copies_the_rows_are_wrong(monkeypatch):
    monkeypatch.setattr(SnapshotStore, "overwrite", lambda self, start, end, tokens: None)
    with pytest.raises((AssertionError, StopIteration)):
        plays(FakeEngine, 12)


def test_a_restore_that_forgets_whose_rows_are_where_is_noticed(monkeypatch):
    restore = SnapshotStore.restore

    def forgetful(self, snapshot):
        before = [(one, one.intact.copy()) for one in self._snapshots]
        restore(self, snapshot)
        for one, intact in before:
            one.intact = intact

    monkeypatch.setattr(SnapshotStore, "restore", forgetful)
    with pytest.raises((AssertionError, StopIteration)):
        plays(FakeEngine, 12)


def turns(engine, conversation, count, grow=40, hint=""):
    """Turns of one conversation; returns what each kept."""
    kept = []
    for _ in range(count):
        kept.append(engine.prefill(conversation))
        engine.remember(hint)
        conversation += [9] * grow
    return kept


@pytest.mark.parametrize("hint", ["", "title"])
def test_requests_that_nobody_comes_back_to_take_no_conversations_place(hint):
    """Room for the conversation's last prompts, and little else."""
    main = [1] * 100
    engine = FakeEngine(4000)
    turns(engine, main, 3, hint="main")
    for number in range(20):
        turns(engine, [2, number] + [3] * 60, 1, hint=hint)
        if number % 5 == 4:
            kept, grown = engine.prefill(main), len(main)
            assert kept == grown - 40
            engine.remember("main")
            main += [9] * 40


def test_a_short_request_costs_a_few_rows():
    engine = FakeEngine(PLENTY)
    main = [1] * 900
    turns(engine, main, 1)
    before = engine.store.nbytes[0]
    turns(engine, [2] * 30, 1)
    assert engine.store.nbytes[0] == before + 30 + 30 * 10  # its own state, and the rows in its place
    assert engine.prefill(main) == 900
    engine.check()


def test_an_answer_that_is_given_again_does_not_take_a_snapshots_rows(models):
    """A prompt's answer is remembered, and another one is given to the same prompt, without a prefill between them."""
    one, other = models
    one.keep_snapshots(PLENTY)
    ids = [3, *range(60)]
    one.prefill(ids)
    said = answer(one, 1, 40)
    one.remember()
    one.rewind(len(ids))
    assert answer(one, 2, 50) != said
    one.prefill([*ids, *said, 5])
    other.prefill([*ids, *said, 5])
    assert np.array_equal(one._logits, other._logits)


def test_the_first_turn_is_kept_where_its_client_gives_a_hint():
    engine = FakeEngine(1700)
    turns(engine, [1] * 100, 1, hint="main")
    for number in range(3):
        turns(engine, [2, number] + [3] * 60, 1)
    assert engine.prefill([1] * 100 + [9]) == 100


def test_what_was_overtaken_goes_first():
    main = [1] * 30
    engine = FakeEngine(130)  # room for four states
    turns(engine, main, 8, grow=5)
    assert sorted(len(one) for one in engine.store._snapshots) == [50, 55, 60, 65]
    branch = main[:52] + [7] * 20
    assert engine.prefill(branch) == 50


def test_an_answers_end_goes_before_its_prompts():
    main = [1] * 30
    engine = FakeEngine(100)  # room for three states
    turns(engine, main, 2)
    prompt = main[:70]
    engine.prefill([*prompt, *[8] * 50])
    engine.remember(turn=False)
    engine.prefill([*prompt, 7])
    engine.remember()
    assert sorted(len(one) for one in engine.store._snapshots) == [30, 70, 71]


def test_the_least_recently_used_are_spilled_and_come_back():
    engine = FakeEngine(1000, 5000)
    for i in range(4):
        turns(engine, [i] * 60, 1)
    assert engine.store.nbytes[1] > 0
    for i in range(4):
        assert engine.prefill([i] * 60 + [9]) == 60
    assert engine.store.nbytes[0] <= 1000


# With engines


@pytest.fixture(params=["q1", "qwen2"])
def models(request, tiny, tmp_path):
    """Two engines of one model, of which the first keeps snapshots."""
    folder = tiny
    if request.param == "qwen2":
        config = qwen2_config("qwen2.5-coder-0.5b-tiny", max_position_embeddings=512, tie_word_embeddings=False)
        folder = write_qwen2_checkpoint(tmp_path / "hf", config, seed=3)
    with open_engine(folder, "cpu") as one, open_engine(folder, "cpu") as other:
        yield one, other


def answer(engine, seed, count):
    return [token for step in engine.decode(DecodeParams(max_tokens=count, seed=seed)) for token in step]


def alternate(rng, one, other, steps):
    """Random turns of three conversations; returns, for each, (tokens kept, tokens of what it had before)."""
    conversations = [[i, *(rng.randrange(96) for _ in range(rng.randrange(1, 120)))] for i in range(3)]
    common_before, found = [0, 0, 0], []
    for step in range(steps):
        i = rng.randrange(3)
        ids = conversations[i]
        if len(ids) > 380:
            break
        held = one.held(ids)
        if rng.random() < 0.5:
            one.prefill(ids[: max(held + 1, len(ids) // 2)])
        kept = one.prefill(ids)
        if rng.random() < 0.5:
            one.remember(str(i))
        one.remember(str(i))
        other.rewind(0)
        other.prefill(ids)
        assert np.array_equal(one._logits, other._logits), step
        found.append((held, kept, common_before[i]))
        count = rng.choice([1, 4, 30, 90])
        said = answer(one, step, count)
        assert said == answer(other, step, count), step
        common_before[i] = len(ids)
        more = [rng.randrange(96) for _ in range(rng.choice([0, 1, 20]))]
        conversations[i] = ids + (said if rng.random() < 0.3 else []) + more
    return found


def back_and_forth(one, other):
    """Prompts that are come back to exactly, after another conversation."""
    rng = random.Random(SEED)
    for number in range(8):
        ids = [number, *(rng.randrange(96) for _ in range(rng.randrange(20, 250)))]
        one.prefill(ids)
        one.remember()
        one.prefill([95, *(rng.randrange(96) for _ in range(200))])
        one.remember()
        assert one.prefill(ids) == len(ids)
        other.rewind(0)
        other.prefill(ids)
        assert np.array_equal(one._logits, other._logits)
        said = answer(one, number, 60)
        assert said == answer(other, number, 60)
        one.remember()  # and an answer's end, whose last token no cache has
        one.prefill([94, *(rng.randrange(96) for _ in range(200))])
        ids += [*said, 1]
        assert one.prefill(ids) == len(ids) - 2
        other.rewind(0)
        other.prefill(ids)
        assert np.array_equal(one._logits, other._logits)
        assert answer(one, number, 30) == answer(other, number, 30)


def test_prompts_that_are_come_back_to(models):
    one, other = models
    one.keep_snapshots(PLENTY)
    back_and_forth(one, other)


def test_answers_are_those_of_an_engine_without_snapshots(models):
    one, other = models
    one.keep_snapshots(PLENTY)
    for number in range(3):
        found = alternate(random.Random(SEED + number), one, other, 14)
        assert all(held >= before - 1 and kept >= before - 1 for held, kept, before in found), (SEED + number, found)
    assert 0 < one.snapshot_bytes[0] <= PLENTY


@pytest.mark.parametrize("size", [0, 1000, 400_000, 2_000_000])
def test_so_they_are_where_memory_is_short(models, size):
    one, other = models
    one.keep_snapshots(size)
    alternate(random.Random(SEED), one, other, 10)
    assert one.snapshot_bytes[0] <= size


def broken_rings(self, state, marks):
    load(self, state, marks)
    for ring in self._rings():
        ring.k[:, ::2] = 0


def broken_draft(self, state, marks):
    load(self, state, marks)
    for cache in self._engine._draft.layer.caches:
        cache.v[:] = 0


def broken_settled(self, state, marks):
    load(self, state, marks)
    self._engine._hidden = self._engine._hidden * 0


load = EngineSaver.load


@pytest.mark.parametrize("broken", [broken_rings, broken_draft, broken_settled])
def test_a_state_that_comes_back_changed_is_noticed(tiny, monkeypatch, broken):
    monkeypatch.setattr(EngineSaver, "load", broken)
    with ReferenceEngine(tiny) as one, ReferenceEngine(tiny) as other:
        one.keep_snapshots(PLENTY)
        with pytest.raises(AssertionError):
            back_and_forth(one, other)


def test_rows_that_come_back_changed_are_noticed(models, monkeypatch):
    monkeypatch.setattr(EngineSaver, "put_rows", lambda *args: None)
    one, other = models
    one.keep_snapshots(PLENTY)
    with pytest.raises(AssertionError):
        back_and_forth(one, other)


def test_an_interrupt_loses_only_what_the_caches_held(tiny, monkeypatch):
    with ReferenceEngine(tiny) as one, ReferenceEngine(tiny) as other:
        one.keep_snapshots(PLENTY)
        first, second = [1, *range(80)], [2, *range(90)]
        one.prefill(first)
        one.remember()
        one.prefill(second)  # the first's rows are copied now
        one.remember()
        forward = one._target.forward
        monkeypatch.setattr(one._target, "forward", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            one.prefill([*second, 5])
        monkeypatch.setattr(one._target, "forward", forward)
        assert one.held(first) == 0  # as long as the caches are not whole again
        assert one.prefill([*second, 5]) == 0
        one.remember()
        assert one.prefill([*first, 7]) == len(first)
        other.prefill([*first, 7])
        assert np.array_equal(one._logits, other._logits)


def test_an_answer_is_remembered_when_another_conversation_takes_its_place(tiny):
    with ReferenceEngine(tiny) as engine:
        engine.keep_snapshots(PLENTY)
        ids = [1, *range(60)]
        engine.prefill(ids)
        engine.remember()
        said = answer(engine, 1, 200)
        engine.prefill([2, *range(80)])
        engine.remember()
        engine.prefill(ids)  # makes the second leave
        engine.prefill([2, *range(80)])
        kept = engine.prefill([*ids, *said, 3])
        assert kept in (len(ids), len(ids) + len(said) - 1)


def test_snapshots_end_with_their_bounds(tiny):
    with ReferenceEngine(tiny) as engine:
        engine.remember()
        engine.keep_snapshots(PLENTY)
        engine.remember()  # of an empty sequence: nothing
        engine.prefill([1, 2, 3])
        engine.remember()
        assert engine.snapshot_bytes[0] > 0
        engine.keep_snapshots(0)
        engine.remember()
        assert engine.snapshot_bytes == (0, 0)

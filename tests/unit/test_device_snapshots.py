"""What snapshots of GPU engines copy, and in which memory, with the host's in the place of a GPU's."""

import random

import pytest

from cuq1.config_qwen2 import parse_qwen2
from cuq1.cuda import snapshot
from cuq1.cuda.snapshot import DeviceSaver, PageSaver, RowSaver
from cuq1.plan.qwen2_dims import PAGE
from cuq1.sampling import DecodeParams
from cuq1.snapshots import SnapshotStore
from tests.paths import NANO
from tests.unit.memory_gpu import VOCABULARY, opened, patch
from tools.checkpoint_qwen2 import qwen2_config

SEED = random.randrange(10**6)
PLENTY = 256 << 20
QWEN2 = parse_qwen2(qwen2_config("qwen2.5-coder-0.5b-tiny"))


@pytest.fixture
def driver(monkeypatch):
    return patch(monkeypatch)


@pytest.fixture(params=[NANO, QWEN2], ids=["nano", "qwen2"])
def engine(driver, request):
    with opened(request.param, 1024) as engine:
        yield engine


def ids_of(rng, first, count):
    return [first, *(rng.randrange(VOCABULARY) for _ in range(count - 1))]


def play(engine, rng, steps=40):
    """Turns of four conversations; what they see is checked as it is computed. Returns what each lost of its last."""
    conversations = [ids_of(rng, first, rng.randrange(1, 400)) for first in range(4)]
    before, lost = [0] * 4, []
    for _ in range(steps):
        i = rng.randrange(4)
        ids = conversations[i]
        held = engine.held(ids)
        if rng.random() < 0.3:
            engine.prefill(ids[: max(held + 1, len(ids) // 2)])
        lost.append(before[i] - min(held, engine.prefill(ids)))
        if rng.random() < 0.8:
            engine.remember(rng.choice(["", "main"]))
            before[i] = len(ids)
        stream = engine.decode(DecodeParams(max_tokens=rng.randrange(1, 80), top_k=20, seed=1))
        said = [token for _, step in zip(range(rng.randrange(1, 60)), stream, strict=False) for token in step]
        if rng.random() < 0.3:
            engine.remember(turn=False)
        if rng.random() < 0.8:  # else the same is asked again
            conversations[i] = ids + (said if rng.random() < 0.5 else []) + ids_of(rng, 7, rng.randrange(1, 100))
        if len(conversations[i]) > 800:
            conversations[i], before[i] = ids_of(rng, 10 + len(lost), rng.randrange(1, 400)), 0
    return lost


def plays(engine, count, *tiers):
    """Several of them, each with memory that nothing is in; returns the most that was lost."""
    most = 0
    for number in range(count):
        engine.keep_snapshots(*tiers)
        most = max(most, *play(engine, random.Random(SEED + number)))
    return most


def most_lost(engine):
    """Tokens: the pending one, or what a draft sees, where it is cheaper to compute those again than to restore."""
    return 1 if engine._model.draft is None else engine._model.draft.window


def small(engine):
    """Room for two states and some rows."""
    engine.keep_snapshots(1)
    saver = engine._snapshots.saver
    return 5 * saver.state_bytes // 2 + 300 * saver.row_bytes()


@pytest.mark.parametrize("spilled", [False, True])
def test_rows_come_back_as_they_were_and_none_is_lost(engine, spilled):
    tiers = (small(engine), PLENTY) if spilled else (PLENTY, 0)
    assert plays(engine, 3, *tiers) <= most_lost(engine), SEED
    assert (engine.snapshot_bytes[1] > 0) == spilled


@pytest.mark.parametrize("second", [0, 300_000])
def test_so_they_do_where_memory_is_short(engine, driver, second):
    first = small(engine)
    plays(engine, 3, first, second)
    assert engine.snapshot_bytes[0] <= first
    assert engine.snapshot_bytes[1] <= second
    engine.keep_snapshots(0)
    assert not driver.pinned


def test_whole_pages_would_take_their_place(driver, monkeypatch):
    cut = snapshot._cut_blocks
    monkeypatch.setattr(snapshot, "_cut_blocks", lambda *args: [(block, 0, PAGE) for block, _, _ in cut(*args)])
    with opened(QWEN2, 1024) as engine, pytest.raises(AssertionError):
        plays(engine, 10, PLENTY)


def test_blocks_of_which_a_part_is_meant():
    assert snapshot._cut_blocks(0, 32) == []
    assert snapshot._cut_blocks(3, 5) == [(0, 3, 5)]
    assert snapshot._cut_blocks(3, 16) == [(0, 3, 16)]
    assert snapshot._cut_blocks(16, 33) == [(2, 0, 1)]
    assert snapshot._cut_blocks(15, 50) == [(0, 15, 16), (3, 0, 2)]


def test_memory_in_pieces_that_nothing_makes_whole_loses_snapshots(engine, monkeypatch):
    """The control: where no more leaves than the bounds ask for, some are lost though the host has room for them."""
    monkeypatch.setattr(SnapshotStore, "_relieve", lambda self: False)
    assert plays(engine, 3, small(engine), PLENTY) > most_lost(engine)


def test_what_was_written_since_counts_against_a_rewind(driver):
    """A sequence that had been longer has less left in its rings: nobody is told that it can be rewound as far."""
    with opened(NANO, 1024) as engine:
        engine.keep_snapshots(PLENTY)
        ids = ids_of(random.Random(SEED), 1, 600)
        engine.prefill(ids)
        engine.prefill(ids[:540])
        engine.remember()
        engine.prefill(ids_of(random.Random(SEED), 2, 300))
        engine.remember()
        for asked, kept in ((540, 540), (537, 537), (520, 0)):
            again = [*ids[:asked], VOCABULARY]
            assert engine.held(again) == kept
            assert engine.prefill(again) >= kept - most_lost(engine)
            engine.prefill(ids_of(random.Random(SEED), 2, 300))


@pytest.mark.parametrize("broken", ["rows", "state"])
def test_what_comes_back_changed_is_noticed(engine, monkeypatch, broken):
    if broken == "rows":
        for kind in (RowSaver, PageSaver):
            monkeypatch.setattr(kind, "put_rows", lambda *args: None)
    else:
        monkeypatch.setattr(DeviceSaver, "load", lambda self, state, marks: setattr(self.engine, "marks", marks))
    with pytest.raises(AssertionError):
        plays(engine, 10, PLENTY)

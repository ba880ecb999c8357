"""Conversations that take turns on a GPU: caches come back as they were, from the GPU's memory and the host's."""

import random

import numpy as np
import pytest

from cuq1.cuda.snapshot import PageSaver, RowSaver
from cuq1.engine import open_engine
from cuq1.sampling import DecodeParams
from tests.gpu.qwen2_models import Made
from tests.paths import NANO

pytestmark = pytest.mark.gpu

GIB = 1 << 30
SEED = random.randrange(10**6)


@pytest.fixture(scope="module", params=["nano", "nano, host loop", "qwen2"])
def engines(gpu, request, tmp_path_factory):
    """Two engines of one model."""
    model, options = NANO, {}
    if request.param == "qwen2":
        model = Made(tmp_path_factory.mktemp("models")).file("qwen2.5-coder-0.5b-tiny")
    elif request.param != "nano":
        options = {"loop": "host"}
    with open_engine(model, "cuda", **options) as one, open_engine(model, "cuda", **options) as other:
        yield one, other


def answer(engine, seed, count=50):
    params = DecodeParams(max_tokens=count, top_k=20, seed=seed)
    return [token for step in engine.decode(params) for token in step]


def logits(engine):
    out = np.empty((1, engine.vocab_size), np.float32)
    engine._runtime.read_logits("logits", out)
    return out


def ids_of(rng, first, count):
    return [first, *(rng.randrange(20, 400) for _ in range(count - 1))]


def back_and_forth(one, other, rounds=6):
    """Prompts that are come back to after others: the same bits, with whatever follows them."""
    print(f"SEED = {SEED}")
    rng = random.Random(SEED)
    for number in range(rounds):
        ids, away = ids_of(rng, 10 + number, rng.randrange(30, 900)), ids_of(rng, 5, rng.randrange(30, 900))
        one.prefill(ids)
        one.remember()
        said = answer(one, number)
        one.prefill(away)
        one.remember()
        assert one.held(ids) == len(ids)
        assert one.prefill(ids) == len(ids)
        other.rewind(0)
        other.prefill(ids)
        assert (logits(one) == logits(other)).all()
        assert said == answer(one, number) == answer(other, number)
        more = ids_of(rng, 7, rng.randrange(1, 300))
        assert one.prefill(away) == len(away)
        assert one.prefill([*ids, *more]) == len(ids)
        other.rewind(0)
        other.prefill(ids)
        other.prefill([*ids, *more])
        assert (logits(one) == logits(other)).all()
        assert answer(one, number) == answer(other, number)


@pytest.mark.parametrize("spilled", [False, True])
def test_answers_are_those_without_snapshots(engines, spilled):
    """Also where the GPU has room for two of them and a few rows, and the host for the others."""
    one, other = engines
    one.keep_snapshots(GIB)
    saver = one._snapshots.saver
    first = 5 * saver.state_bytes // 2 + 400 * saver.row_bytes() if spilled else GIB
    second = GIB if spilled else 0
    one.keep_snapshots(first, second)
    try:
        back_and_forth(one, other)
        used = one.snapshot_bytes
        assert used[0] <= first
        assert used[1] <= second
        assert (used[1] > 0) == spilled
    finally:
        one.keep_snapshots(0)


def test_an_answers_end_is_come_back_to(engines):
    one, _ = engines
    one.keep_snapshots(GIB)
    try:
        rng = random.Random(SEED)
        ids = ids_of(rng, 11, 700)
        one.prefill(ids)
        one.remember()
        said = answer(one, 3, 200)
        one.remember()
        one.prefill([*ids, *said, 9])
        expected, after = logits(one).copy(), answer(one, 4)
        one.prefill(ids_of(rng, 12, 500))
        assert one.prefill([*ids, *said, 9]) == len(ids) + len(said) - 1
        assert (logits(one) == expected).all()
        assert answer(one, 4) == after
    finally:
        one.keep_snapshots(0)


@pytest.mark.parametrize("broken", ["rows", "state"])
def test_what_comes_back_changed_is_noticed(engines, monkeypatch, broken):
    one, other = engines
    one.keep_snapshots(GIB)
    saver = one._snapshots.saver
    if broken == "rows":
        monkeypatch.setattr(type(saver), "put_rows", lambda *args: None)
    else:
        monkeypatch.setattr(type(saver), "load", lambda self, state, marks: setattr(self.engine, "marks", marks))
    assert isinstance(saver, RowSaver | PageSaver)
    try:
        with pytest.raises(AssertionError):
            back_and_forth(one, other)
    finally:
        one.keep_snapshots(0)


def test_memory_is_given_back(engines):
    from cuq1.cuda.memory import free_memory  # noqa: PLC0415

    one, _ = engines
    before = free_memory()
    for _ in range(3):
        one.keep_snapshots(GIB)
        assert before - free_memory() >= GIB
        one.keep_snapshots(0)
    assert abs(free_memory() - before) < GIB // 8

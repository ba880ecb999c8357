"""A prompt in steps: what is held stays, no step is long, and the answer is the one of a prompt at once."""

import random

import httpx
import numpy as np
import pytest

from cuq1.errors import DeviceError
from cuq1.sampling import DecodeParams
from cuq1.serve import prompt as prompt_module
from cuq1.serve.job import Measures
from tests.serve.running import LIMIT, nano_service, open_nano, post, serving, wait_for
from tests.serve.watched import Watched

WINDOW = 512  # of a draft model, whose rows may have to be made again
LENGTH = WINDOW + 88  # of a prompt that does not lie in its ring


class Mortal(Watched):
    """An engine that ends while it computes, and says so before that is seen in its answer."""

    def watch(self, lost):
        self._lost = lost

    def _step(self):
        self._lost()
        raise DeviceError("the process has ended")


def test_a_failure_is_said_once(caplog):
    service = nano_service(lambda: Mortal(open_nano()), restarts=0)
    with serving(service) as url:
        body = {"prompt": [5, 6], "max_tokens": 2}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=LIMIT).status_code == 500
        wait_for(lambda: not service.worker.busy)
        assert httpx.get(f"{url}/health").json()["status"] == "failed"
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=LIMIT).status_code == 503
    assert service.close(timeout=LIMIT)
    assert [record.message for record in caplog.records if "failed:" in record.message] == [
        "the engine failed: the process has ended"
    ]


def test_the_speed_of_one_token_is_not_known():
    measures = Measures(first_token=10.0, finished=12.0, completion_tokens=1)
    assert measures.tokens_per_second is None
    measures.completion_tokens = 5
    assert measures.tokens_per_second == 2.0


@pytest.fixture(scope="module")
def engine():
    with open_nano() as engine:
        yield engine


def test_held_is_what_a_prefill_keeps(engine):
    rng = np.random.default_rng(4)
    kept = []
    ids = rng.integers(1, 4000, LENGTH).tolist()
    engine.prefill(ids)
    for number in range(9):
        cut = int(rng.integers(1, len(ids))) if number % 3 == 0 else len(ids) - int(rng.integers(0, 8))
        ids = ids[:cut] + rng.integers(1, 4000, int(rng.integers(1, 100))).tolist()
        ids += rng.integers(1, 4000, max(0, LENGTH - len(ids))).tolist()
        held = engine.held(ids)
        computed = engine.prefill(ids)
        assert held - WINDOW <= computed <= held
        assert (computed == 0) == (held == 0)
        kept.append(held)
        if rng.random() < 0.5:
            list(engine.decode(DecodeParams(seed=1, max_tokens=12)))
            ids = list(engine.tokens)
    assert 0 in kept  # the rings did not reach back
    assert max(kept) > WINDOW


class Steps(Watched):
    """Notes the new tokens of each step of a prompt."""

    def __init__(self, engine):
        super().__init__(engine)
        self.sizes = []

    def prefill(self, ids, **options):
        kept = super().prefill(ids, **options)
        self.sizes.append(len(ids) - kept)
        return kept


@pytest.fixture(scope="module")
def stepped():
    service = nano_service(lambda: Steps(open_nano()))
    with serving(service) as url:
        yield url, service.engine
    assert service.close(timeout=LIMIT)


def ask(url, ids):
    body = {"prompt": ids, "max_tokens": 12, "seed": 3}
    answer = post(url, "/v1/completions", body)
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_no_step_is_long_and_nothing_is_lost(stepped, monkeypatch):
    monkeypatch.setattr(prompt_module, "MAX_STEP", prompt_module.STEP)
    url, engine = stepped
    rng = random.Random(9)
    first = [rng.randrange(1, 4000) for _ in range(900)]
    texts = []
    for ids in (first, [*first, 17, 18], first[:300] + [5] * 500, first):
        engine.sizes.clear()
        texts.append(ask(url, ids))
        assert max(engine.sizes) <= prompt_module.STEP, engine.sizes
    assert texts[1][1] >= len(first) - 1  # the next turn keeps the first
    assert texts[2][1] == 0  # and rings do not reach back to another's
    assert texts[3][0] == texts[0][0]
    assert texts[3][1] == 0


def test_a_prompt_at_once_is_seen(stepped, monkeypatch):
    """The negative control: an engine that says to hold what it must compute again."""
    url, engine = stepped
    rng = random.Random(10)
    first = [rng.randrange(1, 4000) for _ in range(800)]
    ask(url, first)
    monkeypatch.setattr(engine, "held", lambda ids: 700, raising=False)
    engine.sizes.clear()
    ask(url, first[:700:-1] + first[:700])
    assert max(engine.sizes) > 2 * prompt_module.STEP


@pytest.fixture(scope="module")
def remembering():
    service = nano_service(lambda: Steps(open_nano()), snapshots=(1 << 30, 0))
    with serving(service) as url:
        yield url, service
    assert service.close(timeout=LIMIT)


def chat(url, system, *texts):
    messages = [{"role": "system", "content": system}]
    messages += [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    body = {"messages": messages, "max_tokens": 8, "seed": 3}
    answer = post(url, "/v1/chat/completions", body)
    return answer["choices"][0]["message"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


LONG_SYSTEM = "You write Python functions that are short and plain. " * 20
OTHER_SYSTEM = "You find short titles for conversations about code. " * 20


def test_conversations_take_turns(remembering, stepped):
    """Another one between two turns costs nothing, and changes nothing; without snapshots, all is computed again."""
    found = {}
    for name, url in (("with", remembering[0]), ("without", stepped[0])):
        first = chat(url, LONG_SYSTEM, "Write a function.")
        chat(url, OTHER_SYSTEM, "Write a title.")
        chat(url, OTHER_SYSTEM[:-60], "Write another one.")
        second = chat(url, LONG_SYSTEM, "Write a function.", "def f(): pass", "Why?")
        other = chat(url, LONG_SYSTEM, "Something else altogether.")
        found[name] = first[0], second, other
    assert found["with"][0] == found["without"][0]
    assert found["with"][1][0] == found["without"][1][0]
    assert found["with"][2][0] == found["without"][2][0]
    assert found["with"][1][1] > 220
    assert found["without"][1][1] < 10
    assert found["with"][2][1] > 220  # the first message is remembered apart

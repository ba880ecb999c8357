"""What the trained checkpoint shows: drafts that never change greedy output, and that get accepted."""

from itertools import product

import pytest

from cuq1 import DecodeParams, open_engine
from tests.paths import NANO
from tools.bench import nano

TOKENS = 200


@pytest.fixture(scope="module")
def engine():
    with open_engine(NANO) as opened:
        yield opened


@pytest.fixture(scope="module")
def prompts():
    """54 prompts: function chats, tool chats and source, of 4 to 700 tokens."""
    made = nano()[2](54, 11)
    assert min(map(len, made)) < 64  # shorter than the draft's window …
    assert max(map(len, made)) > 320  # … and longer than the target's ring, so every wrap is met
    return made


@pytest.fixture(scope="module")
def undrafted(engine, prompts):
    """Greedy tokens without drafts, not stopped at the end of a turn."""
    return [greedy(engine, ids, "off") for ids in prompts]


def greedy(engine, ids, draft):
    engine.prefill(ids)
    return [
        token for step in engine.decode(DecodeParams(temperature=0, draft=draft, max_tokens=TOKENS)) for token in step
    ]


@pytest.mark.parametrize("draft", ["auto", 1, 2, 3, 4, 5, 6, 7])
def test_greedy_output_is_the_same_token_for_token(engine, prompts, undrafted, draft):
    for ids, expected in zip(prompts, undrafted, strict=True):
        assert len(expected) == TOKENS
        assert greedy(engine, ids, draft) == expected


def test_templated_chats_accept_most_drafts(engine):
    """At least four of seven a round; the draft was trained on such chats and agrees there."""
    accepted = []
    for (i, ids), temperature in product(enumerate(nano()[2](40, 12, "t")), (0, 1)):
        engine.prefill(ids)
        params = DecodeParams(
            temperature=temperature, top_k=20, top_p=0.95, seed=i, draft=7, max_tokens=100, stop_tokens=(0,)
        )
        accepted += [step.accepted for step in engine.decode(params) if not step.from_prompt]
    assert sum(accepted) / len(accepted) >= 4

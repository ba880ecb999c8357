"""What the trained checkpoint shows: drafts that never change greedy output, and that get accepted."""

import pytest

from cuq1 import DecodeParams, open_engine
from cuq1.reference import engine as engine_module
from cuq1.sampling import MAX_DRAFTS, Verdict
from tests.paths import NANO
from tools.bench import nano
from tools.check_greedy import differing

TOKENS = 200


@pytest.fixture(scope="module")
def engine():
    with open_engine(NANO) as opened:
        yield opened


@pytest.fixture(scope="module")
def prompts():
    """51 prompts: function chats, tool chats and source."""
    made = nano()[2](51, 11)
    assert min(map(len, made)) < 64  # shorter than the draft's window …
    assert max(map(len, made)) > 320  # … and longer than the target's ring, so every wrap is met
    return made


def test_greedy_output_is_the_same_with_the_stop_rule(engine, prompts):
    assert differing(engine, prompts, ["auto"], TOKENS) == []


def test_greedy_output_is_the_same_at_every_depth(engine, prompts):
    """On a few prompts here; tools/check_greedy.py runs every depth on all of them."""
    longest = max(prompts, key=len)
    assert differing(engine, [longest, *prompts[:5]], range(1, MAX_DRAFTS + 1), TOKENS) == []


def test_greedy_comparison_notices_a_draft_that_is_always_accepted(engine, prompts, monkeypatch):
    monkeypatch.setattr(
        engine_module,
        "verify",
        lambda drafts, q, p, seed, position: Verdict(len(drafts), int(p[len(drafts)].ids[0])),
    )
    assert len(differing(engine, prompts[:4], ["auto"], 100)) >= 2


def test_templated_chats_accept_most_drafts(engine):
    """At least four of seven a round; the draft was trained on such chats and agrees there."""
    accepted = []
    for i, ids in enumerate(nano()[2](40, 12, "t")):
        engine.prefill(ids)
        params = DecodeParams(
            temperature=i % 2, top_k=20, top_p=0.95, seed=i, draft=MAX_DRAFTS, max_tokens=100, stop_tokens=(0,)
        )
        accepted += [step.accepted for step in engine.decode(params) if not step.from_prompt]
    assert sum(accepted) / len(accepted) >= 4

"""The request's state as the device keeps it, advanced by the reference's own functions.

A state is a record of STATE (abi.State as a NumPy dtype); each function changes it in place.
"""

import numpy as np

from cuq1.cuda.abi import MAX_DRAFTS, State
from cuq1.sampling import Distribution, Purpose, draw, filtered, uniform, verify
from cuq1.sampling.depth import DepthRule

STATE = np.dtype(State)
FEATURE_TOP_K = 20  # of the reference engine, for greedy requests


def seed(state):
    return int(state["seed_lo"]) | int(state["seed_hi"]) << 32


def distribution(state, logits):
    return filtered(logits, float(state["temperature"]), int(state["top_k"]), float(state["top_p"]))


def proposal(state, i):
    """The distribution that draft i was drawn from."""
    count = int(state["q_count"][i])
    return Distribution(state["q_ids"][i, :count].astype(np.int64), state["q_probs"][i, :count].astype(np.float64))


def accept(state, logits, rows):
    """logits float32 [ROWS, vocab] of the verified rows."""
    drafted = min(int(state["drafts"]), rows - 1)
    drafts = [int(token) for token in state["tokens"][1 : drafted + 1]]
    start = int(state["done"])
    verdict = verify(
        drafts,
        [proposal(state, i) for i in range(drafted)],
        [distribution(state, logits[i]) for i in range(drafted + 1)],
        seed(state),
        start + 1,
    )
    committed = [*drafts[: verdict.accepted], verdict.token]  # of positions start + 1, ...
    _settle(state, start + verdict.accepted + 1, start + 1, committed, drafted)


def first(state, logits):
    """The request's first token, from the logits of the prompt's last row."""
    done = int(state["done"])
    token = draw(distribution(state, logits[0]), uniform(seed(state), done, Purpose.TARGET))
    _settle(state, done, done, [token], 0)


def _settle(state, done, begin, committed, drafted):
    """`committed` are the tokens of positions begin, ...; the last one, at `done`, is pending."""
    count = len(committed)
    state["done"], state["drafts"] = done, 0
    state["tokens"][0], state["positions"][0] = committed[-1], done
    state["log_tokens"][:count] = committed
    state["log_count"], state["log_drafted"], state["log_accepted"] = count, drafted, count - 1
    state["log_rounds"] += 1
    state["depth_rows"] = 0
    state["depth_rows"][0] = count  # also without drafts: the draft's cache takes in what was committed
    for row, position in enumerate(range(done - 1, done - 1 - count, -1)):
        state["draft_positions"][row] = position
        state["draft_tokens"][row] = committed[position + 1 - begin]
        state["draft_hidden"][row] = count - 1 - row


def draft_sample(state, logits, depth):
    """logits float32 [vocab] of the draft's depth `depth`."""
    if depth >= state["draft_limit"]:
        return
    done, drafts = int(state["done"]), depth + 1
    q = distribution(state, logits)
    token = draw(q, uniform(seed(state), done + 1 + depth, Purpose.DRAFT))
    count = len(q.ids)
    state["q_count"][depth] = count
    state["q_ids"][depth] = -1
    state["q_ids"][depth, :count] = q.ids
    state["q_probs"][depth] = 0
    state["q_probs"][depth, :count] = q.probs
    state["tokens"][drafts], state["positions"][drafts], state["drafts"] = token, done + drafts, drafts
    more = drafts < min(int(state["draft_limit"]), MAX_DRAFTS)
    if state["auto_depth"]:
        shape = q if state["temperature"] > 0 else filtered(logits, 1.0, FEATURE_TOP_K, 1.0)
        state["served"][depth], state["entropy"][depth] = shape.prob(token), shape.entropy()
        rule = DepthRule(tuple(map(tuple, state["rule_weights"].tolist())), float(state["rule_threshold"]))
        more = more and rule.more(state["served"][:drafts].tolist(), state["entropy"][:drafts].tolist(), greedy=False)
    state["depth_rows"][drafts:] = 0
    if more:
        state["depth_rows"][drafts] = 1
        state["draft_tokens"][0], state["draft_positions"][0], state["draft_hidden"][0] = token, done + depth, -1

"""accept and draft_sample against the reference's own rules, a block a request, thousands of requests a launch.

With equal logits, device and reference give equal tokens, except where u * total meets a cumulative sum within the
last bits of a double: exp alone may round differently, and u is a multiple of 2**-24, so that no test meets one.
"""

from dataclasses import replace

import numpy as np
import pytest

from cuq1.cuda.abi import AcceptArgs, DraftSampleArgs
from cuq1.cuda.kernels import sampling
from cuq1.errors import DeviceError
from cuq1.plan.dims import ROWS
from cuq1.sampling import MAX_DRAFTS, Purpose, draw, filtered, uniform
from cuq1.sampling.depth import default_rule
from tests.kernels.shapes import RELEASED
from tests.kernels.twins import sampling as twin
from tests.kernels.twins.head import pieces as candidate_lists

REQUESTS = 1500
VOCAB = 320  # 8 pieces of 40
STATE = twin.STATE


def fresh():
    seed = int(np.random.default_rng().integers(1 << 32))
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def blank(count):
    """States that nothing has written: bytes of 0x7F, as what is not an input must stay."""
    return np.full(count * STATE.itemsize, 0x7F, np.uint8).view(STATE)


def random_states(rng, count):
    states, rule = blank(count), default_rule()
    states["temperature"] = rng.choice([0, 0.3, 1, 2], count)
    states["top_p"] = rng.choice([1, 0.95, 0.1], count)
    states["top_k"] = rng.choice([1, 20, 32], count)
    states["seed_lo"] = rng.integers(0, 1 << 32, count)
    states["seed_hi"] = np.where(rng.random(count) < 0.5, 0, rng.integers(0, 1 << 32, count))
    states["draft_limit"] = rng.integers(0, MAX_DRAFTS + 1, count)
    states["auto_depth"] = rng.integers(0, 2, count)
    states["rule_weights"] = np.array(rule.coefficients)
    states["rule_threshold"] = rng.uniform(0.05, 0.9, count)
    states["done"] = rng.choice([1, 2, 4096, (1 << 20) + 5, 2_000_000_000], count)
    states["drafts"] = 0
    states["log_rounds"] = rng.integers(0, 1000, count)
    return states


def random_logits(rng, count):
    """Target's and draft's [count, ROWS, VOCAB]: from the same (drafts stand) to unrelated (the first one falls)."""
    target = rng.standard_normal((count, ROWS, VOCAB), np.float32) * rng.choice([1, 3, 10], (count, 1, 1))
    noise = rng.standard_normal((count, ROWS, VOCAB), np.float32) * rng.choice([0, 0.05, 1, 10], (count, 1, 1))
    tied = rng.random((count, 1, 1)) < 0.3  # ties within pieces and across them
    target, draft = target.astype(np.float32), (target + noise).astype(np.float32)
    return np.where(tied, np.round(target / 3), target), np.where(tied, np.round(draft / 3), draft)


def with_drafts(rng, states, logits):
    """Up to seven drafts for each state, drawn by the twin."""
    wanted = rng.integers(0, MAX_DRAFTS + 1, len(states))
    for state, rows, count in zip(states, logits, wanted, strict=True):
        limit, state["draft_limit"] = int(state["draft_limit"]), MAX_DRAFTS  # of the next round, not of this one
        for depth in range(count):
            twin.draft_sample(state, rows[depth], depth)
        state["draft_limit"] = limit
    return states


class Batch:
    """States and candidate lists on the GPU."""

    def __init__(self, gpu, states, logits, count, dims=RELEASED):
        """logits: float32 [requests or 1, ROWS or 1, vocab], cut into `count` pieces."""
        self.gpu, self.pieces, self.requests, self.dims = gpu, count, len(states), dims
        self.state = gpu.array(states.view(np.uint8))
        self.set_logits(logits)

    def set_logits(self, logits):
        """One request's logits serve all of them, one row all rows."""
        lists = [
            np.broadcast_to(part, (self.requests, ROWS, *part.shape[2:]))
            for part in candidate_lists(logits, self.pieces)
        ]
        self.values, self.ids = (self.gpu.array(part) for part in lists)

    def states(self):
        return self.state.get().view(STATE)

    def _run(self, kernel, args, patch):
        self.gpu.run(replace(kernel, grid=(self.requests, 1, 1)), args, patch)

    def accept(self, rows=ROWS, first=0, live=0, patch=None):
        where = self.state.data.ptr, self.values.data.ptr, self.ids.data.ptr
        args = AcceptArgs(self.gpu.fault.address, live, 0, rows, *where, self.pieces, first)
        self._run(sampling.accept(self.dims, self.pieces), args, patch)

    def draft_sample(self, depth, live=0, patch=None):
        where = self.state.data.ptr, self.values.data.ptr, self.ids.data.ptr
        args = DraftSampleArgs(self.gpu.fault.address, live, -1, 1, *where, self.pieces, depth)
        self._run(sampling.draft_sample(self.dims, self.pieces), args, patch)


def assert_same(ours, expected, before):
    for name in STATE.names:
        a, b = ours[name], expected[name]
        same = np.isclose(a, b, rtol=1e-12, atol=1e-13) if a.dtype.kind == "f" else a == b
        wrong = np.flatnonzero(~same.reshape(len(ours), -1).all(axis=1))
        if len(wrong):
            i = wrong[0]
            asked = {key: before[key][i] for key in ("temperature", "top_k", "top_p", "done", "drafts", "auto_depth")}
            raise AssertionError(f"{len(wrong)} states differ in {name}: {a[i]} for {b[i]}; state {i}, {asked}")


def check_accept(gpu, rng, count, rows=ROWS, first=0, patch=None):
    target, draft = random_logits(rng, REQUESTS)
    before = with_drafts(rng, random_states(rng, REQUESTS), draft)
    expected = before.copy()
    for state, logits in zip(expected, target, strict=True):
        if first:
            twin.first(state, logits)
        else:
            twin.accept(state, logits, rows)
    batch = Batch(gpu, before, target, count)
    batch.accept(rows, first, patch=patch)
    found = batch.states()
    assert (found["log_verified"] != before["log_verified"]).all()  # a clock's
    expected["log_verified"] = found["log_verified"]
    assert_same(found, expected, before)
    return expected


def check_draft_sample(gpu, rng, count, patch=None):
    _, draft = random_logits(rng, REQUESTS)
    expected = random_states(rng, REQUESTS)
    batch = Batch(gpu, expected, draft[:, :1], count)
    went_on = np.zeros(MAX_DRAFTS, int)
    for depth in range(MAX_DRAFTS):  # all depths of all states, whether or not the rule would have come so far
        before = expected.copy()
        rows = draft[:, depth : depth + 1]
        for state, logits in zip(expected, rows[:, 0], strict=True):
            twin.draft_sample(state, logits, depth)
        batch.set_logits(rows)
        batch.draft_sample(depth, patch=patch)
        assert_same(batch.states(), expected, before)
        went_on[depth] = (expected["depth_rows"][:, depth + 1 :] == 1).sum()
    return went_on


def test_twin_by_hand():
    """Two of three drafts accepted at done 10: tokens of positions 11, 12, 13, of which 13 is pending."""
    state = blank(1)[0]
    for name in ("seed_lo", "seed_hi", "auto_depth", "log_rounds"):
        state[name] = 0
    state["temperature"], state["top_k"], state["top_p"], state["draft_limit"] = 0, 20, 1, 3
    state["done"] = 10
    one = np.eye(VOCAB, dtype=np.float32)
    for depth, token in enumerate((5, 6, 7)):
        twin.draft_sample(state, one[token], depth)
    assert state["positions"][1:4].tolist() == [11, 12, 13]
    assert state["depth_rows"][1:4].tolist() == [1, 1, 0]
    twin.accept(state, one[[5, 6, 9, 8]], 4)
    assert state["log_tokens"][:3].tolist() == [5, 6, 9]
    assert (state["done"], state["tokens"][0], state["positions"][0], state["drafts"]) == (13, 9, 13, 0)
    assert (state["log_count"], state["log_drafted"], state["log_accepted"], state["log_rounds"]) == (3, 3, 2, 1)
    assert state["draft_positions"][:3].tolist() == [12, 11, 10]
    assert state["draft_tokens"][:3].tolist() == [9, 6, 5]
    assert state["draft_hidden"][:3].tolist() == [2, 1, 0]
    assert state["depth_rows"].tolist() == [3, 0, 0, 0, 0, 0, 0, 0]
    twin.first(state, one[4:5])
    assert (state["done"], state["positions"][0], state["draft_positions"][0], state["draft_hidden"][0]) == (
        13,
        13,
        12,
        0,
    )
    assert (state["tokens"][0], state["draft_tokens"][0], state["log_count"]) == (4, 4, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 2, 8, 40])
def test_accept(gpu, count):
    rng = fresh()
    seen = check_accept(gpu, rng, count)
    accepted, drafted = seen["log_accepted"], seen["log_drafted"]
    assert ((accepted == drafted) & (drafted == MAX_DRAFTS)).any()  # all stood,
    assert ((accepted == 0) & (drafted > 0)).any()  # the first one fell,
    assert ((accepted > 0) & (accepted < drafted)).any()  # and in between
    assert (drafted == 0).any()


@pytest.mark.gpu
def test_accept_judges_as_many_drafts_as_there_are_rows(gpu):
    rng = fresh()
    for rows in (1, 2, 5):
        check_accept(gpu, rng, 1, rows)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 8])
def test_first_token(gpu, count):
    check_accept(gpu, fresh(), count, 1, first=1)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 2, 8, 40])
def test_draft_sample(gpu, count):
    went_on = check_draft_sample(gpu, fresh(), count)
    assert (went_on[:-1] > 0).all()
    assert went_on[-1] == 0


@pytest.mark.gpu
def test_nothing_happens_where_no_row_is_live(gpu):
    rng = fresh()
    before = with_drafts(rng, random_states(rng, 3), random_logits(rng, 3)[1])
    batch = Batch(gpu, before, random_logits(rng, 3)[0], 1)
    live = gpu.array(np.zeros(1, np.int32))
    batch.accept(live=live.data.ptr)
    batch.draft_sample(0, live=live.data.ptr)
    assert batch.states().tobytes() == before.tobytes()
    live = gpu.array(np.full(1, 2, np.int32))
    batch.accept(live=live.data.ptr)
    assert (batch.states()["log_drafted"] == np.minimum(before["drafts"], 1)).all()


RULE, EXCESS = "u_accept * prob_of(q, draft) < prob_of(p, draft)", "p.prob > q_of ? p.prob - q_of : 0.0"
ACCEPT_PATCHES = {
    "accept with p": (RULE, "u_accept < prob_of(p, draft)"),
    "p and q exchanged": (RULE, "u_accept * prob_of(p, draft) < prob_of(q, draft)"),
    "accept all": (RULE, "true"),
    "residual is p": (EXCESS, "p.prob"),
    "residual is q": (EXCESS, "q_of"),
}


@pytest.mark.gpu
@pytest.mark.parametrize("patch", ACCEPT_PATCHES.values(), ids=ACCEPT_PATCHES.keys())
def test_accept_check_rejects_broken_rules(gpu, patch):
    with pytest.raises(AssertionError):
        check_accept(gpu, fresh(), 1, patch=patch)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "patch",
    [
        ("(a.first ? 0 : 1) + row", "1 + row"),
        ("a.first ? asked.done :", "false ? asked.done :"),
    ],
    ids=["another random number", "done moves"],
)
def test_first_token_check_rejects(gpu, patch):
    with pytest.raises(AssertionError):
        check_accept(gpu, fresh(), 1, 1, first=1, patch=patch)


DRAFT_PATCHES = {
    "another random number": ("asked.done + count, PURPOSE_DRAFT", "asked.done + depth, PURPOSE_DRAFT"),
    "the rule's sign": ("return score > rule", "return -score > rule"),
    "the features' top_k": ("greedy ? FEATURE_TOP_K :", "greedy ? MAX_TOP_K :"),
    "the features' top_p": ("greedy ? 1.0 : asked.top_p", "asked.top_p"),
    "no decision": ("if (watches != decides) return;", "if (watches) return;"),
    "one draft more": ("count >= MIN_AUTO_DRAFTS", "count > MIN_AUTO_DRAFTS"),
}


@pytest.mark.gpu
@pytest.mark.parametrize("patch", DRAFT_PATCHES.values(), ids=DRAFT_PATCHES.keys())
def test_draft_sample_check_rejects(gpu, patch):
    with pytest.raises(AssertionError):
        check_draft_sample(gpu, fresh(), 1, patch=patch)


@pytest.mark.gpu
def test_a_peak_that_is_not_finite_is_reported(gpu):
    rng = fresh()
    for bad, kernel in ((np.inf, "accept"), (-np.inf, "draft_sample")):
        states, logits = random_states(rng, 2), random_logits(rng, 2)[0]
        states["draft_limit"], logits[1, 0] = MAX_DRAFTS, bad
        batch = Batch(gpu, states, logits, 1)
        with pytest.raises(DeviceError, match=f"not finite in {kernel}"):
            batch.accept() if kernel == "accept" else batch.draft_sample(0)
        token = batch.states()["tokens"][1, 0 if kernel == "accept" else 1]
        assert 0 <= token < VOCAB  # what comes after still finds a token


# The distribution of committed tokens, whatever the drafts: from p, with one fixed pair of p and q.
SAMPLES = 30_000
WIDTH = 12


def unlike(gpu, patch=None):
    """How far the committed first and second tokens are from p, in standard deviations of chi-squared."""
    rng = np.random.default_rng(7)
    logits = np.full((2, 1, ROWS, WIDTH), -np.inf, np.float32)
    logits[:, 0] = rng.standard_normal((2, ROWS, WIDTH)) * 1.5
    target, draft = logits
    states = blank(SAMPLES)
    states["temperature"], states["top_p"], states["top_k"] = 0.9, 0.97, 10
    states["seed_lo"] = np.random.default_rng().integers(0, 1 << 32, SAMPLES)
    states["seed_hi"] = np.random.default_rng().integers(0, 1 << 32, SAMPLES)
    states["draft_limit"], states["auto_depth"], states["drafts"] = 1, 0, 0
    states["done"], states["log_rounds"] = 100, 0
    batch = Batch(gpu, states, draft, 1)
    batch.draft_sample(0)
    batch.set_logits(target)
    batch.accept(2, patch=patch)
    found = batch.states()
    both = found["log_count"] == 2
    return max(
        excess(found["log_tokens"][:, 0], filtered(target[0, 0], 0.9, 10, 0.97)),
        excess(found["log_tokens"][both, 1], filtered(target[0, 1], 0.9, 10, 0.97)),
    )


def excess(tokens, p):
    counts = np.bincount(tokens, minlength=WIDTH)
    expected = np.zeros(WIDTH)
    expected[p.ids] = p.probs * len(tokens)
    if counts[expected == 0].any():
        return np.inf
    used = expected > 0
    freedom = used.sum() - 1
    chi = ((counts - expected)[used] ** 2 / expected[used]).sum()
    return float((chi - freedom) / np.sqrt(2 * freedom))


def test_chi_squared_by_the_reference():
    """The measure itself: what the reference draws is like p, and the draft's q is not."""
    logits = np.random.default_rng(7).standard_normal((2, WIDTH)).astype(np.float32)
    p, q = (filtered(row, 0.9, 10, 0.97) for row in logits)
    tokens = np.array([draw(p, uniform(seed, 3, Purpose.TARGET)) for seed in range(5000)])
    assert excess(tokens, p) < 6
    assert excess(tokens, q) > 20


@pytest.mark.gpu
def test_committed_tokens_are_distributed_as_p(gpu):
    assert unlike(gpu) < 6


@pytest.mark.gpu
@pytest.mark.parametrize("patch", ACCEPT_PATCHES.values(), ids=ACCEPT_PATCHES.keys())
def test_chi_squared_rejects_broken_rules(gpu, patch):
    assert unlike(gpu, patch) > 20


@pytest.mark.gpu
def test_speed(gpu):
    """Prints microseconds of a chain of one request's launches."""
    rng = fresh()
    for count in (1, 8):
        target, draft = random_logits(rng, 1)
        states = random_states(rng, 1)
        states["temperature"], states["top_k"], states["top_p"] = 1, 20, 0.95
        states["auto_depth"], states["draft_limit"] = 1, 7
        batch = Batch(gpu, states, draft, count)
        where = batch.state.data.ptr, batch.values.data.ptr, batch.ids.data.ptr
        drafts = [
            (sampling.draft_sample(RELEASED, count), DraftSampleArgs(0, 0, -1, 1, *where, count, depth))
            for depth in range(MAX_DRAFTS)
        ]
        lists = [gpu.array(part) for part in candidate_lists(target, count)]
        accept = (
            sampling.accept(RELEASED, count),
            AcceptArgs(0, 0, 0, ROWS, batch.state.data.ptr, lists[0].data.ptr, lists[1].data.ptr, count, 0),
        )
        one = gpu.median_us(drafts)[0] / MAX_DRAFTS
        whole = gpu.median_us([*drafts, accept])[0]
        print(f"\n{count} pieces: draft_sample {one:.2f} us, accept of 7 drafts {whole - MAX_DRAFTS * one:.2f} us")

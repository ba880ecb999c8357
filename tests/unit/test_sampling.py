"""Random numbers, filters and the rejection rule, against known answers and exact sums."""

from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from cuq1.errors import Cuq1Error, RequestError
from cuq1.sampling import (
    DecodeParams,
    Distribution,
    Purpose,
    accept,
    draw,
    filtered,
    fresh_seed,
    philox4x32,
    residual,
    uniform,
    verify,
)
from cuq1.sampling import speculative as rules

# Random123, tests/kat_vectors: philox4x32 10
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_known_answers(counter, key, answer):
    assert philox4x32(counter, key) == answer


def test_uniform_depends_on_seed_position_and_purpose_alone():
    seed = fresh_seed()
    once = [uniform(seed, position, purpose) for position in range(50) for purpose in Purpose]
    again = [uniform(seed, position, purpose) for position in reversed(range(50)) for purpose in reversed(Purpose)]
    assert once == again[::-1]
    assert len(set(once)) == len(once)
    assert uniform(seed, 3, Purpose.DRAFT) != uniform(seed ^ (1 << 63), 3, Purpose.DRAFT)
    assert uniform(seed, 3, Purpose.DRAFT) != uniform(seed, 3 + (1 << 32), Purpose.DRAFT)


def test_uniform_is_exact_in_fp32_and_even():
    values = np.array([uniform(11, position, Purpose.ACCEPT) for position in range(20_000)])
    assert (values.astype(np.float32).astype(np.float64) == values).all()
    assert 0 <= values.min() < values.max() < 1
    counts = np.histogram(values, 64, (0, 1))[0]
    assert stats.chisquare(counts).pvalue > 1e-6


def test_purposes_are_independent():
    pairs = np.array([[uniform(5, i, purpose) for purpose in Purpose] for i in range(5_000)])
    assert np.abs(np.corrcoef(pairs.T) - np.eye(3)).max() < 0.08
    # Control: one stream for two decisions is what this test exists to catch.
    shared = pairs[:, [0, 0]]
    assert np.abs(np.corrcoef(shared.T) - np.eye(2)).max() > 0.08


def reference_filter(logits, temperature, top_k, top_p):
    """The ecosystem's warpers in order, one token at a time, in float64: a dict of id to probability."""
    ranked = sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))
    if temperature == 0:
        return {ranked[0]: 1.0}
    if top_k:
        ranked = ranked[:top_k]
    weights = {i: np.exp((float(logits[i]) - float(logits[ranked[0]])) / temperature) for i in ranked}
    total = sum(weights.values())
    kept, mass = {}, 0.0
    for i in ranked:
        if top_p < 1 and mass >= top_p:
            break
        kept[i] = weights[i]
        mass += weights[i] / total
    total = sum(kept.values())
    return {i: w / total for i, w in kept.items() if w > 0}


def p_before_k(logits, temperature, top_k, top_p):
    """Broken on purpose: top-p on the whole vocabulary, then top-k."""
    first = filtered(logits, temperature, 0, top_p)
    return Distribution(first.ids[:top_k], first.probs[:top_k] / first.probs[:top_k].sum())


def same_distribution(ours, expected):
    return ours.ids.tolist() == list(expected) and np.allclose(ours.probs, list(expected.values()), atol=1e-12)


@pytest.mark.parametrize("seed", range(30))
def test_filter_matches_the_ecosystems_order(seed):
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal(rng.integers(2, 200)) * rng.uniform(0.1, 6)).astype(np.float32)
    if seed % 3 == 0:
        logits = np.round(logits)  # many ties, also across the k-th place
    for temperature, top_k, top_p in [(1, 20, 0.95), (0.7, 5, 0.5), (2, 0, 0.9), (1, 1, 1), (0, 20, 0.9), (1, 500, 1)]:
        ours = filtered(logits, temperature, top_k, top_p)
        assert same_distribution(ours, reference_filter(logits, temperature, top_k, top_p))
        assert ours.probs.sum() == pytest.approx(1, abs=1e-12)


def test_filter_check_rejects_the_other_order():
    rng = np.random.default_rng(0)
    logits = rng.standard_normal(100).astype(np.float32)
    assert not same_distribution(p_before_k(logits, 1, 20, 0.5), reference_filter(logits, 1, 20, 0.5))


def test_filter_by_hand():
    logits = np.log(np.array([0.1, 0.4, 0.2, 0.3], np.float32))
    # k = 3 keeps 0.4, 0.3, 0.2 (of 0.9); 0.4 / 0.9 < 0.7 <= 0.7 / 0.9, so two stay
    ours = filtered(logits, 1.0, 3, 0.7)
    assert ours.ids.tolist() == [1, 3]
    assert ours.probs == pytest.approx([4 / 7, 3 / 7], abs=1e-6)


def test_filter_extremes():
    logits = np.array([1, 3, 3, 2], np.float32)
    assert filtered(logits, 0, 20, 0.95).ids.tolist() == [1]  # the lower of two equal ids
    assert filtered(logits, 1e-300, 0, 1).ids.tolist() == [1, 2]
    assert filtered(logits, 5e-324, 0, 1).probs == pytest.approx([0.5, 0.5])
    assert filtered(logits, 1e300, 0, 1).probs == pytest.approx([0.25] * 4)
    assert filtered(logits, 1, 0, 1e-9).ids.tolist() == [1]
    masked = np.array([-np.inf, 0, -np.inf], np.float32)
    assert filtered(masked, 1, 0, 1).ids.tolist() == [1]
    for bad in (np.nan, np.inf):
        with pytest.raises(Cuq1Error, match="not a number"):
            filtered(np.array([0, bad], np.float32), 1, 0, 1)


def test_draw_covers_every_interval():
    three = Distribution(np.array([7, 2, 5]), np.array([0.5, 0.25, 0.25]))
    assert [draw(three, u) for u in (0.0, 0.4999, 0.5, 0.7499, 0.75, 1 - 2**-24)] == [7, 7, 2, 2, 5, 5]
    thirds = Distribution(np.arange(3), np.full(3, 1 / 3))
    assert draw(thirds, 1.0) == 2  # a product that rounds up stays inside


def random_distribution(rng, vocab):
    ids = rng.permutation(vocab)[: rng.integers(1, vocab + 1)]
    probs = rng.dirichlet(np.full(len(ids), 0.5))
    order = np.argsort(-probs, kind="stable")
    return Distribution(ids[order].astype(np.int64), probs[order])


def committed(p, q, accepts, rest, vocab):
    """The exact distribution of the token that one draft leads to, from the rule's own functions."""
    out = np.zeros(vocab)
    rejected = 0.0
    for token, chance in zip(q.ids.tolist(), q.probs, strict=True):
        # accept() is a threshold in u: bisect for the probability with which it says yes
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if accepts(token, p, q, middle) else (low, middle)
        out[token] += chance * low
        rejected += chance * (1 - low)
    other = rest(p, q)
    out[other.ids] += rejected * other.probs
    return out


def dense(p, vocab):
    out = np.zeros(vocab)
    out[p.ids] = p.probs
    return out


@pytest.mark.parametrize("seed", range(40))
def test_rejection_rule_is_exact(seed):
    rng = np.random.default_rng(seed)
    p, q = random_distribution(rng, 12), random_distribution(rng, 12)
    assert committed(p, q, accept, residual, 12) == pytest.approx(dense(p, 12), abs=1e-9)


@pytest.mark.parametrize(
    ("accepts", "rest"),
    [
        (lambda d, p, q, u: u < p.prob(d), residual),
        (accept, lambda p, q: p),
        (accept, lambda p, q: q),
        (lambda d, p, q, u: True, residual),
    ],
    ids=["accept with p", "residual is p", "residual is q", "accept all"],
)
def test_broken_rules_are_rejected(accepts, rest):
    worst = 0.0
    for seed in range(10):
        rng = np.random.default_rng(seed)
        p, q = random_distribution(rng, 12), random_distribution(rng, 12)
        worst = max(worst, np.abs(committed(p, q, accepts, rest, 12) - dense(p, 12)).max())
    assert worst > 0.01


def test_zero_does_not_accept_what_the_target_excludes():
    p = Distribution(np.array([1]), np.ones(1))
    q = Distribution(np.array([2]), np.ones(1))
    assert not accept(2, p, q, 0.0)
    assert residual(p, q).ids.tolist() == [1]
    assert residual(p, p) is p


def test_verify_stops_at_the_first_rejection(monkeypatch):
    one = [Distribution(np.array([t]), np.ones(1)) for t in range(9)]
    assert verify([1, 2, 3], one[1:4], one[1:5], 0, 10) == (3, 4)
    assert verify([1, 9, 3], [one[1], one[8], one[3]], one[1:5], 0, 10) == (1, 2)
    assert verify([], [], one[:1], 0, 10) == (0, 0)
    asked = []
    monkeypatch.setattr(rules, "uniform", lambda seed, position, purpose: asked.append((position, purpose)) or 0.5)
    rules.verify([1, 9], [one[1], one[8]], one[1:4], 0, 10)
    assert asked == [(10, Purpose.ACCEPT), (11, Purpose.ACCEPT), (11, Purpose.TARGET)]


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("max_tokens", [0, -1, 1.5, True]),
        ("temperature", [-0.1, float("nan"), float("inf"), "hot", 10**400, None]),
        ("top_k", [-1, 2.0, None]),
        ("top_p", [0, -1, 1.01, float("nan")]),
        ("seed", [-1, 2**64, 0.5]),
        ("draft", [0, 8, "on", 2.5, True, None]),
        ("stop_tokens", [5, "text", (-1,), (1.5,), None]),
    ],
)
def test_parameters_outside_their_range_are_refused(field, values):
    for value in values:
        with pytest.raises(RequestError, match=rf"^{field} must be .*not "):
            DecodeParams(**{field: value})


def test_numbers_of_any_kind_become_pythons_own():
    given = DecodeParams(
        max_tokens=np.uint8(200),
        temperature=Fraction(1, 2),
        top_k=np.uint8(200),
        top_p=np.float32(0.5),
        seed=np.int64(5),
        draft=np.int8(3),
        stop_tokens=np.array([1, 2], np.int16),
    )
    plain = DecodeParams(200, 0.5, 200, 0.5, 5, 3, (1, 2))
    assert given == plain
    for field, value in vars(given).items():
        assert type(value) is type(getattr(plain, field))
    assert uniform(given.seed, 1, Purpose.DRAFT) == uniform(5, 1, Purpose.DRAFT)


def test_fresh_seeds_differ():
    seeds = {fresh_seed() for _ in range(100)}
    assert len(seeds) == 100
    assert all(0 <= seed < 2**64 for seed in seeds)

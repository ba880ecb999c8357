"""A token's time by region: overlaps counted once, gaps counted, and the whole equal to the parts."""

import random

import pytest

from tools import breakdown as module
from tools.breakdown import GAP, Share, breakdown, mean, problems, tokens_of, total
from tools.tracing import Span


def span(label, begin, resumed, end, layer=0):
    return Span(label, layer, begin, begin, begin, resumed, end, 1, resumed)


# A control kernel ends at 1000; a gap of 200; three launches, of which the second begins early; a gap of 30 inside.
TOKEN = [
    span("control", 900, 950, 1000),
    span("embed", 1200, 1200, 1300),
    span("qkv", 1250, 1310, 1500),  # 50 early, waits 10 after the embedding's end
    span("attention", 1530, 1530, 1600),
    span("control", 1590, 1610, 1700),
]


def test_each_moment_belongs_to_one_region():
    found = breakdown(TOKEN, 1000, 1700)
    assert found == {
        GAP: Share(0.23, 0, 0),
        "embed": Share(0.1, 0, 1),
        "qkv_gemv": Share(0.2, 0.01, 1),
        "attention": Share(0.07, 0, 1),
        "control": Share(0.1, 0.01, 1),
    }
    assert total(found) == pytest.approx(0.7)


def test_only_the_window_counts():
    assert total(breakdown(TOKEN, 1100, 1650)) == pytest.approx(0.55)
    assert breakdown(TOKEN, 1280, 1300) == {"embed": Share(0.02, 0, 1), "qkv_gemv": Share(0, 0, 0)}
    assert breakdown([], 5, 1005) == {GAP: Share(1, 0, 0)}
    with pytest.raises(KeyError, match="softmax"):
        breakdown([span("softmax", 1, 2, 3)], 0, 10)


def test_a_launch_inside_another_takes_no_time_of_its_own():
    found = breakdown([span("qkv", 0, 5, 100), span("down", 10, 20, 60), span("norm", 90, 110, 130)], 0, 150)
    assert found == {
        "qkv_gemv": Share(0.1, 0.005, 1),
        "down": Share(0, 0, 1),
        "norms": Share(0.03, 0.01, 1),
        GAP: Share(0.02, 0, 0),
    }


def test_what_begins_early_does_not_take_its_predecessors_time():
    """A launch that is there from the first part of a longer one on: the parts' time stays theirs."""
    spans = [
        span("chain.o_proj", 0, 5, 20),
        span("chain.gate_up", 20, 22, 80),
        span("chain.down", 80, 85, 100),
        span("attention", 10, 101, 140),
    ]
    assert breakdown(spans, 0, 140) == {
        "o_proj": Share(0.02, 0.005, 1),
        "gate_up": Share(0.06, 0.002, 1),
        "down": Share(0.02, 0.005, 1),
        "attention": Share(0.04, 0.001, 1),
    }


def test_parts_of_layers_that_follow_each_other_have_no_gap():
    """One launch: a block's part begins where the one before it ends, and blocks wait for the last one's results."""
    parts = ("qkv", "attention", "o_proj", "gate_up", "down")
    spans = [span("embed", 0, 0, 20)]
    for layer in range(3):
        for number, part in enumerate(parts):
            last = spans[-1].end
            spans.append(span(f"layers.{part}", last - 5 * (len(spans) > 1), last + 2, last + 10 + number, layer))
    spans.append(span("norm", spans[-1].end - 30, spans[-1].end + 1, spans[-1].end + 4, 3))
    found = breakdown(spans, 0, spans[-1].end)
    assert found == {
        "embed": Share(0.02, 0, 1),
        **{
            region: Share(pytest.approx(3 * (10 + number) / 1e3), pytest.approx(0.006), 3)
            for number, region in enumerate(("qkv_gemv", "attention", "o_proj", "gate_up", "down"))
        },
        "norms": Share(0.004, 0.001, 1),
    }
    assert problems(found, total(found), 17) == []
    lost = [one for one in spans if (one.label, one.layer) != ("layers.down", 1)]  # its time is the next part's
    assert problems(breakdown(lost, 0, spans[-1].end), total(found), 17)


def test_a_gap_before_and_inside_a_step():
    """What is launched late, while nothing or a later one runs."""
    spans = [span("qkv", 10, 10, 20), span("attention", 60, 60, 70), span("o_proj", 30, 71, 90)]
    assert breakdown(spans, 0, 100) == {
        GAP: Share(0.01 + 0.01 + 0.01, 0, 0),
        "qkv_gemv": Share(0.01, 0, 1),
        "attention": Share(0.04, 0.03, 1),
        "o_proj": Share(0.02, 0.001, 1),
    }


def chain(rng):
    """Launches in order, each ending after its predecessor, some begun far too early and some late."""
    found, end = [], 0
    for i in range(rng.randint(1, 30)):
        begin = max(end + rng.choice([-400, -40, -20, -5, 0, 0, 3, 50]), 0)
        resumed = max(begin, end) + rng.randint(0, 5)
        end = resumed + rng.randint(1, 100)
        found.append(
            span(rng.choice([label for label, region in module.REGIONS.items() if region]), begin, resumed, end, i)
        )
    return found


def covered(spans, begin, end):
    """Nanoseconds of the window in which any launch runs, counted one by one."""
    return sum(any(one.begin <= t < one.end for one in spans) for t in range(begin, end))


@pytest.mark.parametrize("trial", range(50))
def test_regions_and_gap_are_the_whole(trial):
    rng = random.Random()
    spans = chain(rng)
    begin, end = rng.randint(-50, 40), spans[-1].end + rng.randint(0, 50)
    found = breakdown(spans, begin, end)
    assert total(found) == pytest.approx((end - begin) / 1e3)
    gap = found.get(GAP, Share()).us
    assert gap == pytest.approx((end - begin - covered(spans, begin, end)) / 1e3)
    assert sum(share.launches for share in found.values()) == sum(begin < one.end <= end for one in spans)
    assert all(share.us >= share.waiting >= 0 for share in found.values())


def durations(spans, begin, end):
    """The broken variant that adds up what each launch took: overlaps twice, gaps never."""
    found = {}
    for one in spans:
        if begin < one.end <= end:
            region = module.REGIONS[one.label]
            found[region] = found.get(region, Share()) + Share((one.end - one.begin) / 1e3, 0, 1)
    return found


def test_what_does_not_add_up_is_found():
    found = breakdown(TOKEN, 1000, 1700)
    assert problems(found, 0.7, 4) == []
    assert problems(found, 0.69, 4) == []
    assert "0.7 µs, and a token takes 0.8" in problems(found, 0.8, 4)[0]
    assert problems(found, 0.7, 5) == ["4 launches a token left their times, of 5"]
    assert problems(durations(TOKEN, 1000, 1700), 0.7, 4)  # the gaps are missing
    without_gap = {region: share for region, share in found.items() if region != GAP}
    assert problems(without_gap, 0.7, 4)
    early = [*TOKEN[:3], span("attention", 1300, 1500, 1600), TOKEN[4]]
    assert problems(durations(early, 1200, 1700), 0.5, 4)  # overlaps are counted twice
    assert problems(breakdown(early, 1200, 1700), 0.5, 4) == []
    untraced = [one for one in TOKEN if one.label != "attention"]
    assert problems(breakdown(untraced, 1000, 1700), 0.7, 4) == ["3 launches a token left their times, of 4"]


def test_tokens_are_cut_at_the_loops_kernel_put_in_order_and_averaged():
    order = [("embed", 0), ("qkv", 0), ("attention", 0), ("control", 0)]
    shifted = [span(one.label, one.begin + 700, one.resumed + 700, one.end + 700) for one in TOKEN[1:]]
    other = span("embed", 1, 2, 9000, layer=5)
    tokens = tokens_of([*shifted[::-1], other, *TOKEN[::-1]], order)
    assert [(begin, end) for begin, end, _ in tokens] == [(1000, 1700), (1700, 2400)]
    assert [[one.label for one in spans] for _, _, spans in tokens] == [[label for label, _ in order]] * 2
    parts = [breakdown(spans, begin, end) for begin, end, spans in tokens]
    assert parts[0] == parts[1]
    averaged = mean([*parts, breakdown([], 0, 700)])
    assert total(averaged) == pytest.approx(0.7)
    assert list(averaged) == ["embed", "qkv_gemv", "attention", "control", GAP]
    assert averaged["embed"].launches == pytest.approx(2 / 3)
    assert tokens_of(TOKEN, [("embed", 0), ("accept", 3)]) == []


def test_every_fused_region_is_named():
    asked = {"qkv_gemv", "append_kv", "attention", "attention_combine", "o_proj", "gate_up", "down", "norms", "lm_head"}
    assert asked | {"sample", "kernel_gap"} <= {*module.REGIONS.values(), *module.FUSED, GAP}

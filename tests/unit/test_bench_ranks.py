"""A round of several ranks: what its benchmark takes, refuses, and makes of a trace."""

from itertools import pairwise

import pytest

from cuq1.errors import Cuq1Error
from tools import bench_ranks, bench_round
from tools.bench_ranks import _check, differences
from tools.bench_round import ranks_of
from tools.tracing import Span, Step, steps


def test_ranks_on_the_command_line():
    assert ranks_of("0,1") == [0, 1]
    assert ranks_of("7,2,5") == [7, 2, 5]
    for text in ("0", "1,1", "-1,0", "a,b", "0,1,2,3,4,5,6,7,8"):
        with pytest.raises(ValueError):  # noqa: PT011
            ranks_of(text)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--tp", "8", "--ranks", "0,8"], "--ranks 0,8: with --tp 8 they go to 7"),
        (["--ranks", "0,1", "--kernels"], "without their peers"),
        (["--ranks", "0,1", "--marginal"], "without their peers"),
        (["--unfolded"], "--unfolded goes with --ranks"),
    ],
)
def test_what_cannot_be_measured_is_refused(argv, message, capsys):
    assert bench_round.main(argv) == 2
    assert message in capsys.readouterr().err


def test_a_launcher_starts_a_process_for_each_rank(monkeypatch):
    started = []

    class Launch:
        def __init__(self, command, world, *_):
            started.append((command[1:], world))

        def run(self):
            return 7

    monkeypatch.delenv("CUQ1_RANK", raising=False)
    monkeypatch.setattr(bench_ranks, "Launch", Launch)
    assert bench_round.main(["--tp", "8", "--ranks", "0,1", "--rows", "4"]) == 7
    assert started == [(["-m", "tools.bench_round", "--tp", "8", "--ranks", "0,1", "--rows", "4"], 2)]


def results(*found):
    """(alone, exchanging) of each rank."""
    return [{"rank": i, "results": {"alone": a, "exchanging": b}} for i, (a, b) in enumerate(found)]


def test_ranks_have_to_agree_where_they_exchange_and_there_only():
    _check(results(("a", "x"), ("b", "x")))
    with pytest.raises(Cuq1Error, match="2 different results"):
        _check(results(("a", "x"), ("b", "y")))
    unfolded = results(("a", "x"), ("b", "x"))
    for one, other in zip(unfolded, "yz", strict=True):
        one["results"]["unfolded"] = other
    with pytest.raises(Cuq1Error, match="2 different results"):
        _check(unfolded)
    for lost in ((("a", "x"), ("a", "x")), (("x", "x"), ("b", "x"))):
        with pytest.raises(Cuq1Error, match="would not find"):
            _check(results(*lost))


def test_steps_part_what_a_launch_waits_for_from_its_work():
    def span(label, layer, come, end):
        return Span(label, layer, 0, 0, 0, 0, end, 1, come)

    one = [span("embed", 0, 0, 1000), span("o_proj", 0, 1500, 3000), span("o_proj", 1, 3200, 4000)]
    other = [span("embed", 0, 0, 1000), span("o_proj", 0, 1700, 3000), span("o_proj", -1, 3200, 4000)]
    found = steps([one, other])
    assert found["target o_proj"].count == 1.5
    assert found["target o_proj"].wait == pytest.approx((0.5 + 0.2 + 0.7) / 2)
    assert found["target o_proj"].work == pytest.approx((1.5 + 0.8 + 1.3) / 2)
    assert found["draft o_proj"] == Step(0.5, pytest.approx(0.1), pytest.approx(0.4))
    whole = sum(step.wait + step.work for step in found.values())
    assert whole == pytest.approx(sum(b.end - a.end for part in (one, other) for a, b in pairwise(part)) / 2e3)


def test_differences_come_largest_first_and_add_up():
    alone = {"qkv": Step(88, 50.0, 200.0), "attn_tail": Step(88, 40.0, 100.0)}
    together = {"qkv": Step(88, 45.0, 170.0), "attn_tail": Step(88, 120.0, 105.0), "mlp_tail": Step(88, 60.0, 50.0)}
    found = differences(alone, together)
    assert [(name, pytest.approx(more)) for name, _, _, more in found] == [
        ("mlp_tail", 110.0),
        ("attn_tail", 85.0),
        ("qkv", -35.0),
    ]

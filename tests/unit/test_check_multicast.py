"""check_multicast: that it touches nothing unless it is told to, and how it judges. No GPU is needed."""

from itertools import permutations
from types import SimpleNamespace

import numpy as np
import pytest

from cuq1.cuda.kernels import multicast as family
from cuq1.errors import DeviceError
from cuq1.parallel import multicast
from tools import check_multicast
from tools.check_multicast import PATTERNS, judged, main, numbers
from tools.exchange_probe import dims, in_order
from tools.multicast_paths import BATCH, sentence
from tools.peer_loads import patch

YES = "--yes-use-multicast"


@pytest.fixture
def started(monkeypatch):
    """The command lines with which ranks would have been started, on a machine of two GPUs."""
    calls = []
    gpus = [SimpleNamespace(ordinal=i, name="H200", bus=f"0000:0{i}:00.0", multicast=True) for i in range(2)]
    monkeypatch.setattr(multicast, "SIGNS", {})
    monkeypatch.delenv("CUQ1_RANK", raising=False)
    monkeypatch.setattr(check_multicast.topology, "read", lambda: SimpleNamespace(gpus=gpus))
    monkeypatch.setattr(check_multicast, "start", lambda module, ranks, argv: calls.append((module, ranks, argv)) or 0)
    return SimpleNamespace(calls=calls, gpus=gpus)


def test_ranks_are_started_where_the_user_says_so(started):
    assert main([YES]) == 0
    assert main(["--peer-loads", "--ranks", "8", "whole"]) == 0
    assert started.calls == [
        ("tools.check_multicast", 2, [YES]),
        ("tools.check_multicast", 8, ["--peer-loads", "--ranks", "8", "whole"]),
    ]


def refused(capsys, argv, why):
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"check_multicast: {why}")
    assert err.count("\n") == 1


def test_without_the_flag_nothing_is_started(started, capsys):
    refused(capsys, [], "this makes multicast objects on the GPUs of this machine: say --yes-use-multicast")
    assert started.calls == []


def test_a_machine_that_switches_it_off_is_obeyed(started, capsys, monkeypatch):
    monkeypatch.setattr(multicast, "SIGNS", {"NCCL_NVLS_ENABLE": "0"})
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    refused(capsys, [YES], "NCCL_NVLS_ENABLE=0 says that this machine's NVLink multicast is not to be used: leave it")
    assert main(["--peer-loads"]) == 0
    assert [argv for *_, argv in started.calls] == [["--peer-loads"]]


def test_gpus_that_are_too_few_or_cannot_are_named(started, capsys):
    refused(capsys, [YES, "--ranks", "3"], "3 ranks need a GPU each, and 2 are visible: give --ranks")
    started.gpus[1].multicast = False
    refused(capsys, [YES], "GPU 1 (H200, 0000:01:00.0) has no NVLink multicast: use --peer-loads")
    refused(capsys, [YES, "nothing"], "'nothing' is no check: choose of plain, whole")
    refused(capsys, [YES, "--ranks", "9"], "argument --ranks: invalid choice")
    assert started.calls == []


def test_a_rank_asks_again(monkeypatch):
    """Also a rank that something else starts makes no object before `wanted` has agreed."""
    monkeypatch.setenv("CUQ1_RANK", "0")
    asked = []

    class Meeting:
        rank, world = 0, 2

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

    def wanted(meeting, *, asked):
        raise DeviceError(f"asked: {asked}")

    monkeypatch.setattr(check_multicast, "Rendezvous", Meeting)
    monkeypatch.setattr(check_multicast, "open_rank", lambda meeting: "H200")
    monkeypatch.setattr(check_multicast, "wanted", wanted)
    monkeypatch.setattr(check_multicast, "Paths", lambda *_, **how: asked.append(how))
    assert main([YES]) == 2
    assert asked == []


@pytest.mark.parametrize("places", [2, 8])
def test_whole_numbers_add_up_exactly_in_any_order(places):
    values = numbers("whole", places, 64, np.random.default_rng(places))
    assert values.shape == (PATTERNS, places, 8, 64)
    sums = in_order(values)
    assert (sums == values.astype(np.float64).sum(axis=1)).all()
    for order in list(permutations(range(places)))[:: 1 + 5000 * (places > 2)]:
        assert in_order(values[:, order]).tobytes() == sums.tobytes()


def one(kind, places, rng=7):
    values = numbers(kind, places, 64, np.random.default_rng(rng))
    return values[0], in_order(values)[0]


@pytest.mark.parametrize("places", [2, 3, 8])
@pytest.mark.parametrize("kind", check_multicast.KINDS)
def test_the_same_sums_pass(kind, places):
    values, sums = one(kind, places)
    assert judged(kind, values, sums.copy(), sums) == {"from_push": 0, "beyond": 0, "failed": 0}


@pytest.mark.parametrize("places", [3, 8])
@pytest.mark.parametrize("kind", ["plain", "cancelling"])
def test_another_order_of_more_than_two_passes_and_is_counted(kind, places):
    values, sums = one(kind, places)
    found = judged(kind, values, in_order(values[None, ::-1])[0], sums)
    assert found["from_push"] > 0
    assert (found["beyond"], found["failed"]) == (0, 0)


def test_two_ranks_sums_do_not_depend_on_the_order():
    values, sums = one("plain", 2)
    assert judged("plain", values, in_order(values[None, ::-1])[0], sums)["from_push"] == 0


@pytest.mark.parametrize(("kind", "places", "failed"), [("plain", 2, 1), ("whole", 8, 1), ("plain", 8, 0)])
def test_another_last_bit(kind, places, failed):
    values, sums = one(kind, places)
    other = sums.copy()
    other.view(np.uint32)[3, 5] ^= 1
    found = judged(kind, values, other, sums)
    assert (found["from_push"], found["failed"]) == (1, failed)


@pytest.mark.parametrize("places", [2, 8])
@pytest.mark.parametrize("wrong", ["missing", "nan", "infinite", "twice"])
def test_sums_that_are_wrong_are_beyond(places, wrong):
    values, sums = one("plain", places)
    other = {
        "missing": in_order(values[None, 1:])[0],
        "nan": np.full_like(sums, np.nan),
        "infinite": np.full_like(sums, np.inf),
        "twice": sums + values[0],
    }[wrong]
    found = judged("plain", values, other, sums)
    assert found["beyond"] > 0.5 * sums.size
    assert found["failed"] == 1


def test_sums_that_are_flushed_to_zero_are_told():
    values, sums = one("subnormal", 8)
    assert judged("subnormal", values, np.zeros_like(sums), sums)["failed"] == 1


def test_a_sum_with_one_rounding_too_few_bits_is_beyond():
    """As a switch that adds in 22 bits would give it."""
    values, sums = one("plain", 2)
    wide = values.astype(np.float64).sum(axis=0)
    mantissa, exponent = np.frexp(wide)
    coarse = np.ldexp(np.round(mantissa * 2**21) / 2**21, exponent).astype(np.float32)
    assert judged("plain", values, coarse, sums)["failed"] == 1


def test_the_tools_numbers_fit_each_other():
    assert BATCH % PATTERNS == 0
    assert family.nbytes(dims(8)) == 3 * 8 * 3072 * 4 + 32
    places = [family.buffer(dims(8), number) for number in (-1, 0, 1, 2, 3)]
    assert places == [2 * 98304, 0, 98304, 2 * 98304, 0]


def test_faults_are_sentences():
    fault = SimpleNamespace(what=6, layer=4, detail=1)
    assert sentence(fault) == "rank 1's part of exchange 4 did not come within 4000 ms"
    fault.detail = -1
    assert sentence(fault) == "some rank's part of exchange 4 did not come within 4000 ms"
    fault.what = 1
    assert sentence(fault) == "a value that is not finite in exchange 4"


def test_a_source_that_has_changed_is_refused():
    tail = family.tail(dims(2))
    _, new = patch(tail, [0, 64])
    assert "DISTANCES[RANKS] = {0, 64};" in new
    with pytest.raises(ValueError, match=r"exchange_multicast\.cu is not as it was"):
        patch(tail, [0, 64], ("no such line", ""))

"""What check_exchange compares with: the numbers that ranks push, their sums, and what the device draws."""

import json
import subprocess
import sys

import numpy as np
import pytest

from cuq1.cuda.compile import compile_kernel
from cuq1.cuda.kernels import exchange_probe
from tests.paths import ROOT
from tools import check_exchange
from tools.exchange_probe import GRAPHS, MOST, Setting, dims, in_order, mixed, partials, rows_of

KINDS = ("plain", "cancelling", "subnormal", "zeros", "largest", "all")


@pytest.mark.parametrize("places", [2, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_sums_are_finite_and_of_what_the_kind_says(kind, places):
    values = partials(kind, 3, places, 256, np.random.default_rng(places))
    assert values.shape == (3, places, 8, 256)
    assert values.dtype == np.float32
    sums = in_order(values)
    assert sums.dtype == np.float32
    assert np.isfinite(sums).all()
    magnitude = np.abs(values)
    if kind == "subnormal":
        assert magnitude.max() < np.finfo(np.float32).tiny
        assert (sums != 0).mean() > 0.99  # nothing is flushed to zero here
    if kind == "zeros":
        assert magnitude.max() == 0
        assert 0 < np.signbit(sums).mean() < 0.95  # where all are -0
    if kind == "largest":
        assert (magnitude == MOST).all()
    if kind == "cancelling":
        assert (in_order(values[:, ::-1]) != sums).any() == (places > 2)
    if kind == "all":
        assert magnitude.max() == MOST
        assert (magnitude == 2.0**24).any()
        assert (np.signbit(values) & (values == 0)).any()


def test_sums_go_from_place_0_on():
    values = np.array([2.0**24, 1.0, -(2.0**24), 1.0], np.float32).reshape(1, 4, 1, 1)
    assert in_order(values).item() == 1.0  # 2^24 + 1 is 2^24
    assert in_order(values[:, [0, 2, 1, 3]]).item() == 2.0


def test_what_is_drawn_from_an_exchanges_number():
    def scalar(x):
        x = ((x ^ x >> 16) * 0x7FEB352D) & 0xFFFFFFFF
        x = ((x ^ x >> 15) * 0x846CA68B) & 0xFFFFFFFF
        return x ^ x >> 16

    numbers = np.array([0, 1, 77, 2**32 - 1], np.uint32)
    assert mixed(numbers).tolist() == [scalar(int(one)) for one in numbers]
    rows = rows_of(100_000, 5)
    assert rows[77] == 1 + scalar(77 ^ scalar(5)) % 8
    assert (np.bincount(rows, minlength=9)[1:] > 12_000).all()


def test_graphs_keep_the_rotation():
    assert all(length % 3 == 0 for length in GRAPHS)


@pytest.mark.parametrize(
    "patch", [(check_exchange.SUMMED, check_exchange.ANY_ORDER), (check_exchange.HAS_COME, check_exchange.IS_NUMBER)]
)
def test_broken_variants_compile(patch):
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-python")
    assert compile_kernel(exchange_probe.take(dims(4)), patch=patch).registers


class Ranks(check_exchange.Rank):
    """A rank whose runs find what a test says."""

    found: dict = {}  # noqa: RUF012

    def run(self, setting):
        assert isinstance(setting, Setting)
        return [self.found, self.found]


def judged(check, **found):
    class Meeting:
        world, rank = 2, 0

    rank = Ranks(Meeting(), 600, 1)
    rows = rows_of(600, 1)
    right = {"launched": 600, "done": 600, "compared": int(rows.sum()) * check_exchange.COLUMNS, "wrong": 0}
    right |= {"what": 0, "fault": None, "blamed": None, "at": None, "seconds": 0.1}
    right |= dict.fromkeys(("exchange", "place", "row", "column"), 0)
    rank.found = right | found
    return check_exchange.CHECKS[check](rank)["failed"]


def test_many_judges():
    assert judged("many") == 0
    assert judged("many", wrong=1) == 1
    assert judged("many", compared=1) == 1
    assert judged("many", done=597) == 1
    assert judged("many", fault="something") == 1


def test_a_skipped_push_has_to_be_named():
    told = {"what": 6, "blamed": 1, "at": 301, "fault": "rank 1's part of exchange 301 (buffer 1)", "seconds": 4.1}
    assert judged("skipped", **told) == 0
    assert judged("skipped") == 1
    assert judged("skipped", **told | {"blamed": 0}) == 1
    assert judged("skipped", **told | {"seconds": 9.0}) == 1
    assert judged("skipped", **told | {"fault": "exchange 301 (buffer 2)"}) == 1


@pytest.mark.parametrize("check", ["damaged", "never", "late", "order"])
def test_a_broken_variant_that_passes_is_a_failure(check):
    assert judged(check) == 1
    assert judged(check, wrong=3) == 0
    assert judged(check, what=6, fault="something") == 0


def test_isnan_has_to_time_out():
    assert judged("isnan", what=6, fault="something") == 0
    assert judged("isnan", what=1, fault="something") == 1


def run(*arguments):
    command = [sys.executable, "-m", "tools.check_exchange", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)


def test_bad_input_is_one_sentence():
    done = run("some")
    assert done.returncode == 2
    assert done.stderr.startswith("check_exchange: 'some' is no check: choose of many, ")
    assert done.stderr.count("\n") == 1
    for arguments in (("--ranks", "3"), ("--seed", "-1"), ("--exchanges", "0")):
        done = run(*arguments)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1


def test_json_has_no_numpy_in_it():
    class Meeting:
        world, rank = 2, 0

    rank = Ranks(Meeting(), 600, 1)
    rank.found = {"launched": 3, "done": 3, "compared": 0, "wrong": 1, "fault": None, "seconds": 0.1}
    rank.found |= dict.fromkeys(("exchange", "place", "row", "column"), 0)
    json.dumps(check_exchange.many(rank))

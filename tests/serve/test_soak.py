"""64 clients at once, some of which leave and some of which send nonsense: a short run of tools/soak_serve.py."""

import asyncio
import os
from dataclasses import replace

import pytest

from tests.serve.running import LIMIT, ON_CPU, nano_service, serving
from tools import soak_serve

MAX_QUEUE = soak_serve.MAX_QUEUE if ON_CPU else 8  # fewer wait for nano on a GPU: its clients are what is slow
SECONDS = 3 if ON_CPU else 6


@pytest.fixture(scope="module")
def crowded():
    service = nano_service(max_queue=MAX_QUEUE, snapshots=(16 << 20, 0))
    with serving(service) as url:
        yield url
    assert service.close(drain=False, timeout=LIMIT)


@pytest.fixture(scope="module")
def asked(crowded):
    cases = soak_serve.cases(1, 16)
    asyncio.run(soak_serve.solo(crowded, cases))
    return cases


def test_every_answer_is_the_one_it_has_alone(crowded, asked):
    report = asyncio.run(soak_serve.soak(crowded, asked, 64, SECONDS, 1, os.getpid()))
    assert report.problems(grown=128 << 20, max_queue=MAX_QUEUE) == []  # this process holds the clients too
    assert report.counts["busy"] > 0  # the bound was reached
    assert report.most_waiting > MAX_QUEUE // 4
    for kind in ("streamed", "whole", "left", "malformed"):
        assert report.counts[kind] > 0, report.counts


def test_wrong_answers_and_growth_are_seen(crowded, asked):
    """The negative control: another answer is expected, the bound is lower, memory grows."""
    others = [replace(case, expected=case.expected + "x") for case in asked]
    report = asyncio.run(soak_serve.soak(crowded, others, 4, 1, 2, None))
    assert any("is not" in problem for problem in report.problems())
    report = soak_serve.Report(most_waiting=41, memory=[index << 20 for index in range(100)])
    assert len(report.problems()) == 2

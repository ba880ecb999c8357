"""The decode loop on the device against the one that the host steps; tools/check_loop.py does the same at length."""

import argparse
import gc
import time

import numpy as np
import pytest

from cuq1.cuda.engine import CudaEngine
from cuq1.errors import Cuq1Error, RequestError
from cuq1.sampling import DecodeParams
from tests.paths import NANO
from tools import check_loop, loop_drafting
from tools.bench import nano

pytestmark = pytest.mark.gpu

OPTIONS = argparse.Namespace(requests=24, rounds=300, samples=4000, tokens=5000, seed=3)


@pytest.fixture(scope="module")
def prompts():
    return nano()[2](6, 31)


@pytest.fixture(scope="module")
def device(gpu):
    with CudaEngine(NANO, loop="device") as engine:
        yield engine


@pytest.fixture(scope="module")
def host(gpu):
    with CudaEngine(NANO, loop="host") as engine:
        yield engine


@pytest.mark.parametrize("name", ["equal", "ends", "gap", "distribution", "million", "stall"])
def test_what_the_tool_checks(gpu, name):
    report = check_loop.CHECKS[name](OPTIONS)
    assert report["failed"] == 0, report


def test_a_skipped_depth_runs_no_kernel(gpu):
    report = loop_drafting.check_skipped()
    assert report["failed"] == 0, report


def test_a_loop_that_ignores_the_budget_is_found_out(gpu, host, prompts):
    """The control: equality with the host's loop is not for nothing."""
    params = DecodeParams(temperature=1.0, top_k=20, seed=1, max_tokens=21)
    expected = check_loop.finished(host, prompts[0], params)
    for fault in (1, 2):
        stops = (check_loop.flat(expected[0])[12],) if fault == 2 else ()
        wanted = check_loop.finished(host, prompts[0], DecodeParams(**{**vars(params), "stop_tokens": stops}))
        with CudaEngine(NANO, loop="device", defines={"control": (("TEST_FAULT", fault),)}) as wrong:
            got = check_loop.finished(wrong, prompts[0], DecodeParams(**{**vars(params), "stop_tokens": stops}))
        assert got != wanted


def test_an_abandoned_stream_is_cancelled(device, host, prompts):
    for engine in (device, host):
        engine.rewind(0)
        engine.prefill(prompts[1])
        for count, _ in enumerate(engine.decode(DecodeParams(temperature=0, max_tokens=400))):
            if count == 3:
                break
        gc.collect()
    assert device.tokens == host.tokens
    assert not device._loop.running


def test_whatever_comes_next_ends_what_is_running(device, host, prompts):
    found = []
    for engine in (device, host):
        engine.rewind(0)
        engine.prefill(prompts[2])
        stream = engine.decode(DecodeParams(temperature=0, max_tokens=400))
        read = [next(stream) for _ in range(3)]
        scores = engine.score(prompts[3])
        read += [next(stream) for _ in range(3)] if engine is host else []
        engine.rewind(len(prompts[2]) + 2)
        with pytest.raises(RequestError, match="this request ended"):
            next(stream)
        again = list(engine.decode(DecodeParams(temperature=0, max_tokens=30)))
        found.append((read[:3], scores.tolist(), again, engine.tokens))
    assert found[0] == found[1]


def test_a_slow_reader_loses_nothing(device, host, prompts):
    params = DecodeParams(temperature=1.0, top_k=20, seed=5, max_tokens=600)
    expected = check_loop.finished(host, prompts[4], params)
    device.rewind(0)
    device.prefill(prompts[4])
    before = device._loop.resumed
    rounds = []
    for step in device.decode(params):
        rounds.append(step)
        if len(rounds) % 20 == 0:
            time.sleep(0.02)
    assert rounds == expected[0]
    assert device._loop.resumed > before


def test_many_stop_tokens_are_watched_by_the_host(device, host, prompts):
    params = DecodeParams(temperature=0, max_tokens=50, stop_tokens=tuple(range(3900, 3950)))
    assert check_loop.finished(device, prompts[0], params) == check_loop.finished(host, prompts[0], params)


def test_values_that_are_not_finite_stop_the_request_by_name(gpu, prompts):

    with CudaEngine(NANO, loop="device") as engine:
        params = DecodeParams(temperature=0, max_tokens=20)
        before = check_loop.finished(engine, prompts[0], params)
        engine.rewind(0)
        engine.prefill(prompts[0])
        good = np.empty(256, np.float32)
        engine._runtime.read("layers.3.ffn_norm", good)
        engine._runtime.write("layers.3.ffn_norm", np.full(256, np.nan, np.float32))
        with pytest.raises(Cuq1Error, match=r"not finite appeared in .* of layer 3"):
            list(engine.decode(params))
        engine._runtime.write("layers.3.ffn_norm", good)
        assert check_loop.finished(engine, prompts[0], params) == before


def test_forced_acceptance(gpu, prompts):
    for forced in (0, 2, 5):
        with CudaEngine(NANO, loop="device", defines={"accept": (("FORCE_ACCEPT", forced),)}) as engine:
            rounds, _ = check_loop.finished(engine, prompts[0], DecodeParams(max_tokens=100, draft=5, seed=1, top_k=20))
            assert {step.accepted for step in rounds[1:]} == {forced}

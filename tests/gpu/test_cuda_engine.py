"""The GPU engine against the reference, on nano."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from cuq1.cuda.engine import CudaEngine
from cuq1.cuda.memory import Arena
from cuq1.cuda.repack import quantised
from cuq1.engine import open_engine
from cuq1.errors import Cuq1Error, DeviceError, RequestError
from cuq1.reference.engine import ReferenceEngine
from cuq1.sampling import DecodeParams
from tests.paths import NANO
from tools.acceptance import judge, rounds_of, variations
from tools.bench import nano

pytestmark = pytest.mark.gpu

TOLERANCE = 1e-2  # of logits, ||gpu - cpu|| / ||cpu||


@pytest.fixture(scope="module")
def prompts():
    return nano()[2](9, 11)


@pytest.fixture(scope="module")
def cuda(gpu):
    with open_engine(NANO, "cuda") as engine:
        yield engine


@pytest.fixture(scope="module")
def cpu():
    with open_engine(NANO, "cpu") as engine:
        yield engine


def relative(got, expected):
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def tokens(engine, ids, **params):
    engine.prefill(ids)
    return [token for step in engine.decode(DecodeParams(**{"max_tokens": 60, **params})) for token in step]


def test_scores(cuda, cpu, prompts):
    for ids in prompts:
        assert relative(cuda.score(ids), cpu.score(ids)) < TOLERANCE


def test_scores_of_another_prompt_are_rejected(cuda, cpu, prompts):
    ids = list(prompts[0])
    ids[3] ^= 1
    assert relative(cuda.score(ids), cpu.score(prompts[0])) > 10 * TOLERANCE


@pytest.mark.parametrize("draft", ["off", 1, 4, 7, "auto"])
def test_greedy_follows_the_reference(cuda, cpu, prompts, draft):
    for ids in prompts[:4]:
        output = tokens(cuda, ids, temperature=0, draft=draft)
        scores = cpu.score([*ids, *output[:-1]])[len(ids) - 1 :]
        for row, token in zip(scores, output, strict=True):
            assert row.max() - row[token] < 0.1  # the reference's choice, or as good as


SAMPLED = DecodeParams(temperature=1.0, top_k=20, top_p=1.0, seed=3, draft=7, max_tokens=60)


@pytest.fixture(scope="module")
def rounds(gpu, prompts):
    with CudaEngine(NANO, loop="host") as engine:
        return [one for ids in prompts[:6] for one in rounds_of(engine, ids, SAMPLED)]


@pytest.fixture(scope="module")
def judging():
    """The reference with the draft's lm_head in E4M3, as the GPU keeps it."""
    with ReferenceEngine(NANO) as engine:
        weights = engine._draft_weights
        rounded = [
            codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * scales
            for codes, scales in map(quantised, weights.lm_head)
        ]
        engine._draft_weights = replace(weights, lm_head=rounded)
        engine.rewind(0)
        yield engine


def test_drafts_are_drawn_from_the_references_distributions(judging, rounds):
    found = variations(rounds, [judge(judging, one.tokens, one.drafts, SAMPLED) for one in rounds])
    print("total variation by depth, mean:", found.mean(axis=0))
    assert len(rounds) > 50
    # Of most rounds: where two experts' logits are as good as equal, the other one is chosen, and rows after it differ.
    assert (np.median(found, axis=0) < 2e-3).all()
    assert (found.mean(axis=0) < 2e-2).all()


def test_an_unrounded_head_is_noticed(cpu, rounds):
    found = variations(rounds, [judge(cpu, one.tokens, one.drafts, SAMPLED) for one in rounds])
    assert (np.median(found, axis=0) > 8e-3).all()


def test_distributions_after_other_drafts_are_rejected(judging, rounds):
    others = [judge(judging, one.tokens, (*one.drafts[1:], one.drafts[0]), SAMPLED) for one in rounds]
    assert (np.median(variations(rounds, others), axis=0)[1:] > 0.1).all()


def test_the_reference_accepts_what_the_gpu_accepted(cpu, rounds):
    judged = [judge(cpu, one.tokens, one.drafts, SAMPLED).accepted for one in rounds]
    assert np.mean([a == one.accepted for a, one in zip(judged, rounds, strict=True)]) > 0.95


def test_verified_rows_are_those_of_a_prompt(cuda, cpu, prompts):
    for ids in prompts[:4]:
        for length in (1, 7, 8, 9, len(ids)):
            got = cuda.verified_logits(ids[:length])
            assert relative(got, cpu.score(ids[:length])[-len(got) :]) < TOLERANCE


def test_the_same_request_gives_the_same_tokens(cuda, prompts):
    for params in ({"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 5}, {"temperature": 1.0, "seed": 6}):
        cuda.rewind(0)
        first = tokens(cuda, prompts[1], **params)
        tokens(cuda, prompts[2])
        cuda.rewind(0)
        assert tokens(cuda, prompts[1], **params) == first


def test_sampling_on_the_host_and_on_the_device_agree(cuda, prompts):
    """top_k 33 is sampled on the host, 32 on the device: with a top_p that neither reaches, the tokens are equal."""
    for seed, ids in enumerate(prompts[:4]):
        params = {"temperature": 0.7, "top_p": 0.5, "seed": seed, "draft": 4}
        cuda.rewind(0)
        device = tokens(cuda, ids, top_k=32, **params)
        cuda.rewind(0)
        assert tokens(cuda, ids, top_k=33, **params) == device


def test_a_conversation_goes_on_from_what_is_held(cuda, cpu, prompts):
    ids = list(prompts[1])
    output = tokens(cuda, ids, temperature=0)
    longer = [*ids, *output, *prompts[0][:40]]
    assert cuda.prefill(longer) >= len(ids)
    assert relative(cuda.verified_logits(longer), cpu.score(longer)[-8:]) < TOLERANCE
    held = tokens(cuda, longer, temperature=0)
    cuda.rewind(0)
    fresh = tokens(cuda, longer, temperature=0)
    assert held[:10] == fresh[:10]


def test_rewinding_gives_back_what_was(cuda, prompts):
    ids = list(prompts[2])
    cuda.rewind(0)
    first = tokens(cuda, ids, temperature=0)
    cuda.rewind(len(ids) - 5)
    assert tokens(cuda, ids, temperature=0)[:10] == first[:10]


def test_a_long_sequence_wraps_the_rings(cuda, cpu):
    ids = nano()[2](40, 29, "s")
    text = [token for one in ids for token in one][:3000]
    cuda.rewind(0)
    for length in (255, 256, 257, 319, 320, 321, 2047, 2048, 2049, 3000):
        got = cuda.verified_logits(text[:length])
        assert np.isfinite(got).all()
        if length < 400 or length == 3000:
            expected = cpu.score(text[:length])[-len(got) :]
            assert relative(got, expected) < 5 * TOLERANCE, length


def test_fp8_activations(gpu, cpu, prompts):
    with open_engine(NANO, "cuda", activations="fp8") as engine:
        errors = [relative(engine.verified_logits(ids), cpu.score(ids)[-8:]) for ids in prompts]
        assert np.median(errors) > 1e-3  # it does quantise
        assert max(errors) < 8e-2


def test_values_that_are_not_finite_stop_the_request_by_name(gpu, prompts):
    with open_engine(NANO, "cuda") as engine:
        engine.prefill(prompts[0])
        before = list(engine.decode(DecodeParams(temperature=0, max_tokens=20)))
        weights = np.full(256, np.nan, np.float32)
        engine._runtime.write("layers.3.ffn_norm", weights)
        with pytest.raises(Cuq1Error, match=r"not finite appeared in .* of layer 3"):
            list(engine.decode(DecodeParams(temperature=0, max_tokens=20)))
        good = open_engine(NANO, "cpu")._target_weights.layers[3].feed_forward_norm
        engine._runtime.write("layers.3.ffn_norm", good)
        engine.rewind(0)
        engine.prefill(prompts[0])
        assert list(engine.decode(DecodeParams(temperature=0, max_tokens=20))) == before


def test_too_little_memory_is_refused_by_what_takes_it(gpu):
    with pytest.raises(DeviceError, match=r"needs .* of GPU memory"):
        Arena({"weights": 1 << 50})


def test_what_no_engine_is_made_of(gpu):
    with pytest.raises(DeviceError, match="start as many with cuq1-launch"):
        CudaEngine(NANO, 2)
    with pytest.raises(RequestError, match="f16 or fp8"):
        CudaEngine(NANO, activations="bf16")

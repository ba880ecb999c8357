"""Masks and log-probabilities on a GPU, whose requests the host samples then."""

import json
import random

import numpy as np
import pytest

from cuq1.engine import open_engine
from cuq1.errors import RequestError
from cuq1.sampling import DecodeParams
from tests.masks import Lenient, Walk
from tests.paths import NANO
from tools.bench import nano

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=["device", "host"])
def cuda(gpu, request):
    with open_engine(NANO, "cuda", loop=request.param) as engine:
        yield engine


@pytest.fixture(scope="module")
def prompts():
    return nano()[2](4, 7)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("draft", ["off", 3, "auto"])
def test_every_committed_token_is_allowed(cuda, prompts, temperature, draft):
    for salt, ids in enumerate(prompts):
        mask, drafted = Walk(cuda.vocab_size, salt), 0
        cuda.prefill(ids)
        for step in cuda.decode(
            DecodeParams(max_tokens=60, temperature=temperature, top_k=20, seed=salt, draft=draft), mask=mask
        ):
            drafted += step.drafted
            assert tuple(mask.tokens) == cuda.tokens[len(ids) :]
        assert len(mask.tokens) == 60
        assert (drafted > 0) == (draft != "off")


def test_what_the_request_before_was_masked_with_is_forgotten(cuda, prompts):
    params = DecodeParams(max_tokens=40, top_k=20, seed=1)
    texts = []
    for mask in (None, Walk(cuda.vocab_size), None):
        cuda.prefill(prompts[0])
        texts.append([token for step in cuda.decode(params, mask=mask) for token in step])
    assert texts[0] == texts[2] != texts[1]


def test_a_target_without_the_mask_is_noticed(cuda, prompts, monkeypatch):
    host = cuda._host
    distribution, masks = host._distribution, []
    monkeypatch.setattr(host, "_distribution", lambda logits, params, allowed: distribution(logits, params, None))
    for ids in prompts:
        mask = Lenient(cuda.vocab_size)
        cuda.prefill(ids)
        list(cuda.decode(DecodeParams(max_tokens=40, top_k=20, seed=2), mask=mask))
        masks.append(mask)
    assert any(not allowed(mask) for mask in masks)


def allowed(mask):
    walk = Walk(mask.vocab)
    for token in mask.tokens:
        if not walk.allowed()[token]:
            return False
        walk.push(token)
    return True


def test_log_probabilities(cuda, prompts):
    """Of the logits that the decode kernels compute: as near to those of a prompt as these are to each other."""
    for params in (
        DecodeParams(max_tokens=40, top_k=20, seed=1, logprobs=5),
        DecodeParams(max_tokens=40, temperature=0, logprobs=5),
    ):
        for ids in prompts:
            cuda.prefill(ids)
            steps = list(cuda.decode(params))
            tokens = [token for step in steps for token in step]
            entries = [entry for step in steps for entry in step.logprobs]
            assert len(entries) == len(tokens)
            rows = cuda.score([*ids, *tokens])[len(ids) - 1 : -1].astype(np.float64)
            expected = rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))
            found = np.array([entry.logprob for entry in entries])
            assert np.abs(found - expected[np.arange(len(tokens)), tokens]).max() < 0.1
            assert np.abs(found - expected[np.arange(len(tokens)), np.roll(tokens, 1)]).max() > 1
            for row, entry in zip(expected, entries, strict=True):
                assert [x for _, x in entry.top] == pytest.approx(np.sort(row)[:-6:-1], abs=0.1)


def test_json_of_random_schemas(cuda, prompts):
    pytest.importorskip("llguidance")
    jsonschema = pytest.importorskip("jsonschema")
    from tests.serve.grammars import GRAMMARS, TOKENIZER  # noqa: PLC0415
    from tests.serve.schemas import answer_schema  # noqa: PLC0415

    accepted = 0
    for number in range(30):
        schema = answer_schema(random.Random(number), 1)
        cuda.prefill(prompts[number % len(prompts)])
        mask = GRAMMARS.constraint(schema=schema).mask(False)
        params = DecodeParams(max_tokens=1500, top_k=20, top_p=0.95, seed=number, stop_tokens=(0,))
        stream = cuda.decode(params, mask=mask)
        tokens = []
        for step in stream:
            accepted += step.accepted
            tokens += step.tokens
        assert stream.finish_reason == "stop"
        jsonschema.Draft202012Validator(schema).validate(json.loads(TOKENIZER.decode(tokens[:-1])))
    assert accepted > 30


def test_a_mask_that_fails_ends_its_request_alone(cuda, prompts):
    class Failing(Walk):
        def allowed(self):
            if len(self.tokens) > 10:
                raise RequestError("too complex")
            return super().allowed()

    params = DecodeParams(max_tokens=30, top_k=20, seed=4)
    cuda.prefill(prompts[0])
    expected = [tuple(step) for step in cuda.decode(params)]
    cuda.prefill(prompts[0])
    with pytest.raises(RequestError, match="too complex"):
        list(cuda.decode(params, mask=Failing(cuda.vocab_size)))
    cuda.prefill(prompts[0])
    assert [tuple(step) for step in cuda.decode(params)] == expected

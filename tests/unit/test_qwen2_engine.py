"""The CPU engine of Qwen2 models: what it decodes, and that its bookkeeping does not show in it."""

import json

import numpy as np
import pytest

from cuq1 import DecodeParams, open_engine
from cuq1.checkpoint.qwen2 import open_qwen2
from cuq1.errors import CheckpointError, ConfigError, DeviceError, RequestError
from cuq1.pack import pack
from cuq1.reference.qwen2 import Qwen2Forward
from tests.checkpoint_files import write
from tests.fixtures.float64_qwen2 import Qwen2Evaluator, of_file, of_folder
from tools.checkpoint_qwen2 import NAMES, qwen2_config
from tools.make_checkpoint import write_qwen2_checkpoint

TINY = [name for name in NAMES if name.endswith("-tiny")]
SMALL = "qwen2.5-coder-0.5b-tiny"
CONTEXT = 300


def prompt(length, seed=None):
    return np.random.default_rng(seed).integers(0, 500, length).tolist()


def generate(engine, ids=None, **params):
    """All tokens of one request; with ids, of a fresh prompt."""
    if ids is not None:
        engine.prefill(ids)
    return [token for step in engine.decode(DecodeParams(**params)) for token in step]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A folder whose context is short, and whose tokens vary: a random tied model repeats itself."""
    config = qwen2_config(SMALL, max_position_embeddings=CONTEXT, tie_word_embeddings=False)
    return write_qwen2_checkpoint(tmp_path_factory.mktemp("models") / "hf", config, seed=3)


@pytest.fixture
def engine(small):
    with open_engine(small, "cpu") as opened:
        yield opened


@pytest.fixture
def other(small):
    with open_engine(small, "cpu") as opened:
        yield opened


def dequantised(file, folder):
    """A folder of the values that a packed file's tensors have, in FP32."""
    config, tensors = of_file(file)
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    stored = {name: ["F32", list(value.shape), value.astype("<f4").tobytes()] for name, value in tensors.items()}
    write(folder / "model.safetensors", stored)
    return folder


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("head", ["fp16", "int4"])
def test_the_family_decodes_what_float64_would_choose(tmp_path, name, head):
    """Greedy, from the folder and packed; the packed tokens are those of a folder of dequantised weights."""
    hf = write_qwen2_checkpoint(tmp_path / "hf", qwen2_config(name), seed=6, shards=2)
    pack(hf, tmp_path / "m.nanoqwen", int4_head=head == "int4")
    plain = dequantised(tmp_path / "m.nanoqwen", tmp_path / "plain")
    ids = prompt(30)
    tokens, scores = {}, {}
    for path in (hf, tmp_path / "m.nanoqwen", plain):
        with open_engine(path, "cpu") as engine:
            tokens[path.name] = generate(engine, ids, temperature=0, max_tokens=30)
            scores[path.name] = engine.score(ids)
        if path.is_dir():
            exact = Qwen2Evaluator(*of_folder(path)).logits([*ids, *tokens[path.name]])[29:-1]
            chosen = np.take_along_axis(exact, np.array(tokens[path.name])[:, None], 1)
            assert (exact.max(1, keepdims=True) - chosen).max() < 1e-4
    assert tokens["m.nanoqwen"] == tokens["plain"]
    assert np.array_equal(scores["m.nanoqwen"], scores["plain"])
    assert not np.array_equal(scores["hf"], scores["plain"])  # packing rounds: what is compared is not all the same


def test_a_model_that_is_open_already(small, tmp_path):
    ids = prompt(9)
    pack(small, tmp_path / "m.nanoqwen")
    for path in (small, tmp_path / "m.nanoqwen"):
        with open_engine(str(path)) as by_name, open_engine(open_qwen2(path)) as opened:
            assert np.array_equal(by_name.score(ids), opened.score(ids))


def test_the_checkpoints_defaults_and_limits(engine):
    assert engine.default_params == DecodeParams(temperature=0.7, top_k=20, top_p=0.8, stop_tokens=(506, 504))
    assert (engine.vocab_size, engine.context, engine.max_drafts) == (512, CONTEXT, 0)


@pytest.mark.parametrize("chunk", [1, 3, 8, 64, 65, 300])
def test_prefill_does_not_depend_on_the_chunk(engine, other, chunk):
    ids = prompt(230)
    engine.prefill(ids)
    other.prefill(ids, chunk=chunk)
    assert np.array_equal(engine._logits, other._logits)
    assert generate(engine, seed=9, max_tokens=30) == generate(other, seed=9, max_tokens=30)


def test_decoding_computes_what_score_does(engine):
    ids = prompt(40)
    tokens = generate(engine, ids, temperature=0, max_tokens=60)
    scores = engine.score([*ids, *tokens])
    assert scores[len(ids) - 1 : -1].argmax(axis=1).tolist() == tokens
    engine.prefill([*ids, *tokens])
    assert np.array_equal(engine._logits, scores[-1])


def test_a_conversation_reuses_what_is_held(engine, other):
    ids = prompt(60)
    assert engine.prefill(ids) == 0
    answer = generate(engine, seed=1, max_tokens=10)
    turn = [*ids, *answer, *prompt(15)]
    assert engine.prefill(turn) == len(ids) + len(answer) - 1  # the last token had not been through the model
    other.prefill(turn)
    assert np.array_equal(engine._logits, other._logits)
    assert engine.prefill(turn) == len(turn)
    assert generate(engine, seed=1, max_tokens=20) == generate(other, seed=1, max_tokens=20)


def test_a_rewind_to_any_length_equals_a_fresh_prefill(engine, other):
    ids = prompt(200)
    engine.prefill(ids)
    generate(engine, seed=6, max_tokens=20)
    whole = engine.tokens
    for length in (220, 219, 201, 200, 130, 64, 2, 1):
        engine.rewind(length)
        assert engine.tokens == whole[:length]
        other.rewind(0)
        other.prefill(whole[:length])
        assert generate(engine, seed=8, max_tokens=12) == generate(other, seed=8, max_tokens=12)
        engine.rewind(length)
    engine.rewind(0)
    assert engine.tokens == ()
    with pytest.raises(RequestError, match="prefill a prompt"):
        engine.decode()


@pytest.mark.parametrize(
    "params", [{}, {"top_k": 5}, {"top_p": 0.3}, {"temperature": 0.2}, {"top_k": 40, "top_p": 0.9}]
)
def test_sampling_parameters(engine, params):
    """A seed means the same tokens; each is among those that the filters leave."""
    ids = prompt(20)
    first = generate(engine, ids, seed=5, max_tokens=40, **params)
    generate(engine, prompt(33), max_tokens=9)
    assert generate(engine, ids, seed=5, max_tokens=40, **params) == first
    assert generate(engine, ids, seed=6, max_tokens=40, **params) != first
    scores = engine.score([*ids, *first])[len(ids) - 1 : -1]
    ranks = [int((row > row[token]).sum()) for row, token in zip(scores, first, strict=True)]
    assert max(ranks) < (params.get("top_k") or 512)
    assert params or max(ranks) > 40


def test_several_stop_tokens(engine):
    ids = prompt(20, seed=3)
    whole = generate(engine, ids, seed=12, max_tokens=40)
    early, late = whole[4], whole[30]
    engine.prefill(ids)
    stream = engine.decode(DecodeParams(seed=12, max_tokens=40, stop_tokens=(late, 1000, early)))
    got = [token for step in stream for token in step]
    assert got == whole[: min(whole.index(early), whole.index(late)) + 1]
    assert stream.finish_reason == "stop"
    assert engine.tokens == (*ids, *got)


def test_the_context_ends_at_its_last_position(engine):
    engine.prefill(prompt(CONTEXT - 3))
    stream = engine.decode(DecodeParams(seed=1))
    assert sum(map(len, stream)) == 3
    assert (stream.finish_reason, len(engine.tokens)) == ("length", CONTEXT)
    with pytest.raises(RequestError, match=f"fills the context of {CONTEXT}"):
        engine.decode()
    assert engine.score(prompt(CONTEXT)).shape == (CONTEXT, 512)
    for call, length in ((engine.prefill, CONTEXT), (engine.score, CONTEXT + 1)):
        with pytest.raises(RequestError, match=f"{length} tokens.* context of {CONTEXT}"):
            call(prompt(length))


def test_rounds_are_of_one_token_and_drafts_are_refused(engine):
    engine.prefill(prompt(5))
    steps = list(engine.decode(DecodeParams(seed=1, max_tokens=4)))
    assert [(len(step), step.drafted, step.accepted, step.from_prompt) for step in steps] == [
        (1, 0, 0, True),
        *[(1, 0, 0, False)] * 3,
    ]
    with pytest.raises(RequestError, match="no draft model"):
        engine.decode(DecodeParams(draft=2))


def test_an_interrupt_leaves_a_usable_engine(engine, other, monkeypatch):
    ids = prompt(30)
    engine.prefill(ids[:20])
    with monkeypatch.context() as patch:
        patch.setattr(Qwen2Forward, "logits", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        for call in (lambda: engine.prefill(ids), lambda: generate(engine)):
            with pytest.raises(KeyboardInterrupt):
                call()
    assert engine.tokens == tuple(ids)
    assert generate(engine, seed=1, max_tokens=5) == generate(other, ids, seed=1, max_tokens=5)


def test_a_closed_engine_says_so(small):
    engine = open_engine(small, "cpu")
    engine.close()
    engine.close()
    for call in (lambda: engine.prefill([1]), engine.decode, lambda: engine.score([1])):
        with pytest.raises(RequestError, match="closed"):
            call()


def test_what_is_not_computed_of_these_models(small):
    for options in ({"tp": 2}, {"activations": "fp8"}):
        with pytest.raises(RequestError, match="Qwen2 models are computed by one rank, with activations f16"):
            open_engine(small, **options)


def test_a_context_of_ones_own(small):
    with open_engine(small, "cpu", context=12) as engine:
        assert engine.context == 12
        assert len(generate(engine, [1, 2, 3], temperature=0, max_tokens=40)) == 9
        with pytest.raises(RequestError, match="context of 12"):
            engine.prefill(list(range(12)))
    for context in (0, 10**6):
        with pytest.raises(RequestError, match=f"a context of {context} is outside the model's"):
            open_engine(small, "cpu", context=context)


def test_weights_that_do_not_fit_are_refused_before_they_are_read(small, monkeypatch):
    monkeypatch.setattr("cuq1.reference.qwen2_weights.os.sysconf", {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": 2**20}.get)
    with pytest.raises(DeviceError, match=r"needs 0 GB .* use a smaller model"):
        open_engine(small)


def test_paths_that_are_no_model(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        open_engine(tmp_path)
    with pytest.raises(CheckpointError, match=r"a\.nanoqwen does not exist"):
        open_engine(tmp_path / "a.nanoqwen")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="model_type is 'llama', and iquest_q1 or qwen2 is computed here"):
        open_engine(tmp_path)

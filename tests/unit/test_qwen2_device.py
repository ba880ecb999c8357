"""The Qwen2 GPU engine's bookkeeping, with a runtime that only writes down what it is asked."""

from types import SimpleNamespace

import pytest

from cuq1.checkpoint.qwen2 import open_qwen2
from cuq1.config_qwen2 import parse_qwen2
from cuq1.cuda import device_engine, qwen2_engine
from cuq1.cuda.device_engine import Options
from cuq1.cuda.qwen2_engine import Qwen2CudaEngine
from cuq1.cuda.qwen2_weights import Qwen2Random, Qwen2Source, qwen2_layout
from cuq1.errors import ConfigError, DeviceError, RequestError
from cuq1.pack import pack
from cuq1.sampling import DecodeParams
from cuq1.sampling.rounds import Round
from tools import qwen2_engines
from tools.checkpoint_qwen2 import NAMES, qwen2_config
from tools.make_checkpoint import write_qwen2_checkpoint

CONFIG = parse_qwen2(qwen2_config(NAMES[-1], max_position_embeddings=100))


class FakeRuntime:
    """Calls, in order; every token is the position that it stands at, plus 7."""

    made = None

    def __init__(self, model, weights, rule, progress, defines, ranks):
        self.model, self.weights = model, weights
        self.lost, self.ranks, self.sizes, self.stream = "", None, {"weights": weights.layout.nbytes}, 0
        self.calls = []
        self.next = 0
        FakeRuntime.made = self

    def __getattr__(self, name):
        if name not in ("recover", "empty", "close", "check_faults"):
            raise AttributeError(name)
        return lambda: self.calls.append(name)

    def first(self, params, seed, done, limit):
        self.calls.append(("first", done))
        self.next = done
        return done + 7

    def round(self, limit):
        assert limit == 0
        self.next += 1
        self.calls.append(("round", self.next))
        return Round((self.next + 7,), 0, 0)


class FakePrefill:
    def __init__(self, runtime):
        self._runtime = runtime

    def run(self, tokens, start, end, *, settle_from):
        self._runtime.calls.append(("prefill", start, end))


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr(device_engine, "Runtime", FakeRuntime)
    monkeypatch.setattr(device_engine, "Prefill", FakePrefill)
    monkeypatch.setattr(device_engine, "HostSampler", lambda runtime, rule: None)
    monkeypatch.setattr(qwen2_engine, "open_device", lambda: SimpleNamespace(multiprocessors=132))
    monkeypatch.setattr(qwen2_engine, "free_memory", lambda: 100 << 30)
    made = Qwen2CudaEngine(CONFIG, loop="host")
    FakeRuntime.made.calls.clear()
    return made


def calls():
    found = list(FakeRuntime.made.calls)
    FakeRuntime.made.calls.clear()
    return found


def generate(engine, count):
    return [token for one in engine.decode(DecodeParams(temperature=0, max_tokens=count)) for token in one]


def test_a_request_reads_the_prompt_once_and_each_token_once(engine):
    assert engine.prefill(list(range(40))) == 0
    assert calls() == [("prefill", 0, 40)]
    assert generate(engine, 4) == [47, 48, 49, 50]
    assert calls() == [("first", 40), ("round", 41), ("round", 42), ("round", 43)]
    assert engine.tokens == (*range(40), 47, 48, 49, 50)


def test_a_rewind_computes_the_last_kept_token_again_for_its_logits(engine):
    engine.prefill(list(range(40)))
    generate(engine, 10)
    calls()
    for length in (49, 33, 17, 1):
        engine.rewind(length)
        assert calls() == []
        generate(engine, 1)
        assert calls() == [("prefill", length - 1, length), ("first", length)]


def test_pages_go_back_with_an_empty_sequence_alone(engine):
    engine.prefill(list(range(40)))
    engine.rewind(20)
    assert "empty" not in calls()
    engine.rewind(0)
    assert calls() == ["recover", "empty"]
    engine.prefill([1, 2])
    engine.prefill([3])  # nothing in common
    assert [call for call in calls() if isinstance(call, tuple)] == [("prefill", 0, 2), ("prefill", 0, 1)]


def test_a_conversation_computes_what_is_new(engine):
    engine.prefill(list(range(40)))
    output = generate(engine, 5)
    calls()
    assert engine.prefill([*range(40), *output, 1, 2, 3]) == 44
    assert calls() == [("prefill", 44, 48)]
    assert engine.prefill([*range(40), 99, 99]) == 39  # the last one's row comes again
    assert calls()[-1] == ("prefill", 39, 42)


def test_a_prompt_comes_in_chunks(engine):
    engine.prefill(list(range(70)), chunk=32)
    assert calls() == [("prefill", 0, 32), ("prefill", 32, 64), ("prefill", 64, 70)]


def test_the_context_ends_a_request(engine):
    assert engine.context == 100
    engine.prefill(list(range(97)))
    assert len(generate(engine, None)) == 3
    with pytest.raises(RequestError, match="fills the context of 100 tokens"):
        engine.decode()
    with pytest.raises(RequestError, match="context of 100"):
        engine.prefill(list(range(100)))


def test_drafts_are_refused(engine):
    assert engine.max_drafts == 0
    engine.prefill([1])
    with pytest.raises(RequestError, match="draft"):
        engine.decode(DecodeParams(draft=3))


def test_closing_gives_memory_back_once(engine):
    engine.close()
    engine.close()
    assert calls() == ["close"]
    with pytest.raises(RequestError, match="closed"):
        engine.prefill([1])


def test_memory_comes_back_where_the_loop_cannot_be_made(engine, monkeypatch):
    def fails(*args, **more):
        raise DeviceError("graphs cannot be captured")

    monkeypatch.setattr(device_engine, "DeviceLoop", fails)
    with pytest.raises(DeviceError, match="captured"):
        Qwen2CudaEngine(CONFIG)
    assert calls() == ["close"]


def test_the_context_and_what_is_said_of_it(engine, monkeypatch):
    said = []
    for context, held in ((None, 100), (33, 33), (100, 100)):
        with Qwen2CudaEngine(CONFIG, loop="host", context=context, say=said.append) as other:
            assert other.context == held
            assert FakeRuntime.made.model.capacity == -(-held // 16) * 16
    assert said == []
    layout = qwen2_layout(CONFIG)
    monkeypatch.setattr(qwen2_engine, "fitting", lambda given, free: 64 if given == layout else 0)
    with Qwen2CudaEngine(CONFIG, loop="host", say=said.append) as other:
        assert other.context == 64
    assert said == ["the context is cut from 100 to 64 positions, which this GPU's free memory holds"]
    for context in (0, 101):
        with pytest.raises(RequestError, match="choose one from 1 to 100"):
            Qwen2CudaEngine(CONFIG, context=context)


def test_where_weights_come_from(engine, tmp_path, monkeypatch):
    said = []
    assert isinstance(FakeRuntime.made.weights, Qwen2Random)
    hf, file = tmp_path / "hf", tmp_path / "m.nanoqwen"
    write_qwen2_checkpoint(hf, qwen2_config(NAMES[-1]), 5, 1)
    pack(hf, file, int4_head=True)
    for path, rounded in ((hf, True), (file, False)):
        with Qwen2CudaEngine(open_qwen2(path), loop="host", say=said.append):
            source = FakeRuntime.made.weights
            assert isinstance(source, Qwen2Source)
            assert source.packed.rounded == rounded
            assert source.layout.dims.int4_head == (not rounded)
    assert said == [f"{hf} is rounded to INT4 while it is loaded: pack it once with python -m cuq1.pack"]


@pytest.mark.parametrize("int4_head", [False, True])
def test_what_benchmarks_measure_has_random_weights_or_a_files(engine, tmp_path, monkeypatch, int4_head):
    monkeypatch.setattr(qwen2_engines, "open_device", lambda: None)
    subject = qwen2_engines.Subject.of("qwen2.5-coder-7b", int4_head=int4_head)
    with subject.engine("host", 33) as other:
        random = FakeRuntime.made.weights
        assert isinstance(random, Qwen2Random)
        assert (random.layout, other.context) == (qwen2_layout(subject.config, int4_head=int4_head), 33)
    hf, file = tmp_path / "hf", tmp_path / "m.nanoqwen"
    write_qwen2_checkpoint(hf, qwen2_config(NAMES[-1]), 5, 1)
    pack(hf, file, int4_head=int4_head)
    with qwen2_engines.Subject.of(str(file), int4_head=not int4_head).engine("host", 33):
        source = FakeRuntime.made.weights
        assert isinstance(source, Qwen2Source)
        assert source.layout.dims.int4_head == int4_head


def test_what_is_refused_before_a_gpu_is_looked_for(monkeypatch):
    def touched():
        raise AssertionError("the GPU was touched")

    monkeypatch.setattr(qwen2_engine, "open_device", touched)
    wide = parse_qwen2(qwen2_config("qwen2.5-coder-7b", hidden_size=6144, num_attention_heads=48))
    with pytest.raises(ConfigError, match="hidden_size is 6144"):
        Qwen2CudaEngine(wide)
    with pytest.raises(RequestError, match="choose one from 1 to 100"):
        Qwen2CudaEngine(CONFIG, context=1000)
    with pytest.raises(RequestError, match="loop must be device or host"):
        Options(loop="neither")
    with pytest.raises(AssertionError, match="touched"):  # the control
        Qwen2CudaEngine(CONFIG)

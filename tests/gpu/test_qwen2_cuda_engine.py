"""The GPU engine of Qwen2 models against the CPU engine, on the same INT4 weights."""

import gc
import json
import subprocess
import sys
import time
from contextlib import ExitStack

import numpy as np
import pytest

from cuq1.checkpoint.qwen2 import open_qwen2
from cuq1.cuda.memory import free_memory
from cuq1.cuda.qwen2_engine import Qwen2CudaEngine
from cuq1.engine import open_engine
from cuq1.errors import Cuq1Error, DeviceError, RequestError
from cuq1.pack import pack
from cuq1.plan.qwen2_dims import PAGE
from cuq1.sampling import DecodeParams
from tests.gpu.qwen2_models import TINY, Made
from tests.paths import ROOT
from tools.checkpoint_qwen2 import qwen2_config
from tools.make_checkpoint import write_qwen2_checkpoint

pytestmark = pytest.mark.gpu

TOLERANCE = 6e-3  # of logits, ||gpu - cpu|| / ||cpu||
SMALL = TINY[0]  # heads of 64, widths off the group, tied
LAYERS = TINY[3]  # whose layers fit one launch


def cuda(path, **options):
    return Qwen2CudaEngine(open_qwen2(path), **options)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return Made(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def device(gpu, made):
    with cuda(made.file(SMALL)) as engine:
        yield engine


@pytest.fixture(scope="module")
def host(gpu, made):
    with cuda(made.file(SMALL), loop="host") as engine:
        yield engine


@pytest.fixture(scope="module")
def cpu(made):
    with open_engine(made.file(SMALL), "cpu") as engine:
        yield engine


def prompt(length, seed=None):
    return np.random.default_rng(seed).integers(0, 500, length).tolist()


def generate(engine, ids=None, *, fresh=True, **params):
    """The tokens of a request, and what ended it."""
    if ids is not None:
        if fresh:
            engine.rewind(0)
        engine.prefill(ids)
    stream = engine.decode(DecodeParams(**{"temperature": 0, "max_tokens": 40, **params}))
    return [token for step in stream for token in step], stream.finish_reason


def relative(got, expected):
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def near_ties(scores, rows, tokens):
    """Where a greedy token isn't the scores' first choice: (place, gap, error of the row). AssertionError where the gap
    is more than the row's error explains."""
    found = []
    for i, (expected, row, token) in enumerate(zip(scores, rows, tokens, strict=True)):
        gap = float(expected.max() - expected[token])
        if gap > 0:
            error = float(np.abs(row - expected).max())
            found.append((i, gap, error))
            assert gap <= 2 * error, f"token {i}: {gap} below the first choice, and the row differs by {error}"
    return found


def judged(gpu, cpu, ids, output):
    """Near ties of a greedy output, by the CPU's logits after the same tokens."""
    whole = [*ids, *output[:-1]]
    scores = cpu.score(whole)[len(ids) - 1 :]
    return near_ties(scores, gpu.score(whole)[len(ids) - 1 :], output)


CASES = [
    *((name, "fp16", None) for name in TINY),
    (LAYERS, "int4", "layers"),
    (TINY[5], "fp16", "layers"),
    (LAYERS, "fp16", "launches"),
]


@pytest.mark.parametrize(("name", "head", "form"), CASES)
def test_greedy_tokens_are_the_cpus(gpu, made, name, head, form):
    file = made.file(name, head)
    with cuda(file, form=form) as engine, open_engine(file, "cpu") as cpu:
        equal, listed = 0, []
        for length in (1, 16, 70):
            ids = prompt(length)
            output, reason = generate(engine, ids, max_tokens=40)
            assert (len(output), reason) == (40, "length")
            listed += judged(engine, cpu, ids, output)
            equal += generate(cpu, ids, max_tokens=40)[0] == output
        print(f"{name} {head}: {equal} of 3 equal, near ties {listed}")
        assert equal == 3 or listed


def test_a_changed_model_is_told_apart(gpu, made, cpu):
    """The control: a norm that is 2 % off is no near tie."""
    with cuda(made.file(SMALL)) as wrong:
        size = wrong.config.hidden_size
        weights = np.empty(size, np.float16)
        wrong._runtime.read("layers.1.post_norm", weights)
        weights[: size // 2] *= np.float16(1.5)
        wrong._runtime.write("layers.1.post_norm", weights)
        ids = prompt(40, 7)
        rows = cpu.score(ids)
        assert relative(wrong.score(ids), rows) > 3 * TOLERANCE
        output = generate(wrong, ids, max_tokens=60)[0]
        scores = cpu.score([*ids, *output[:-1]])[len(ids) - 1 :]
        assert any(row.max() > row[token] for row, token in zip(scores, output, strict=True))


@pytest.mark.parametrize("head", ["fp16", "int4"])
def test_scores(gpu, made, head):
    file = made.file(SMALL, head)
    with cuda(file) as engine, open_engine(file, "cpu") as cpu:
        for length in (1, 16, 17, 300, 2100):
            ids = prompt(length)
            engine.prefill(ids[: max(1, length // 2)])
            before = engine.tokens
            got, expected = engine.score(ids), cpu.score(ids)
            assert relative(got, expected) < TOLERANCE
            assert engine.tokens == before
            ids[0] = (ids[0] + 1) % 500
            assert relative(got, cpu.score(ids)) > TOLERANCE


@pytest.fixture(scope="module", params=[(SMALL, "chain"), (LAYERS, "layers")])
def lengths(gpu, made, request):
    """Either loop's engine, and the reference."""
    name, form = request.param
    file = made.file(name)
    with (
        cuda(file, form=form) as device,
        cuda(file, loop="host", form=form) as host,
        open_engine(file, "cpu") as cpu,
    ):
        yield device, host, cpu


def test_every_length_up_to_65(lengths):
    """Prompts and decoded tokens on both sides of pages' borders."""
    device, _, cpu = lengths
    ids = prompt(66)
    expected = cpu.score(ids)
    for length in range(1, 66):
        assert relative(device.verified_logits(ids[: length + 1])[-1], expected[length]) < TOLERANCE
        device.rewind(0)
        device.prefill(ids[:length])
        one = next(iter(device.decode(DecodeParams(temperature=0, max_tokens=1)))).tokens[0]
        gap = expected[length - 1].max() - expected[length - 1][one]
        assert gap <= 0.05, (length, gap)


def test_a_long_context_by_both_kernels(lengths):
    """Positions 4,094 to 4,113, far beyond the short form's."""
    device, host, cpu = lengths
    ids = prompt(4114)
    expected = cpu.score(ids)[4094:]
    for engine in (device, host):
        engine.rewind(0)
        engine.prefill(ids[:4094])
        assert relative(engine.verified_rows(ids[4094:], 4094), expected) < TOLERANCE
    assert relative(device.score(ids)[4094:], expected) < TOLERANCE


SAMPLED = (
    {"temperature": 0},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "seed": 1},
    {"temperature": 0.7, "top_k": 32, "top_p": 1.0, "seed": 2},
    {"temperature": 2.5, "top_k": 1, "seed": 3},
)


@pytest.mark.parametrize("params", SAMPLED)
def test_both_loops_give_the_same_tokens(lengths, params):
    device, host, _ = lengths
    limit = device._runtime.model.short_context or 1000
    for length in (1, 31, limit - 20):
        ids = prompt(length)
        assert generate(device, ids, max_tokens=60, **params) == generate(host, ids, max_tokens=60, **params)


def test_another_seed_gives_other_tokens(device, host):
    """The control of it."""
    ids = prompt(30)
    wanted = {"temperature": 1.5, "top_k": 32, "max_tokens": 40}
    assert generate(device, ids, seed=1, **wanted) != generate(host, ids, seed=2, **wanted)


def test_sampling_on_the_host_and_on_the_device_agree(device):
    """top_k 33 is sampled on the host, 32 on the device: with a top_p that neither reaches, the tokens are equal."""
    for seed in range(4):
        ids, params = prompt(20), {"temperature": 0.1, "top_p": 0.5, "seed": seed}
        assert generate(device, ids, top_k=32, **params) == generate(device, ids, top_k=33, **params)
    assert len(generate(device, prompt(9), temperature=1.0, top_k=0, top_p=1.0, seed=3)[0]) == 40


def test_stop_tokens_end_a_request(device, host, cpu):
    ids = prompt(25, 3)
    output = generate(device, ids, max_tokens=30)[0]
    stop = output[11]
    first = output.index(stop)
    for engine in (device, host):
        assert generate(engine, ids, max_tokens=30, stop_tokens=(3, stop)) == (output[: first + 1], "stop")
        many = (*range(512, 600), stop)
        assert generate(engine, ids, max_tokens=30, stop_tokens=many) == (output[: first + 1], "stop")


@pytest.mark.parametrize("loop", ["device", "host"])
@pytest.mark.parametrize("context", [1, 15, 16, 17, 33])
def test_the_contexts_end(gpu, made, loop, context):
    with cuda(made.file(SMALL), loop=loop, context=context) as engine:
        assert engine.context == context
        with pytest.raises(RequestError, match=f"context of {context}"):
            engine.prefill(prompt(context))
        if context == 1:
            return
        for length in {1, context - 1}:
            assert generate(engine, prompt(length), max_tokens=None)[1] == "length"
            assert len(engine.tokens) == context
        with pytest.raises(RequestError, match="fills the context"):
            engine.decode()
        assert len(engine.score(prompt(context))) == context


def test_rewinding_anywhere(device, cpu):
    ids = prompt(50)
    output = generate(device, ids, max_tokens=40, stop_tokens=())[0]
    whole = [*ids, *output]
    for length in (88, 64, 63, 49, 33, 32, 16, 1):
        device.rewind(length)
        assert device.tokens == tuple(whole[:length])
        again = generate(device, max_tokens=3)[0]
        assert not [gap for _, gap, error in judged(device, cpu, whole[:length], again) if gap > 2 * error]
        assert device.prefill(whole[:90]) >= length - 1
        assert relative(device.verified_logits(whole[:90]), cpu.score(whole[:90])[-8:]) < TOLERANCE
    device.rewind(0)
    assert device.tokens == ()
    assert generate(device, ids, max_tokens=40)[0] == output


def test_a_conversation_goes_on_from_what_is_held(device, cpu):
    ids = prompt(20)
    output = generate(device, ids)[0]
    longer = [*ids, *output, *prompt(30)]
    assert device.prefill(longer) == len(ids) + len(output) - 1
    assert relative(device.verified_logits(longer), cpu.score(longer)[-8:]) < TOLERANCE


def test_an_abandoned_stream_is_cancelled(device, host):
    ids = prompt(12)
    for engine in (device, host):
        engine.rewind(0)
        engine.prefill(ids)
        for count, _ in enumerate(engine.decode(DecodeParams(temperature=0, max_tokens=400))):
            if count == 5:
                break
        gc.collect()
    assert device.tokens == host.tokens
    assert not device._loop.running
    assert generate(device, max_tokens=20) == generate(host, max_tokens=20)


def test_a_slow_reader_loses_nothing(device, host):
    ids, params = prompt(12), {"temperature": 1.0, "top_k": 20, "seed": 5, "max_tokens": 700, "stop_tokens": ()}
    expected = generate(host, ids, **params)[0]
    device.rewind(0)
    device.prefill(ids)
    before, found = device._loop.resumed, []
    for step in device.decode(DecodeParams(**params)):
        found += step.tokens
        if len(found) % 40 == 0:
            time.sleep(0.02)
    assert found == expected
    assert device._loop.resumed > before


def test_the_same_request_gives_the_same_tokens(device):
    ids = prompt(33)
    for params in SAMPLED:
        first = generate(device, ids, **params)
        generate(device, prompt(90))
        assert generate(device, ids, **params) == first


def test_pages_may_lie_anywhere(device, cpu):
    """Pages in another order change nothing; two positions' pages that are one do."""
    ids = prompt(100)
    expected, output = cpu.score(ids)[-8:], generate(device, ids)[0]
    runtime = device._runtime
    for broken in (False, True):
        device.rewind(0)
        pages = np.random.default_rng().permutation(runtime.model.pages).astype(np.int32)
        runtime.write("free_pages", pages if not broken else np.full_like(pages, 5))
        device.prefill(ids)
        again = generate(device)[0]
        table = np.empty(runtime.model.pages, np.int32)
        runtime.read("page_table", table)
        used = -(-(len(ids) + len(again) - 1) // PAGE)
        assert (table[used:] == -1).all()
        if broken:
            assert (table[:used] == 5).all()
            assert relative(device.verified_logits(ids), expected) > TOLERANCE
        else:
            assert table[:used].tolist() == pages[::-1][:used].tolist()
            assert again == output
    device.rewind(0)
    assert generate(device, ids)[0] == output


def test_a_folder_gives_the_tokens_of_its_packed_file(gpu, made, device):
    said = []
    ids = prompt(30)
    with cuda(made.folder(SMALL), say=said.append) as folder:
        assert generate(folder, ids) == generate(device, ids)
    assert len(said) == 1
    assert "is rounded to INT4 while it is loaded" in said[0]
    with cuda(made.file(SMALL), say=said.append):
        assert len(said) == 1


def test_values_that_are_not_finite_end_the_request_by_name(gpu, made):
    ids = prompt(9)
    with cuda(made.file(SMALL)) as engine:
        before = generate(engine, ids)
        size = engine.config.hidden_size
        good = np.empty(size, np.float16)
        engine._runtime.read("layers.1.post_norm", good)
        engine.prefill(ids)
        engine._runtime.write("layers.1.post_norm", np.full(size, np.nan, np.float16))
        with pytest.raises(Cuq1Error, match="a value that is not finite appeared in"):
            generate(engine)
        engine._runtime.write("layers.1.post_norm", good)
        assert generate(engine, ids) == before


def test_a_round_that_does_not_end_is_given_up(gpu, made):
    """In a process of its own, which it ends."""
    code = (
        "import sys\n"
        "from cuq1.checkpoint.qwen2 import open_qwen2\n"
        "from cuq1.cuda.qwen2_engine import Qwen2CudaEngine\n"
        "from cuq1.errors import DeviceError\n"
        "engine = Qwen2CudaEngine(open_qwen2(sys.argv[1]), timeout=1.0, defines={'control': (('STALL_AT', 3),)})\n"
        "engine.prefill([1, 2, 3])\n"
        "try:\n"
        "    list(engine.decode())\n"
        "except DeviceError as error:\n"
        "    print(error)\n"
    )
    command = [sys.executable, "-c", code, made.file(SMALL)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert "a decode round did not end within 1 s" in done.stdout, done.stderr


def test_memory_comes_back(gpu, made):
    """Of the GPU's free memory, which others may take and give back meanwhile, but not in each of several tries."""
    model, little = open_qwen2(made.file(SMALL)), 8 << 20
    Qwen2CudaEngine(model).close()  # what the driver keeps for kernels and graphs stays

    def left(end):
        before = free_memory()
        for _ in range(3):
            engine = Qwen2CudaEngine(model)
            try:
                generate(engine, prompt(5), max_tokens=3)
            finally:
                end(engine)
        return abs(before - free_memory())

    with ExitStack() as engines:  # the control: none is closed before its end
        assert left(engines.enter_context) > little
    assert any(left(Qwen2CudaEngine.close) < little for _ in range(5))


def test_too_little_memory_is_said(gpu, tmp_path, monkeypatch):
    write_qwen2_checkpoint(tmp_path / "hf", qwen2_config(SMALL, max_position_embeddings=10**9), 5, 1)
    pack(tmp_path / "hf", tmp_path / "m.nanoqwen")
    model, said = open_qwen2(tmp_path / "m.nanoqwen"), []
    monkeypatch.setattr("cuq1.cuda.qwen2_engine.free_memory", lambda: 1100 << 20)
    with Qwen2CudaEngine(model, say=said.append) as engine:
        assert 2048 < engine.context < 2 << 20
        held = f"the context is cut from {10**9} to {engine.context} positions, which this GPU's free memory holds"
        assert said == [held]
        assert len(generate(engine, prompt(40))[0]) == 40
    with pytest.raises(DeviceError, match=r"the model needs .* choose a shorter context"):
        Qwen2CudaEngine(model, context=10**9)


def run(*arguments):
    command = [sys.executable, "-m", "cuq1.generate", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("loop", ["device", "host"])
def test_the_command_line(gpu, made, loop):
    common = ("--chat", "return the list", "--json", "--temperature", 0, "--max-tokens", 24)
    found = []
    for device in (("cuda", "--loop", loop), ("auto",), ("cpu",)):
        done = run("--model", made.file(SMALL), "--device", *device, *common)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        found.append(json.loads(done.stdout)["token_ids"])
    assert found[0] == found[1]
    assert found[0][:8] == found[2][:8]
    done = run("--model", made.folder(SMALL), "--device", "cuda", *common)
    assert json.loads(done.stdout)["token_ids"] == found[0]
    assert done.stderr.count("\n") == 1
    assert "is rounded to INT4 while it is loaded" in done.stderr

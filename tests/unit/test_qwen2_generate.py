"""python -m cuq1.generate with Qwen2 models: a folder, or one file that holds everything."""

import json
import shutil
import struct

import numpy as np
import pytest

from cuq1 import engine
from cuq1.cuda import driver, qwen2_engine
from cuq1.errors import DeviceError
from cuq1.pack import pack
from tests.checkpoint_files import edit
from tests.unit.test_generate_refused import refused
from tests.unit.test_nanoqwen_refused import signed
from tools.checkpoint_qwen2 import qwen2_config
from tools.make_checkpoint import write_qwen2_checkpoint

UP = "model.layers.1.mlp.up_proj.weight"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder and its packed file, which has no folder beside it."""
    base = tmp_path_factory.mktemp("models")
    config = qwen2_config("qwen2.5-coder-1.5b-tiny", max_position_embeddings=400)
    folder = write_qwen2_checkpoint(base / "hf", config, seed=8)
    (base / "packed").mkdir()
    pack(folder, base / "packed" / "m.nanoqwen")
    return folder, base / "packed" / "m.nanoqwen"


@pytest.fixture
def folder(models, tmp_path):
    """A copy of the folder that can be damaged."""
    return shutil.copytree(models[0], tmp_path / "hf")


@pytest.fixture
def as_json(generate):
    def call(*args):
        status, out, err = generate(*args, "--json")
        assert (status, err) == (0, "")
        return json.loads(out)

    return call


@pytest.mark.parametrize("kind", [0, 1], ids=["folder", "packed"])
def test_prompts_and_chats(as_json, generate, models, files, kind):
    model = ("--model", models[kind])
    greedy = (*model, "--prompt", "def f(x):", "--temperature", 0, "--max-tokens", 12, "--device", "cpu")
    result = as_json(*greedy)
    assert len(result["token_ids"]) == 12
    assert all(step == {"drafted": 0, "accepted": 0} for step in result["rounds"])
    assert as_json(*greedy, "--draft", "off")["token_ids"] == result["token_ids"]
    assert generate(*greedy)[1] == result["text"]
    chat = as_json(*model, "--chat", "return the list", "--seed", 3, "--max-tokens", 9)
    assert chat["content"] == chat["text"]
    assert chat["prompt_tokens"] > as_json(*model, "--prompt", "return the list", "--max-tokens", 1)["prompt_tokens"]
    messages = files("m.json", [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}])
    plain = as_json(*model, "--messages", messages, "--max-tokens", 3)
    tools = as_json(*model, "--messages", messages, "--tools", files("t.json", TOOLS), "--max-tokens", 3)
    assert tools["prompt_tokens"] > plain["prompt_tokens"] + 20


def test_a_stop_token_ends_the_text(as_json, models):
    """Both files' stop tokens count, 506 of config.json and 504 of generation_config.json."""
    ends = set()
    for seed in range(60):
        sampled = ("--temperature", 3, "--top-k", 0, "--top-p", 1, "--seed", seed, "--max-tokens", 150)
        result = as_json("--model", models[1], "--prompt", "a", *sampled)
        if result["finish_reason"] == "stop":
            ends.add(result["token_ids"][-1])
        assert not {504, 506} & set(result["token_ids"][:-1])
        if ends == {504, 506}:
            break
    assert ends == {504, 506}


@pytest.mark.parametrize("kind", [0, 1], ids=["folder", "packed"])
def test_auto_takes_a_gpu_and_cuda_wants_one(as_json, generate, models, monkeypatch, kind):
    def none():
        raise DeviceError("no GPU here: use --device cpu")

    for module in (driver, qwen2_engine):
        monkeypatch.setattr(module, "open_device", none)
    assert as_json("--model", models[kind], "--prompt", "a", "--max-tokens", 1)["token_ids"]
    refused(generate("--model", models[kind], "--prompt", "a", "--device", "cuda"), "no GPU here")
    monkeypatch.setattr(engine, "usable_gpu", lambda: True)
    refused(generate("--model", models[kind], "--prompt", "a"), "no GPU here")


@pytest.mark.parametrize("options", [("--tp", 2), ("--tp", 2, "--device", "cuda"), ("--activations", "fp8")])
@pytest.mark.parametrize("kind", [0, 1], ids=["folder", "packed"])
def test_what_is_iquests_alone_is_refused(generate, models, options, kind):
    refused(generate("--model", models[kind], "--prompt", "a", *options), "Qwen2 models are computed by one rank")


def test_a_shorter_context(as_json, generate, models):
    model = ("--model", models[1])
    result = as_json(*model, "--prompt", "a", "--context", 9, "--temperature", 0)
    assert result["prompt_tokens"] + len(result["token_ids"]) == 9
    assert len(as_json(*model, "--prompt", "a", "--context", 20, "--temperature", 0)["token_ids"]) > 9
    refused(generate(*model, "--prompt", "a b c d e f g h i j k", "--context", 9), "context of 9")
    for context in (0, 401):
        refused(generate(*model, "--prompt", "a", "--context", context), "--context must be from 1 to the model's 400")


@pytest.mark.parametrize("kind", [0, 1], ids=["folder", "packed"])
def test_a_prompt_past_the_context(generate, models, files, kind):
    prompt = files("p.txt", b"\n#" * 250)
    refused(generate("--model", models[kind], "--prompt-file", prompt), "500 tokens", "context of 400", "shorten")


def spoil(value):
    """One value of the tensor."""

    def damage(tensors):
        data = bytearray(tensors[UP][2])
        data[10:12] = value
        tensors[UP][2] = bytes(data)

    return damage


def reshape(tensors):
    rows, cols = tensors[UP][1]
    tensors[UP][1] = [cols, rows]


@pytest.mark.parametrize(
    ("damage", "parts"),
    [
        (spoil(b"\xc0\x7f"), [UP, "not finite"]),  # BF16's NaN
        (spoil(b"\x80\xff"), [UP, "not finite"]),  # and an infinity
        (lambda tensors: tensors.pop(UP), [UP]),
        (lambda tensors: tensors.update({"model.extra": tensors[UP]}), ["model.extra"]),
        (reshape, [UP, "560", "768"]),
    ],
    ids=["nan", "infinite", "missing", "extra", "shape"],
)
def test_a_folder_with_wrong_tensors(generate, folder, damage, parts):
    edit(folder, damage)
    refused(generate("--model", folder, "--prompt", "a", "--device", "cpu"), folder, *parts)


def test_other_folders(generate, folder):
    config = json.loads((folder / "config.json").read_text())
    for change, parts in (
        ({"model_type": "qwen3"}, ["model_type", "qwen3", "iquest_q1 or qwen2"]),
        ({"use_sliding_window": True}, ["use_sliding_window"]),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, ["rope_scaling", "yarn"]),
    ):
        (folder / "config.json").write_text(json.dumps({**config, **change}))
        refused(generate("--model", folder, "--prompt", "a"), "config.json", *parts)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").unlink()
    refused(generate("--model", folder, "--prompt", "a"), "model.safetensors")


def test_a_file_of_the_folder_is_not_the_model(generate, folder, tmp_path):
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        refused(generate("--model", folder / name, "--prompt", "a"), folder / name, f"point to its folder, {folder}")
    (tmp_path / "alone.json").write_text("{}")
    refused(generate("--model", tmp_path / "alone.json", "--prompt", "a"), "alone.json is not a .nanoqwen file")


def test_what_is_not_applied_is_said(generate, folder, tmp_path):
    """Once, and only where it would change anything; the answer and the status stay."""
    path = folder / "generation_config.json"
    defaults = json.loads(path.read_text())
    for asked, said in (
        ({"repetition_penalty": 1.05, "min_p": 0.1, "bad_words_ids": [[3]]}, "repetition_penalty 1.05, min_p 0.1, bad"),
        ({"repetition_penalty": 1.0, "min_p": None, "suppress_tokens": []}, ""),
    ):
        path.write_text(json.dumps({**defaults, **asked}))
        packed = tmp_path / "packed.nanoqwen"
        pack(folder, packed)
        for model in (folder, packed):
            status, out, err = generate("--model", model, "--prompt", "a", "--max-tokens", 2, "--seed", 1)
            assert (status, bool(out), err.count("\n")) == (0, True, bool(said))
            assert said in err


def test_a_file_that_is_damaged(generate, models, tmp_path):
    path, raw = tmp_path / "m.nanoqwen", models[1].read_bytes()
    tensors = struct.unpack_from("<Q", raw, 80)[0]
    nan = bytearray(raw)
    nan[tensors : tensors + 2] = np.float16("nan").tobytes()
    for content, part in (
        (raw[:100], "256"),
        (raw[:-1], "bytes"),
        (b"GGUF" + raw[4:], "NANOQWEN"),
        (bytes(nan), "checksum"),
        (signed(nan), "embed_tokens holds values that are not finite"),
    ):
        path.write_bytes(content)
        refused(generate("--model", path, "--prompt", "a"), "m.nanoqwen", part)
    refused(generate("--model", tmp_path / "none.nanoqwen", "--prompt", "a"), "none.nanoqwen does not exist")

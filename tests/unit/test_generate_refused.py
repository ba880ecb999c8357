"""What python -m cuq1.generate refuses: one sentence on stderr, status 2, nothing on stdout."""

import json

import pytest

from cuq1.cuda.driver import open_device
from cuq1.errors import DeviceError
from tests.commands import run
from tests.paths import NANO
from tools.nano_prompts import TOOLS


def replace(path, data):
    path.unlink(missing_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())


def refused(result, *parts):
    """One sentence on stderr, status 2, nothing on stdout."""
    status, out, err = result
    assert status == 2
    assert out == ""
    assert err.startswith("cuq1.generate: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    for part in parts:
        assert str(part) in err, err


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        ((), ["--prompt"]),
        (("--prompt", "a", "--chat", "b"), ["not allowed"]),
        (("--prompt", "a", "--nonsense"), ["--nonsense"]),
        (("--prompt", ""), ["prompt is empty"]),
        (("--prompt", "a", "--max-tokens", 0), ["max_tokens", "at least 1", "0"]),
        (("--prompt", "a", "--max-tokens", "many"), ["--max-tokens", "many"]),
        (("--prompt", "a", "--temperature", -0.5), ["temperature", "-0.5"]),
        (("--prompt", "a", "--temperature", "nan"), ["temperature", "nan"]),
        (("--prompt", "a", "--top-p", 0), ["top_p", "0"]),
        (("--prompt", "a", "--top-p", 1.5), ["top_p", "1.5"]),
        (("--prompt", "a", "--top-k", -3), ["top_k", "-3"]),
        (("--prompt", "a", "--seed", -1), ["seed", "-1"]),
        (("--prompt", "a", "--draft", 8), ["draft", "8"]),
        (("--prompt", "a", "--draft", "some"), ["draft", "some"]),
        (("--prompt", "a", "--stop", ""), ["top string"]),
        (("--prompt", "a", "--device", "cpu", "--activations", "fp8"), ["--device cuda"]),
        (("--prompt", "a", "--activations", "fp4"), ["--activations", "fp4"]),
        (("--prompt", "a", "--tp", 0), ["--tp", "at least 1", "0"]),
        (("--prompt", "a", "--tp", "two"), ["--tp", "two"]),
        (("--prompt", "a", "--tp", 5), ["tp 5 does not divide", "1, 2, 4"]),
        (("--prompt", "a", "--tp", 5, "--device", "cpu"), ["tp 5 does not divide", "1, 2, 4"]),
        (("--prompt", "a", "--tools", "tools.json"), ["--tools", "--chat"]),
        (("--prompt", "a", "--no-thinking"), ["--no-thinking", "--chat"]),
        (("--messages", "-", "--tools", "-"), ["--messages", "--tools", "stdin"]),
        (("--prompt", "a", "--model", ""), ["config.json"]),
        (("--prompt-file", "/"), ["cannot be read"]),
        (("--prompt", "a", "--model", "/nowhere"), ["/nowhere/config.json"]),
        (("--prompt-file", "/nowhere.txt"), ["/nowhere.txt"]),
        (("--messages", "/nowhere.json"), ["/nowhere.json"]),
        (("--chat", "\udcff"), []),
        (("--prompt", "\udcff"), []),
    ],
    ids=str,
)
def test_bad_arguments(generate, monkeypatch, args, parts):
    """Each before any weight is read."""
    if "--device" not in args:
        monkeypatch.setattr("cuq1.generate.open_engine", None)
    refused(generate(*args), *parts)


@pytest.mark.parametrize(
    ("messages", "parts"),
    [
        (b"[{]", ["not valid JSON"]),
        (b"\xff\xfe", ["not UTF-8"]),
        ({}, ["messages"]),
        ([], ["messages"]),
        (["hello"], ["messages[0]"]),
        ([{"content": "a"}], ["messages[0]", "role"]),
        ([{"role": "robot", "content": "a"}], ["messages[0]", "robot"]),
        ([{"role": "user", "content": 3}], ["messages[0]", "content"]),
        ([{"role": "user", "content": [{"type": "image_url"}]}], ["messages[0]", "image_url"]),
        ([{"role": "assistant", "content": None, "tool_calls": [{}]}], ["messages[0]", "tool_calls"]),
    ],
    ids=str,
)
def test_bad_messages(generate, files, messages, parts):
    refused(generate("--messages", files("m.json", messages)), *parts)


@pytest.mark.parametrize(
    ("tools", "parts"),
    [
        (b"nonsense", ["not valid JSON"]),
        ({"name": "f"}, ["tools"]),
        ([{"type": "function"}], ["tools[0]"]),
        ([{"type": "function", "function": {"name": "f", "parameters": 3}}], ["tools[0]", "parameters"]),
        ([*TOOLS, TOOLS[0]], ["tools[4]", "name"]),
        (b'[{"name": "f", "parameters": {"maximum": 1e400}}]', ["1e400"]),
        (b'[{"name": "f", "parameters": {"default": NaN}}]', ["NaN"]),
    ],
    ids=str,
)
def test_bad_tools(generate, files, tools, parts):
    refused(generate("--chat", "a", "--tools", files("t.json", tools)), *parts)


def test_a_machine_without_a_gpu(generate):
    try:
        open_device()
    except DeviceError:
        refused(generate("--prompt", "a", "--device", "cuda"), "device cuda needs", "--device cpu")
    else:
        pytest.skip("this machine has a GPU")


def test_stdin_that_is_not_utf8():
    out, err = run("--prompt-file", "-", stdin=b"abc\xff", status=2)
    refused((2, out, err), "stdin", "byte 3")


def test_a_prompt_at_the_context(generate, files):
    """`!` is one token each: the context is 65,536."""
    refused(generate("--prompt-file", files("p.txt", b"\n#" * 70_000)), "65536", "tokens")


def test_a_template_that_cannot_be_used(generate, model):
    replace(model / "chat_template.jinja", "{% for x in %}")
    refused(generate("--model", model, "--chat", "a"), "chat_template.jinja")
    replace(model / "chat_template.jinja", "{{ messages[0].nothing.at.all }}")
    refused(generate("--model", model, "--chat", "a"), "chat_template.jinja")
    (model / "chat_template.jinja").unlink()
    refused(generate("--model", model, "--chat", "a"), "chat_template")
    assert generate("--model", model, "--prompt", "a", "--max-tokens", 1)[0] == 0


def test_a_tokenizer_that_does_not_fit(generate, model):
    tokenizer = json.loads((NANO / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["beyond"] = 4096
    replace(model / "tokenizer.json", json.dumps(tokenizer))
    refused(generate("--model", model, "--prompt", "a"), "4096", "tokenizer.json")
    replace(model / "tokenizer.json", "{}")
    refused(generate("--model", model, "--prompt", "a"), "tokenizer.json")


def header_of(path):
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def with_header(path, header, body):
    text = json.dumps(header).encode()
    replace(path, len(text).to_bytes(8, "little") + text + body)


def _missing(name):
    """Drop a tensor and close the gap that it leaves."""

    def damage(model):
        header, body = header_of(model / "model.safetensors")
        begin, end = header.pop(name)["data_offsets"]
        for key, entry in header.items():
            if key != "__metadata__" and entry["data_offsets"][0] >= end:
                entry["data_offsets"] = [offset - (end - begin) for offset in entry["data_offsets"]]
        with_header(model / "model.safetensors", header, body[:begin] + body[end:])

    return damage


def _changed(name, **fields):
    def damage(model):
        header, body = header_of(model / "model.safetensors")
        header[name].update(fields)
        with_header(model / "model.safetensors", header, body)

    return damage


def _renamed(name, new):
    def damage(model):
        header, body = header_of(model / "model.safetensors")
        header[new] = header.pop(name)
        with_header(model / "model.safetensors", header, body)

    return damage


def _truncated(model):
    data = (model / "model.safetensors").read_bytes()
    replace(model / "model.safetensors", data[: len(data) // 2])


def _config(**fields):
    def damage(model):
        config = json.loads((model / "config.json").read_text())
        replace(model / "config.json", json.dumps({**config, **fields}))

    return damage


EXPERT = "model.layers.2.mlp.experts.7.down_proj.weight"


@pytest.mark.parametrize(
    ("damage", "parts"),
    [
        (lambda model: (model / "model.safetensors").unlink(), ["model.safetensors"]),
        (_truncated, ["model.safetensors"]),
        (lambda model: replace(model / "model.safetensors", b"\x00" * 4), ["model.safetensors"]),
        (lambda model: replace(model / "model.safetensors", b"\xff" * 4096), ["model.safetensors"]),
        (lambda model: replace(model / "model.safetensors.index.json", '{"weight_map": {}}'), ["model.safetensors"]),
        (_missing(EXPERT), [EXPERT]),
        (_missing(EXPERT + "_scale_inv"), [EXPERT + "_scale_inv"]),
        (_missing("model.layers.3.self_attn.sink_k"), ["model.layers.3.self_attn.sink_k"]),
        (_changed("model.norm.weight", shape=[2, 128]), ["model.norm.weight", "256"]),
        (_changed("model.norm.weight", dtype="F16"), ["model.norm.weight", "F16"]),
        (_renamed("model.norm.weight", "model.extra.weight"), ["model.norm.weight"]),
        (lambda model: (model / "mtp" / "model.safetensors").unlink(), ["mtp"]),
        (lambda model: replace(model / "config.json", "{"), ["config.json"]),
        (_config(hidden_act="gelu"), ["hidden_act", "gelu"]),
        (_config(rope_scaling={"rope_type": "yarn", "factor": 4}), ["rope_scaling", "yarn"]),
        (_config(use_over_encoding=True), ["use_over_encoding"]),
        (_config(attention_bias=True), ["attention_bias"]),
        (_config(shared_kv_num_layers=2), ["shared_kv_num_layers"]),
        (_config(num_hidden_layers=7), ["num_hidden_layers"]),
        (_config(vocab_size=4095), []),
        (lambda model: replace(model / "generation_config.json", '{"top_p": 2}'), ["top_p"]),
    ],
)
def test_a_checkpoint_that_cannot_be_used(generate, model, damage, parts):
    damage(model)
    refused(generate("--model", model, "--prompt", "a"), *parts)

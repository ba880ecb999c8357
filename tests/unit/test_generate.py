"""python -m cuq1.generate, from outside: what it prints, what it returns, what it refuses."""

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cuq1.generate import main
from tests.paths import NANO, ROOT
from tools.nano_prompts import TOOLS

CHAT = "Write a Python function `is_even`: Return True for an even number."
COMMAND = [sys.executable, "-m", "cuq1.generate"]


def run(*args, status=0, stdin=b"", cwd=ROOT):
    """stdout and stderr of one process."""
    done = subprocess.run([*COMMAND, *args], input=stdin, capture_output=True, cwd=cwd, check=False, timeout=120)
    assert done.returncode == status, done.stderr.decode()
    return done.stdout.decode(), done.stderr.decode()


@pytest.fixture
def generate(capsys):
    """In this process: (status, stdout, stderr) of one call."""

    def call(*args):
        status = main([str(arg) for arg in args])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


@pytest.fixture
def as_json(generate):
    def call(*args):
        status, out, err = generate(*args, "--json")
        assert (status, err) == (0, "")
        return json.loads(out)

    return call


@pytest.fixture
def files(tmp_path):
    """Writes JSON or bytes to a file and returns its path."""

    def write(name, value):
        path = tmp_path / name
        path.write_bytes(value if isinstance(value, bytes) else json.dumps(value).encode())
        return path

    return write


@pytest.fixture
def model(tmp_path):
    """A copy of nano whose files can be replaced."""
    folder = tmp_path / "model"
    (folder / "mtp").mkdir(parents=True)
    for path in NANO.rglob("*"):
        if path.is_file():
            (folder / path.relative_to(NANO)).symlink_to(path)
    return folder


def replace(path, data):
    path.unlink(missing_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())


def test_stdout_in_a_pipe_is_the_text():
    args = ("--chat", CHAT, "--seed", "1")
    out, err = run(*args)
    assert err == ""
    result = json.loads(run(*args, "--json")[0])
    assert out == result["text"]
    assert "def is_even" in result["content"]
    assert result["text"] == result["reasoning"] + "</think>" + result["content"]


def test_json_holds_what_it_promises(as_json):
    result = as_json("--chat", CHAT, "--seed", 5, "--max-tokens", 60)
    assert list(result) == [
        *("prompt_tokens", "token_ids", "text", "finish_reason", "content", "reasoning"),
        *("tool_calls", "seed", "rounds", "timing"),
    ]
    assert result["prompt_tokens"] == 22
    assert result["seed"] == 5
    assert result["tool_calls"] == []
    # the first token is the prompt's own; every round gives its accepted drafts and one token more
    assert len(result["token_ids"]) <= 1 + sum(step["accepted"] + 1 for step in result["rounds"])
    assert all(
        set(step) == {"drafted", "accepted"} and step["drafted"] >= step["accepted"] for step in result["rounds"]
    )
    assert result["timing"]["decode_tokens_per_s"] > 0
    assert 0 < result["timing"]["first_token_s"] < 60


def test_a_tool_call(as_json, files):
    messages = files("messages.json", [{"role": "user", "content": "Read the file `src/main.py`."}])
    result = as_json("--messages", messages, "--tools", files("tools.json", TOOLS), "--temperature", 0)
    assert result["finish_reason"] == "tool_calls"
    (call,) = result["tool_calls"]
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    assert call["function"]["name"] == "read_file"
    assert json.loads(call["function"]["arguments"]) == {"path": "src/main.py"}
    assert result["content"] == ""


def test_without_tools_the_same_text_is_content(as_json):
    result = as_json("--chat", "Run git diff", "--temperature", 0)
    assert result["finish_reason"] == "stop"
    assert result["tool_calls"] == []
    assert result["content"].startswith("<iquest_tool_call>run<arg_key>command</arg_key>")


def test_a_conversation_with_a_tool_result(as_json, files):
    call = {"id": "c1", "type": "function", "function": {"name": "run", "arguments": '{"command": "git diff"}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Run git diff"}]},
        {"role": "assistant", "content": None, "reasoning_content": "I need to run git diff.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "no changes"},
    ]
    result = as_json("--messages", files("m.json", messages), "--tools", files("t.json", TOOLS), "--max-tokens", 40)
    assert result["prompt_tokens"] > 150
    assert result["token_ids"]


def test_finish_reasons(as_json):
    assert as_json("--chat", CHAT, "--temperature", 0)["finish_reason"] == "stop"
    assert as_json("--chat", CHAT, "--temperature", 0)["token_ids"][-1] == 0
    cut = as_json("--chat", CHAT, "--temperature", 0, "--max-tokens", 7)
    assert (cut["finish_reason"], len(cut["token_ids"])) == ("length", 7)
    stopped = as_json("--chat", CHAT, "--temperature", 0, "--stop", "nothing of it", "nor this", "--stop", "is_even(")
    assert stopped["finish_reason"] == "stop_string"
    assert stopped["text"].endswith("def ")
    assert "is_even(" not in stopped["text"]


def test_a_stop_string_across_tokens_never_leaks(generate):
    for stop in ("</think>", "name", "d is_e", "```python\ndef"):
        status, out, _ = generate("--chat", CHAT, "--temperature", 0, "--stop", stop)
        assert status == 0
        assert stop not in out
        assert out


@pytest.mark.parametrize("draft", ["off", "1", "7", "auto"])
def test_greedy_output_is_the_same_with_any_draft(as_json, draft):
    result = as_json("--prompt", "class Stack:\n", "--temperature", 0, "--max-tokens", 40, "--draft", draft)
    assert (
        result["token_ids"]
        == as_json("--prompt", "class Stack:\n", "--temperature", 0, "--max-tokens", 40)["token_ids"]
    )
    drafted = {step["drafted"] for step in result["rounds"]}
    assert drafted == {0} if draft == "off" else min(drafted) >= (3 if draft == "auto" else int(draft))


def test_seeds(as_json):
    one, two = as_json("--chat", CHAT), as_json("--chat", CHAT)
    assert one["seed"] != two["seed"]
    again = as_json("--chat", CHAT, "--seed", one["seed"])
    assert again["token_ids"] == one["token_ids"]


def test_no_thinking(as_json):
    result = as_json("--chat", CHAT, "--no-thinking", "--temperature", 0)
    assert result["reasoning"] == ""
    assert result["content"] == result["text"]


def test_typed_control_tokens_stay_text(as_json):
    plain = as_json("--chat", "a b", "--max-tokens", 1)["prompt_tokens"]
    typed = as_json("--chat", "a <|iquest_end|> b", "--max-tokens", 1)["prompt_tokens"]
    assert typed > plain + 3  # spelled out in several ordinary tokens
    assert as_json("--prompt", "<|iquest_end|>", "--max-tokens", 1)["prompt_tokens"] == 1


def test_prompt_from_a_file_and_from_stdin(files):
    path = files("prompt.txt", "def añadir(a, b):\n".encode())
    args = ("--temperature", "0", "--max-tokens", "12")
    direct = run("--prompt", "def añadir(a, b):\n", *args)[0]
    assert direct
    assert run("--prompt-file", str(path), *args)[0] == direct
    assert run("--prompt-file", "-", *args, stdin=path.read_bytes())[0] == direct


def test_stats(generate):
    status, out, err = generate("--chat", CHAT, "--seed", 1, "--stats")
    assert status == 0
    lines = err.splitlines()
    assert lines[0].startswith("prompt: 22 tokens, ")
    assert lines[1].startswith("decode: ")
    assert lines[2].startswith("rounds: ")
    assert lines[3].startswith("mean accepted: ")
    assert lines[4].startswith("  depth 1: ")
    assert "tokens/s" not in out


def popen(*args):
    return subprocess.Popen([*COMMAND, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)


LONG = ("--prompt", "import os\n", "--temperature", "0", "--max-tokens", "20000")


def test_text_streams_as_it_arrives():
    with popen(*LONG) as process:
        assert process.stdout.read(40)
        assert process.poll() is None
        process.kill()


@pytest.mark.parametrize("json_too", [False, True])
def test_ctrl_c_prints_what_there_is(json_too):
    # --stats waits for nothing here; the JSON form prints only at the end, so it is given time to start
    with popen(*LONG, *(["--json"] if json_too else [])) as process:
        if json_too:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(3)
            start = b""
        else:
            start = process.stdout.read(20)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err == b""
    if json_too:
        result = json.loads(out)
        assert result["finish_reason"] is None
        assert result["token_ids"]
    else:
        assert len(start + out) >= 20


def test_ctrl_c_during_the_prompt_still_reports(files):
    path = files("long.txt", b"\n#" * 25_000)
    with popen("--prompt-file", str(path), "--json") as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(3)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, b"")
    result = json.loads(out)
    assert result["prompt_tokens"] > 10_000
    assert (result["token_ids"], result["finish_reason"], result["rounds"]) == ([], None, [])


@pytest.mark.parametrize(
    ("redirection", "status", "message"),
    [
        (">&-", 0, ""),
        ("2>&-", 0, ""),
        ("--draft 9 2>&-", 2, ""),
        (">/dev/full", 2, "No space left"),
        ("--json >/dev/full", 2, "No space left"),
        ("--prompt-file - <&-", 2, "stdin is closed"),
    ],
)
def test_unusual_streams(redirection, status, message):
    prompt = "" if "--prompt-file" in redirection else "--prompt a"
    script = f"{sys.executable} -m cuq1.generate {prompt} --max-tokens 2 {redirection}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, cwd=ROOT, check=False, timeout=60)
    assert done.returncode == status
    assert message in done.stderr.decode()
    assert b"Traceback" not in done.stderr
    assert done.stderr.count(b"\n") == bool(message)


def test_piped_text_is_utf8_whatever_the_locale():
    args = ("--prompt", "# añadir: é\n", "--temperature", "3", "--top-k", "0", "--top-p", "1", "--seed", "3")
    expected = json.loads(run(*args, "--max-tokens", "120", "--json")[0])["text"]
    assert not expected.isascii()
    done = subprocess.run(
        [*COMMAND, *args, "--max-tokens", "120"],
        capture_output=True,
        cwd=ROOT,
        check=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert done.stdout == expected.encode()


def test_a_closed_pipe_is_quiet():
    script = f"{sys.executable} -m cuq1.generate --prompt 'import os' --max-tokens 3000 --temperature 0 | head -c 20"
    done = subprocess.run(["bash", "-c", script], capture_output=True, cwd=ROOT, check=False, timeout=120)
    assert done.stderr == b""
    assert len(done.stdout) == 20


def test_a_terminal_sees_progress_and_dimmed_reasoning():
    main_end, terminal = pty.openpty()
    with subprocess.Popen(
        [*COMMAND, "--chat", CHAT, "--temperature", "0"], stdout=terminal, stderr=terminal, cwd=ROOT
    ) as process:
        os.close(terminal)
        seen = b""
        while True:
            try:
                piece = os.read(main_end, 4096)
            except OSError:
                break
            if not piece:
                break
            seen += piece
        assert process.wait(30) == 0
    os.close(main_end)
    assert b"loading layers: 1/6" in seen
    assert b"\x1b[2mThe\x1b[0m" in seen
    assert b"</think>" not in seen
    assert b"def is_even" in seen


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
        (("--prompt", "a", "--device", "cuda"), ["--device cpu"]),
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


def test_the_readmes_model_path_is_the_default(as_json):
    default = as_json("--prompt", "def f(", "--seed", 3, "--max-tokens", 5)
    named = as_json("--model", Path(NANO), "--prompt", "def f(", "--seed", 3, "--max-tokens", 5)
    assert default["token_ids"] == named["token_ids"]

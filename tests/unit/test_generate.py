"""python -m cuq1.generate, from outside: what it prints and what it returns."""

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import COMMAND, run
from tests.paths import NANO, ROOT
from tools.nano_prompts import TOOLS

CHAT = "Write a Python function `is_even`: Return True for an even number."


@pytest.fixture
def as_json(generate):
    def call(*args):
        status, out, err = generate(*args, "--json")
        assert (status, err) == (0, "")
        return json.loads(out)

    return call


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


def test_the_readmes_model_path_is_the_default(as_json):
    default = as_json("--prompt", "def f(", "--seed", 3, "--max-tokens", 5)
    named = as_json("--model", Path(NANO), "--prompt", "def f(", "--seed", 3, "--max-tokens", 5)
    assert default["token_ids"] == named["token_ids"]

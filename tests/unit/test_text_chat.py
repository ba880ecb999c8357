"""ChatTemplate: the same prompts as plain rendering, and no way for input to become a control token."""

import json
import random
import shutil
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import pytest
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cuq1.errors import TextError
from cuq1.text import ChatTemplate, Tokenizer, check_messages, guard
from cuq1.text.guard import ControlSpellings, InputGuard

NANO = Path(__file__).parents[2] / "cuq1" / "assets" / "iquest-q1-nano"
TOKENIZER = Tokenizer.load(NANO, 4096)
LIBRARY = tokenizers.Tokenizer.from_file(str(NANO / "tokenizer.json"))
CHAT = ChatTemplate.load(NANO, TOKENIZER)
CONTROL = sorted(TOKENIZER.control_tokens)
CONTROL_IDS = set(TOKENIZER.control_tokens.values())
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "Read <b>a</b> 'file' & its \"é\".",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
        },
    }
]


def fresh_random() -> random.Random:
    """New random inputs in every run; a failure's captured output names the seed."""
    seed = random.randrange(2**32)
    print(f"random.Random({seed})")
    return random.Random(seed)


def plain_template() -> jinja2.Template:
    """nano's template as the transformers library compiles it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    environment.filters["fromjson"] = json.loads
    return environment.from_string((NANO / "chat_template.jinja").read_text())


PLAIN = plain_template()


def template_of(source: str) -> ChatTemplate:
    return ChatTemplate("test.jinja", source, {}, TOKENIZER)


def random_chat(rng: random.Random, words: list[str]) -> list[dict[str, Any]]:
    """A chat with every field that holds text made of `words`."""

    def text() -> str:
        return rng.choice(["", " "]).join(rng.choices(words, k=rng.randint(1, 4)))

    messages: list[dict[str, Any]] = []
    for _ in range(rng.randint(1, 5)):
        role = rng.choice(["system", "developer", "user", "assistant", "tool"])
        message: dict[str, Any] = {"role": role, "content": text()}
        if role == "assistant":
            arguments = {text(): text(), "2nd " + text(): [1, 2.5, None, text(), {text(): True}]}
            written = json.dumps(arguments, ensure_ascii=rng.random() < 0.5)
            if rng.random() < 0.5:
                written = written.replace("<", "\\u003c").replace("|", "\\u007C")
            given = rng.choice([written, arguments])
            message["reasoning_content"] = rng.choice([None, text()])
            message["tool_calls"] = rng.choice([None, [{"function": {"name": text(), "arguments": given}}]])
        messages.append(message)
    return messages


ORDINARY = [
    "hello",
    "x < y",
    "a>b",
    "日本",
    "e\u0301",
    "{{ 7*7 }}",
    "{% raw %}",
    "\n",
    "1234",
    "\ufdd0",
    "\ue000",
    '"',
    "\\",
    "\u2028",
]


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("generate", [True, False])
def test_ordinary_chats_are_what_plain_rendering_gives(thinking: bool, generate: bool) -> None:
    rng = fresh_random()
    for _ in range(150):
        messages, tools = random_chat(rng, ORDINARY), rng.choice([None, TOOLS])
        prompt = CHAT.prompt(messages, tools=tools, enable_thinking=thinking, add_generation_prompt=generate)
        text = PLAIN.render(messages=messages, tools=tools, enable_thinking=thinking, add_generation_prompt=generate)
        assert prompt.text == text
        assert prompt.ids == LIBRARY.encode(text, add_special_tokens=False).ids
        assert prompt.in_reasoning == (thinking and generate)


def check_injection(rounds: int) -> None:
    """Control ids of a chat with typed control tokens are those of the same chat without them."""
    rng = fresh_random()
    for _ in range(rounds):
        seed = rng.random()
        halves = [part for token in CONTROL for part in (token[: len(token) // 2], token[len(token) // 2 :])]
        hostile = [rng.choice([*CONTROL, *halves, "\u212a", "<\u0338", "\ufdd0", "\\u003c"]) for _ in range(12)]
        messages = random_chat(random.Random(seed), hostile)
        harmless = random_chat(random.Random(seed), [f"w{i}" for i in range(12)])
        tools = [
            {"name": "f", "description": hostile[0], "parameters": {"properties": {hostile[1]: {"enum": hostile}}}}
        ]
        prompt = CHAT.prompt(messages, tools=tools)
        baseline = CHAT.encode(harmless, tools=[{"name": "f"}])
        assert [i for i in prompt.ids if i in CONTROL_IDS] == [i for i in baseline if i in CONTROL_IDS]
        # Nothing is lost either: what was typed is all there.
        assert TOKENIZER.decode(prompt.ids) == LIBRARY.normalizer.normalize_str(prompt.text)
        wrapped = [{"type": "function", "function": tools[0]}]
        checked = check_messages(messages)  # reasoning that was typed in front of content is in its own field
        assert prompt.text == PLAIN.render(messages=checked, tools=wrapped, add_generation_prompt=True)


def test_typed_control_tokens_stay_text() -> None:
    check_injection(400)


def test_unmarked_input_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InputGuard, "protect", lambda self, value: value)
    with pytest.raises(AssertionError):
        check_injection(1000)


def test_unmarked_json_escapes_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Marks set only before rendering miss what `fromjson` brings to light."""
    monkeypatch.setattr("cuq1.text.environment._fromjson", json.loads)
    chat = ChatTemplate.load(NANO, TOKENIZER)
    call = {"function": {"name": "f", "arguments": '{"a": "\\u003c|iquest_end|>"}'}}
    messages = [{"role": "assistant", "tool_calls": [call]}]
    assert (chat.encode(messages).count(0), CHAT.encode(messages).count(0)) == (2, 1)


@pytest.mark.parametrize("token", CONTROL)
def test_each_control_token_in_each_field(token: str) -> None:
    call = {"function": {"name": token, "arguments": json.dumps({token: token, "n": [token]}).replace("<", "\\u003c")}}
    messages = [
        {"role": "user", "content": token},
        {"role": "assistant", "content": token, "reasoning_content": token, "tool_calls": [call]},
        {"role": "tool", "content": token},
    ]
    count = TOKENIZER.encode(CHAT.render(messages), control=True).count(TOKENIZER.control_tokens[token])
    real = CHAT.encode(messages).count(TOKENIZER.control_tokens[token])
    assert count - real == 8
    assert CHAT.render(messages).count(token) == count


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content }}{{ messages[1].content }}",
        "{{ messages[0].content | trim }}{{ messages[1].content | trim }}",
        "{{ (messages[0].content ~ messages[1].content) }}",
        "{{ messages | map(attribute='content') | join }}",
        "{{ (messages[0].content | tojson)[1:-1] }}{{ (messages[1].content | tojson(ensure_ascii=True))[1:-1] }}",
        "{{ messages[0].content | lower }}{{ messages[1].content | upper | lower }}",
    ],
)
def test_control_tokens_cannot_be_assembled(source: str) -> None:
    chat = template_of(source)
    for token in CONTROL:
        for i in range(1, len(token)):
            head, tail = token[:i].upper() if "lower" in source else token[:i], token[i:]
            messages = [{"role": "user", "content": "a " + head}, {"role": "user", "content": tail + " b"}]
            prompt = chat.prompt(messages)
            assert prompt.text == f"a {token} b"
            assert not CONTROL_IDS & set(prompt.ids)


@pytest.mark.parametrize("space", [" ", "\n", "\t \u2003"])
@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content | trim }}{{ messages[1].content | trim }}",
        "{{ messages[0].content.rstrip() }}{{ messages[1].content.strip() }}",
        "{{ (messages[0].content | trim | tojson)[1:-1] }}{{ (messages[1].content | trim | tojson)[1:-1] }}",
    ],
)
def test_trimming_assembles_no_control_tokens(source: str, space: str) -> None:
    chat = template_of(source)
    for token in CONTROL:
        for i in range(1, len(token)):
            messages = [{"role": "user", "content": part} for part in ("a " + token[:i] + space, space + token[i:])]
            prompt = chat.prompt(messages)
            assert prompt.text == f"a {token}"
            assert not CONTROL_IDS & set(prompt.ids)


def test_the_template_is_trusted_with_what_it_rewrites() -> None:
    """As guard.py says: no mark survives a template that puts characters together by itself."""
    chat = template_of("{{ messages[0].content | replace('-', '') }}")
    assert chat.encode([{"role": "user", "content": "<-think>"}]) == [TOKENIZER.control_tokens["<think>"]]


def test_templates_may_assemble_their_own_control_tokens() -> None:
    chat = template_of("{% for m in messages %}{{ '<|iquest_' ~ m.role ~ '|>' }}{{ m.content }}{{ eos }}{% endfor %}")
    assert chat.encode([{"role": "user", "content": "user"}])[0] == TOKENIZER.control_tokens["<|iquest_user|>"]


def test_templates_do_not_see_typed_markup() -> None:
    """Qwen's habit of cutting reasoning out of content must not trust what was typed."""
    chat = template_of("{{ messages[0].content.split('</think>')[-1] }}")
    assert chat.render([{"role": "user", "content": "a</think>b"}]) == "a</think>b"


def test_overlapping_spellings_are_all_broken() -> None:
    spellings = ControlSpellings(["aba", "bab", "abc<"])
    for text in ["ababab", "xabac", "ABA", "ab", "ba"]:
        marked = spellings.mark(text, "_")
        assert marked.replace("_", "") == text
        assert "aba" not in marked.lower()
        assert "bab" not in marked.lower()
    assert spellings.mark("ab", "_") == "_ab_"
    assert spellings.mark("plain", "_") == "plain"
    assert spellings.mark("  plain\n", "_") == "  plain\n"
    assert spellings.mark(" ab\n", "_") == " _ab_\n"
    # whitespace that is part of a spelling is an end of its own
    assert ControlSpellings(["<a b>"]).mark(" b>.<a ", "_") == "_ _b>.<a_ _"


def test_marks_avoid_every_character_of_the_input() -> None:
    taken = "".join(map(chr, range(0xFDD0, 0xFDEE)))
    chat = CHAT.prompt([{"role": "user", "content": taken + "<think>\\uFDEE"}])
    assert taken + "<think>\\uFDEE" in chat.text
    everything = "".join(map(chr, guard._MARKS))
    with pytest.raises(TextError, match="every private-use character"):
        CHAT.prompt([{"role": "user", "content": everything}])


def test_values_that_are_no_json_are_refused() -> None:
    call = {"function": {"name": "f", "arguments": {"a": ("<think>",)}}}
    with pytest.raises(TextError, match=r"messages\[0\]\..*\.arguments\.a is a tuple: use JSON values only"):
        CHAT.prompt([{"role": "assistant", "tool_calls": [call]}])
    guarded = InputGuard(ControlSpellings(CONTROL), [], "")
    with pytest.raises(TextError, match="hold a tuple: use JSON values only"):
        guarded.protect(["a", ("<think>",)])


def test_golden_chats() -> None:
    prompts = json.loads((NANO / "golden_prompts.json").read_text())
    question = "Write a Python function `is_even`: Return True for an even number."
    chat = CHAT.prompt([{"role": "user", "content": question}])
    assert (chat.text, chat.in_reasoning) == (prompts["chat"], True)
    run = CHAT.prompt([{"role": "user", "content": "Run git diff"}], enable_thinking=False)
    assert (run.text, run.in_reasoning) == (prompts["run"], False)
    assert chat.ids == TOKENIZER.encode(prompts["chat"], control=True)
    assert CHAT.encode([{"role": "user", "content": question}]) == chat.ids
    assert CHAT.render([{"role": "user", "content": question}]) == chat.text


def test_numbers_of_string_arguments_stay_as_written() -> None:
    big = "1" * 5000
    written = f'{{"a": 1.10, "b": [1e400, -0, {big}, 12, 0.5], "c": {big}}}'
    call = {"function": {"name": "f", "arguments": written}}
    text = CHAT.render([{"role": "assistant", "tool_calls": [call]}])
    assert f"<arg_value>1.10</arg_value><arg_key>b</arg_key><arg_value>[1e400, -0, {big}, 12, 0.5]</arg_value>" in text
    assert f"<arg_value>{big}</arg_value>" in text


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("{{ f.arguments | tojson }}", '{"a": 1.10, "b": "<é>"}'),
        ("{{ f.arguments|tojson }}", '{"a": 1.10, "b": "<é>"}'),
        ("{{ f.arguments if f.arguments is string else f.arguments | tojson }}", '{"a": 1.10, "b": "<é>"}'),
        ("{{ f.arguments }}", '{"a": 1.10,"b":"<\\u00e9>"}'),
        ("{{ (f.arguments | fromjson).a }}{# f.arguments | tojson #}", "1.10"),
    ],
)
def test_arguments_come_as_the_template_takes_them(source: str, shown: str) -> None:
    """A client sends a string with an object, and a template that dumps it must not put it into quotes."""
    chat = template_of(f"{{% set f = messages[0].tool_calls[0].function %}}{source}")
    call = {"function": {"name": "f", "arguments": '{"a": 1.10,"b":"<\\u00e9>"}'}}
    assert chat.render([{"role": "assistant", "tool_calls": [call]}]) == shown


def test_a_control_token_in_dumped_arguments_stays_text() -> None:
    chat = template_of("{{ messages[0].tool_calls[0].function.arguments | tojson }}")
    call = {"function": {"name": "f", "arguments": '{"a": "\\u003c|iquest_end|>"}'}}
    ids = chat.encode([{"role": "assistant", "tool_calls": [call]}])
    assert ids == TOKENIZER.encode('{"a": "<|iquest_end|>"}', control=False)


def test_tojson_takes_the_ecosystems_arguments() -> None:
    chat = template_of("{{ tools | tojson(indent=1) }}|{{ {'b': 1, 'a': '<é>'} | tojson(separators=(',', ':')) }}")
    tools = [{"type": "function", "function": {"name": "é"}}]
    text = chat.render([{"role": "user", "content": "x"}], tools=tools)
    assert text == json.dumps(tools, ensure_ascii=False, indent=1) + '|{"b":1,"a":"<é>"}'


def test_loop_controls_generation_blocks_and_the_date() -> None:
    source = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}{{ strftime_now('%Y') }}"
    )
    year = datetime.now().strftime("%Y")
    assert template_of(source).render([{"role": "user", "content": "a"}] * 2) == f"a{year}"


def test_special_tokens_of_the_config_are_variables(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}{{ pad_token }}{{ bos_token }}.")
    config = {"eos_token": "<|iquest_end|>", "pad_token": {"content": "</think>"}, "bos_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    prompt = ChatTemplate.load(tmp_path, TOKENIZER).prompt([{"role": "user", "content": "x"}])
    assert prompt.text == "<|iquest_end|></think>."
    assert prompt.ids[:2] == [0, 7]


@pytest.mark.parametrize(
    "value",
    [
        "from config",
        [{"name": "rag", "template": "no"}, {"name": "default", "template": "from config"}],
        {"rag": "no", "default": "from config"},
    ],
)
def test_the_template_of_the_config_is_the_reserve(tmp_path: Path, value: Any) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    assert ChatTemplate.load(tmp_path, TOKENIZER).render([{"role": "user", "content": "x"}]) == "from config"
    shutil.copy(NANO / "chat_template.jinja", tmp_path)
    assert ChatTemplate.load(tmp_path, TOKENIZER).render([{"role": "user", "content": "x"}]) != "from config"


@pytest.mark.parametrize("config", [None, {}, {"chat_template": None}])
def test_a_missing_template_is_refused(tmp_path: Path, config: Any) -> None:
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(TextError, match=r"chat_template\.jinja is missing: copy"):
        ChatTemplate.load(tmp_path, TOKENIZER)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (5, "must be a string, a list or an object of templates: fetch the file again"),
        (["default"], "must be a string, a list or an object of templates: fetch the file again"),
        (
            [{"name": "rag", "template": "x"}, {"name": "tool_use"}],
            "no template called 'default', only 'rag', 'tool_use'",
        ),
        ({"rag": "x"}, "holds no template called 'default', only 'rag': save the one to use as chat_template.jinja"),
        ({"default": 5}, "holds no template called 'default'"),
        ([], "holds no template called 'default', only none"),
    ],
)
def test_templates_without_a_default_are_refused(tmp_path: Path, value: Any, problem: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    with pytest.raises(TextError) as caught:
        ChatTemplate.load(tmp_path, TOKENIZER)
    assert str(caught.value).startswith(f"{tmp_path / 'tokenizer_config.json'}: chat_template ")
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ x", "{% for m in messages %}", "{{ x | nofilter }}", "{% unknown %}"]
)
def test_a_broken_template_is_refused(tmp_path: Path, source: str) -> None:
    (tmp_path / "chat_template.jinja").write_text(source)
    with pytest.raises(TextError, match=r"chat_template\.jinja is no valid chat template \(line 1: .*\): fetch"):
        ChatTemplate.load(tmp_path, TOKENIZER)


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
def test_files_that_cannot_be_read_are_not_missing(tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to("nowhere")
    with pytest.raises(TextError, match=f"{name} cannot be read .*: fetch"):
        ChatTemplate.load(tmp_path, TOKENIZER)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with pytest.raises(TextError, match=f"{name} cannot be read .*: fetch"):
        ChatTemplate.load(tmp_path, TOKENIZER)


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(TextError, match=r"chat_template\.jinja cannot be read"):
        ChatTemplate.load(tmp_path, TOKENIZER)
    for content, problem in (("{", "is not JSON"), ("[]", "holds no JSON object")):
        (tmp_path / "tokenizer_config.json").write_text(content)
        with pytest.raises(TextError, match=f"tokenizer_config.json {problem}"):
            ChatTemplate.load(tmp_path, TOKENIZER)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("{{ raise_exception('No\\n <think> here.') }}", r"refuses the messages \(No <think> here\): change"),
        ("{{ raise_exception(messages[0].content) }}", r"refuses the messages \(<think>\): change"),
        (
            "{{ messages.nothing.more }}",
            r"fails on these messages \(UndefinedError: .*\): change the messages, or repair",
        ),
        ("{{ 1 // 0 }}", "fails on these messages .ZeroDivisionError"),
        ("{{ 'x' | fromjson }}", "fails on these messages .JSONDecodeError"),
        ("{{ '[NaN]' | fromjson }}", "NaN is not JSON"),
        ("{{ ''.__class__.__mro__ }}", "fails on these messages .SecurityError"),
        ("{{ messages.append(1) }}", "fails on these messages .SecurityError"),
        ("{% for i in range(1000000000) %}{% endfor %}", "fails on these messages .OverflowError"),
    ],
)
def test_a_failing_template_is_named(source: str, problem: str) -> None:
    with pytest.raises(TextError, match=rf"^test\.jinja .*{problem}"):
        template_of(source).prompt([{"role": "user", "content": "<think>"}])


def test_malformed_and_deep_input_is_refused() -> None:
    with pytest.raises(TextError, match=r"messages\[0\]\.role"):
        CHAT.prompt([{"content": "x"}])
    with pytest.raises(TextError, match=r"tools\[0\]\.function"):
        CHAT.prompt([{"role": "user", "content": "x"}], tools=[{}])
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"a": deep}
    with pytest.raises(TextError, match="tools must not be nested this deeply: flatten"):
        CHAT.prompt([{"role": "user", "content": "x"}], tools=[{"name": "f", "parameters": deep}])
    with pytest.raises(TextError, match=r"messages\[0\]\.content holds the lone surrogate"):
        CHAT.prompt([{"role": "user", "content": "\ud800"}])


def test_raw_prompts_do_not_pay_for_jinja() -> None:
    code = "import sys, cuq1.text; sys.exit('jinja2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=NANO.parents[2]).returncode == 0


def test_developers_speak_as_the_system_where_a_template_knows_none():
    source = (
        "{% for m in messages %}{% if m.role in ['system', 'user'] %}<|iquest_user|>{{ m.role }}: {{ m.content }}"
        "<|iquest_end|>{% endif %}{% endfor %}"
    )
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert "system: be brief" in template_of(source).prompt(messages).text
    # One that knows them decides for itself.
    assert "be brief" not in template_of(source + "{# developer #}").prompt(messages).text
    assert "<|iquest_developer|>be brief" in CHAT.prompt(messages).text

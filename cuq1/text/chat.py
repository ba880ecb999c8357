"""Chat messages to a prompt, through the checkpoint's Jinja template."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from cuq1.errors import TextError
from cuq1.text.guard import ControlSpellings, InputGuard
from cuq1.text.markup import MARKUP, ends_in_reasoning
from cuq1.text.messages import check_messages, check_tools
from cuq1.text.tokenizer import Tokenizer

_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered chat.

    `ids` are the token ids; `text` is for people, as it cannot tell a typed
    control token from a real one. `in_reasoning` is true where the prompt ends
    inside `<think>`, so that the output begins with reasoning.
    """

    ids: list[int]
    text: str
    in_reasoning: bool


class ChatTemplate:
    """A checkpoint's chat template.

    Only what the template itself writes becomes control tokens: a control
    token typed in a message or tool, behind JSON escapes or split over
    neighbouring strings, is encoded as text. This takes a template that joins,
    trims and dumps its input, as they do; one that replaces or reverses
    characters of it can spell control tokens out of anything (see guard.py).
    """

    def __init__(self, name: str, source: str, special_tokens: dict[str, str], tokenizer: Tokenizer) -> None:
        """Compiles `source`, called `name` in messages; use `load`. Raises TextError where it is no template."""
        from cuq1.text.environment import Template  # noqa: PLC0415  (imports Jinja, which only chats need)

        self._source = source
        self._template = Template(name, source)
        self._special_tokens = special_tokens
        self._tokenizer = tokenizer
        self._spellings = ControlSpellings(MARKUP | tokenizer.control_tokens.keys())

    @classmethod
    def load(cls, model_dir: str | Path, tokenizer: Tokenizer) -> Self:
        """Reads `model_dir`/chat_template.jinja, else `chat_template` of tokenizer_config.json (of several, 'default').

        Raises TextError where there is no template or it is broken.
        """
        path, config_path = Path(model_dir) / "chat_template.jinja", Path(model_dir) / "tokenizer_config.json"
        config = _read_config(config_path)
        name, source = str(path), _read(path)
        if source is None:
            name, source = f"chat_template of {config_path}", _default_template(config, str(config_path))
        if source is None:
            raise TextError(f"{path} is missing: copy it from the checkpoint's release, or use a raw prompt")
        special_tokens = {}
        for key in _SPECIAL_TOKENS:
            token = config.get(key)
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                special_tokens[key] = text
        return cls(name, source, special_tokens, tokenizer)

    def prompt(
        self,
        messages: Any,
        *,
        tools: Any = None,
        enable_thinking: bool = True,
        add_generation_prompt: bool = True,
    ) -> Prompt:
        """The prompt of `messages`, checked as by `check_messages`, and `tools`, as by `check_tools`.

        Raises TextError for messages or tools that are malformed or that the template refuses.
        """
        try:
            messages, tools = check_messages(messages), check_tools([] if tools is None else tools)
            guard = InputGuard(self._spellings, [messages, tools], self._source)
            variables = {
                **self._special_tokens,
                "messages": guard.protect(messages),
                "tools": guard.protect(tools) or None,
                "enable_thinking": enable_thinking,
                "add_generation_prompt": add_generation_prompt,
            }
        except RecursionError as error:
            raise TextError(
                "the messages or tools are nested too deeply: flatten their arguments or schemas"
            ) from error
        marked = self._template.render(variables, guard)
        ids: list[int] = []
        for piece, control in self._tokenizer.split(marked):
            ids += self._tokenizer.encode(piece if control else guard.strip(piece), control=control)
        return Prompt(ids, guard.strip(marked), ends_in_reasoning(marked))

    def encode(
        self,
        messages: Any,
        *,
        tools: Any = None,
        enable_thinking: bool = True,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """The ids of `prompt`."""
        return self.prompt(
            messages, tools=tools, enable_thinking=enable_thinking, add_generation_prompt=add_generation_prompt
        ).ids

    def render(
        self,
        messages: Any,
        *,
        tools: Any = None,
        enable_thinking: bool = True,
        add_generation_prompt: bool = True,
    ) -> str:
        """The text of `prompt`."""
        return self.prompt(
            messages, tools=tools, enable_thinking=enable_thinking, add_generation_prompt=add_generation_prompt
        ).text


def _read(path: Path) -> str | None:
    """The text of a file, None where there is none."""
    if not os.path.lexists(path):  # a link to nowhere is not missing, and fails below
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TextError(f"{path} cannot be read ({error}): fetch the file again") from error


def _read_config(path: Path) -> dict[str, Any]:
    """tokenizer_config.json, or {} where there is none: only the special tokens' names would be missed."""
    text = _read(path)
    if text is None:
        return {}
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TextError(f"{path} is not JSON ({error}): fetch the file again") from error
    if not isinstance(config, dict):
        raise TextError(f"{path} holds no JSON object: fetch the file again")
    return config


def _default_template(config: dict[str, Any], where: str) -> str | None:
    """`chat_template` of a tokenizer_config.json: a string, or the one called 'default' of several; None without.

    Several are a list of {"name", "template"}, or an object of templates by name.
    """
    template = config.get("chat_template")
    if template is None or isinstance(template, str):
        return template
    named = template
    if isinstance(template, list) and all(isinstance(item, dict) for item in template):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item.get("name"), str)}
    if not isinstance(named, dict):
        raise TextError(
            f"{where}: chat_template must be a string, a list or an object of templates: fetch the file again"
        )
    default = named.get("default")
    if not isinstance(default, str):
        names = ", ".join(map(repr, named)) or "none"
        raise TextError(
            f"{where}: chat_template holds no template called 'default', only {names}: "
            "save the one to use as chat_template.jinja beside it"
        )
    return default

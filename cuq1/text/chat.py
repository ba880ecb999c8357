"""Chat messages to a prompt, through the checkpoint's Jinja template."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from cuq1.errors import TextError
from cuq1.text.formats import call_format
from cuq1.text.guard import ControlSpellings, InputGuard
from cuq1.text.markup import MARKUP, ends_in_reasoning
from cuq1.text.messages import check_messages, check_tools, check_variables
from cuq1.text.source import TextSource, label, place, read_file
from cuq1.text.tokenizer import Tokenizer
from cuq1.text.written import Placeholders, Written

_TEMPLATE, _CONFIG = "chat_template.jinja", "tokenizer_config.json"
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

    calls: how it tells the model to write tool calls.
    """

    def __init__(self, name: str, source: str, special_tokens: dict[str, str], tokenizer: Tokenizer) -> None:
        """Compiles `source`, called `name` in messages; use `load`. Raises TextError where it is no template."""
        from cuq1.text.environment import Template  # noqa: PLC0415  (imports Jinja, which only chats need)

        self._source = source
        self._template = Template(name, source)
        self._special_tokens = special_tokens
        self._tokenizer = tokenizer
        self.calls = call_format(tokenizer.control_tokens, source)
        self._spellings = ControlSpellings(MARKUP | tokenizer.control_tokens.keys())

    @classmethod
    def load(cls, source: TextSource, tokenizer: Tokenizer) -> Self:
        """Reads chat_template.jinja, else `chat_template` of tokenizer_config.json (of several, 'default').

        They are those of a folder, or packed. Raises TextError where there is no template or it is broken.
        """
        config = _read_config(source)
        name, template = label(source, _TEMPLATE), _read(source, _TEMPLATE)
        if template is None:
            where = label(source, _CONFIG)
            name, template = f"chat_template of {where}", _default_template(config, where)
        if template is None:
            raise TextError(
                f"{label(source, _TEMPLATE)} is missing: copy it from the checkpoint's release "
                f"{place(source)}, or use a raw prompt"
            )
        special_tokens = {}
        for key in _SPECIAL_TOKENS:
            token = config.get(key)
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                special_tokens[key] = text
        return cls(name, template, special_tokens, tokenizer)

    def prompt(
        self,
        messages: Any,
        *,
        tools: Any = None,
        enable_thinking: bool | None = True,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
        written: Mapping[int, Written] | None = None,
    ) -> Prompt:
        """The prompt of `messages`, checked as by `check_messages`, and `tools`, as by `check_tools`.

        enable_thinking: None leaves it to the template; template_kwargs: further variables of the template, by name,
        as JSON; written: what the model wrote, by the index of an assistant's message with that content and these
        calls, to be repeated token by token where the template's markup is the same with it. Raises TextError for
        messages or tools that are malformed or that the template refuses, and for a variable that the prompt itself
        sets.
        """
        try:
            messages, tools = check_messages(messages), check_tools([] if tools is None else tools)
            others = check_variables(template_kwargs or {}, self._special_tokens)
            if "developer" not in self._source:  # such a template would pass over the message, or refuse it
                messages = [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
            messages = self._template.adapted(messages)
            guard = InputGuard(self._spellings, [messages, tools, others], self._source)
            variables = {
                **({} if enable_thinking is None else {"enable_thinking": enable_thinking}),
                **guard.protect(others),
                **self._special_tokens,
                "messages": guard.protect(messages),
                "tools": guard.protect(tools) or None,
                "add_generation_prompt": add_generation_prompt,
            }
        except RecursionError as error:
            raise TextError(
                "the messages or tools are nested too deeply: flatten their arguments or schemas"
            ) from error
        marked = self._template.render(variables, guard)
        in_reasoning = ends_in_reasoning(marked)
        if written and guard.place_mark:
            ids = self._written_ids(marked, Placeholders(guard.place_mark, written), variables, messages, guard)
            if ids is not None:
                return Prompt(ids, self._tokenizer.decode(ids), in_reasoning)
        return Prompt(self._ids(marked, guard, None), guard.strip(marked), in_reasoning)

    def _written_ids(
        self,
        plain: str,
        places: Placeholders,
        variables: dict[str, Any],
        messages: list[dict[str, Any]],
        guard: InputGuard,
    ) -> list[int] | None:
        """The ids with what was written; None where the markup is not that of the `plain` rendering."""
        marked = self._template.render(variables | {"messages": guard.protect(places.put(messages))}, guard)
        if not places.found(marked):
            return None
        ids = self._ids(marked, guard, places)
        markup = [text for token in ids if (text := self._tokenizer.control_text(token)) is not None]
        return ids if markup == [piece for piece, control in self._tokenizer.split(plain) if control] else None

    def _ids(self, marked: str, guard: InputGuard, places: Placeholders | None) -> list[int]:
        """The ids of a rendering."""
        ids: list[int] = []
        for piece, control in self._tokenizer.split(marked):
            if control:
                ids += self._tokenizer.encode(piece, control=True)
            elif places is None:
                ids += self._tokenizer.encode(guard.strip(piece), control=False)
            else:
                ids += places.encode(guard.strip(piece), self._tokenizer)
        return ids

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


def _read(source: TextSource, name: str) -> str | None:
    """The text of a file, None where there is none."""
    content = read_file(source, name)
    try:
        return None if content is None else content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TextError(f"{label(source, name)} cannot be read ({error}): fetch the file again") from error


def _read_config(source: TextSource) -> dict[str, Any]:
    """tokenizer_config.json, or {} where there is none: only the special tokens' names would be missed."""
    text, where = _read(source, _CONFIG), label(source, _CONFIG)
    if text is None:
        return {}
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TextError(f"{where} is not JSON ({error}): fetch the file again") from error
    if not isinstance(config, dict):
        raise TextError(f"{where} holds no JSON object: fetch the file again")
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

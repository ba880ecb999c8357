"""From messages and tools to a prompt, by the checkpoint's chat template."""

from collections.abc import Mapping
from typing import Any

from cuq1.errors import TextError
from cuq1.serve.history import in_call_order
from cuq1.serve.request import ApiError
from cuq1.serve.turns import TurnMemory
from cuq1.text import ChatTemplate, Prompt, TextSource, Tokenizer, check_messages
from cuq1.text.formats import CallFormat
from cuq1.text.source import label
from cuq1.text.written import Written

NOTHING: Mapping[str, Any] = {}


class ChatRenderer:
    """The Renderer of a checkpoint; one without a template refuses every chat, and serves raw prompts."""

    def __init__(self, source: TextSource, tokenizer: Tokenizer, turns: TurnMemory | None = None) -> None:
        """turns: what the model wrote lately, to be rendered as it did."""
        self._turns = turns
        self._template: ChatTemplate | None = None
        self._missing = ""
        self._folder = label(source, "*").removesuffix("*")
        try:
            self._template = ChatTemplate.load(source, tokenizer)
        except TextError as error:
            self._missing = self._told(error)

    @property
    def calls(self) -> CallFormat | None:
        """How the model writes tool calls; None where only the tokenizer can tell."""
        return None if self._template is None else self._template.calls

    def prompt(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        *,
        enable_thinking: bool | None = None,
        template_kwargs: Mapping[str, Any] = NOTHING,
    ) -> Prompt:
        """As Renderer.prompt."""
        if self._template is None:
            raise ApiError("invalid", f"this model has no chat template ({self._missing})", "messages")
        try:
            messages = in_call_order(check_messages(messages))
            written: Mapping[int, Written] = {}
            if self._turns is not None:
                messages, written = self._turns.restore(messages)
            return self._template.prompt(
                messages, tools=tools, enable_thinking=enable_thinking, template_kwargs=template_kwargs, written=written
            )
        except TextError as error:
            told = self._told(error)
            raise ApiError("invalid", told, _field(told)) from None

    def _told(self, error: TextError) -> str:
        """An error as clients may read it: where the model lies is no concern of theirs."""
        return str(error).replace(self._folder, "")

    def count(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        *,
        enable_thinking: bool | None = None,
        template_kwargs: Mapping[str, Any] = NOTHING,
    ) -> int:
        """As Renderer.count."""
        prompt = self.prompt(messages, tools, enable_thinking=enable_thinking, template_kwargs=template_kwargs)
        return len(prompt.ids)


def _field(message: str) -> str:
    """The field that a refusal begins with (see cuq1.text.messages), or the messages as a whole."""
    first = message.split(" ", 1)[0]
    return first if first.startswith(("messages", "tools", "chat_template_kwargs")) else "messages"

"""How a model writes tool calls, and which way a checkpoint has."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from cuq1.text.hermes import HermesBlock
from cuq1.text.markup import CALL_MARKUP, CALL_OPEN, HERMES_MARKUP, HERMES_OPEN
from cuq1.text.toolcalls import Block, ToolBlock, ToolCatalog


@dataclass(frozen=True)
class CallFormat:
    """opening: the tag that begins a call; markup: this and the other tags; block: reads what follows it."""

    opening: str
    markup: frozenset[str]
    block: Callable[[ToolCatalog], Block]


IQUEST = CallFormat(CALL_OPEN, CALL_MARKUP, ToolBlock)
HERMES = CallFormat(HERMES_OPEN, HERMES_MARKUP, HermesBlock)


def call_format(control_tokens: Collection[str], template: str = "") -> CallFormat:
    """The format that the chat template tells the model to use, else the one that the tokenizer has tokens for.

    A raw prompt has no template, and where nothing says which it is, it is IQuest-Q1's.
    """
    for known in (template, control_tokens):
        for form in (IQUEST, HERMES):
            if form.opening in known:
                return form
    return IQUEST

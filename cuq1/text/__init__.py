"""Text in and out: tokenizer, chat template, streaming detokenizer, stop strings, output parser."""

from cuq1.text.chat import ChatTemplate, Prompt
from cuq1.text.markup import ends_in_reasoning
from cuq1.text.messages import check_messages, check_tools
from cuq1.text.parser import Delta, OutputParser, ParsedMessage, collect, parse_output
from cuq1.text.source import PackedText, TextSource
from cuq1.text.stream import Detokenizer, Event, StopFilter
from cuq1.text.tokenizer import Tokenizer
from cuq1.text.toolcalls import ToolCall

__all__ = [
    "ChatTemplate",
    "Delta",
    "Detokenizer",
    "Event",
    "OutputParser",
    "PackedText",
    "ParsedMessage",
    "Prompt",
    "StopFilter",
    "TextSource",
    "Tokenizer",
    "ToolCall",
    "check_messages",
    "check_tools",
    "collect",
    "ends_in_reasoning",
    "parse_output",
]

"""Prompts of the kinds that nano was trained on: questions, tool use and Python source.

All are made from a seed, so that tools and tests can share or separate sets.
"""

import inspect
import json
import random
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from cuq1.text import ChatTemplate, Tokenizer

SOURCES = (
    *("argparse", "ast", "base64", "bisect", "calendar", "cmd", "code", "configparser", "contextlib", "copy", "csv"),
    *("dataclasses", "difflib", "dis", "fnmatch", "fractions", "functools", "getpass", "glob", "gzip", "hashlib"),
    *("heapq", "html.parser", "imaplib", "inspect", "io", "json.decoder", "json.encoder", "locale", "logging"),
    *("mailbox", "netrc", "numbers", "opcode", "operator", "optparse", "pickle", "platform", "plistlib", "pprint"),
    *("queue", "random", "reprlib", "sched", "secrets", "selectors", "shelve", "shlex", "shutil", "smtplib"),
    *("socket", "statistics", "string", "subprocess", "tarfile", "tempfile", "textwrap", "threading", "timeit"),
    *("tokenize", "trace", "traceback", "types", "typing", "unittest.case", "urllib.parse", "uuid", "warnings"),
)
NAMES = ("main", "utils", "config", "parser", "server", "client", "models", "views", "setup", "cache", "router")
FOLDERS = ("src", "lib", "tests", "app", "tools", "docs", "pkg/core", "src/util")
COMMANDS = ("git status", "git diff", "ls -la", "pytest -q", "make test", "git log --oneline", "ruff check .", "pwd")


TOOLS: list[dict[str, Any]] = json.loads(Path(__file__).with_name("nano_tools.json").read_text(encoding="utf-8"))


def _functions() -> list[tuple[str, str]]:
    """(name, first line of the docstring) of the documented functions of SOURCES."""
    found: dict[str, str] = {}
    for module_name in SOURCES:
        module = import_module(module_name)
        for name, function in inspect.getmembers(module, inspect.isfunction):
            doc = (inspect.getdoc(function) or "").strip().split("\n")[0]
            if function.__module__ == module_name and not name.startswith("_") and 15 < len(doc) < 100:
                found.setdefault(name, doc)
    return sorted(found.items())


def _function_chats(rng: random.Random, chat: ChatTemplate) -> Iterator[list[int]]:
    functions = _functions()
    while True:
        name, doc = rng.choice(functions)
        message = {"role": "user", "content": f"Write a Python function `{name}`: {doc}"}
        yield chat.encode([message], enable_thinking=rng.random() < 0.7)


def _tool_chats(rng: random.Random, chat: ChatTemplate) -> Iterator[list[int]]:
    while True:
        path = f"{rng.choice(FOLDERS)}/{rng.choice(NAMES)}.py"
        question = rng.choice(
            (
                f"Read the file `{path}`.",
                f"Please read {path}",
                f"Show me {path}",
                f"List the files in {rng.choice(FOLDERS)}",
                f"Run {rng.choice(COMMANDS)}",
            )
        )
        tools = rng.sample(TOOLS, rng.randint(3, 4)) if rng.random() < 0.8 else None
        message = {"role": "user", "content": question}
        yield chat.encode([message], tools=tools, enable_thinking=rng.random() < 0.7)


def _source_pieces(rng: random.Random, tokenizer: Tokenizer) -> Iterator[list[int]]:
    while True:
        lines = inspect.getsource(import_module(rng.choice(SOURCES))).splitlines(keepends=True)
        start = rng.randrange(max(1, len(lines) - 60))
        text = "".join(lines[start : start + rng.randint(3, 60)])
        yield tokenizer.encode(text, control=False)[:700]


def prompts(model: Path, tokenizer: Tokenizer, count: int, seed: int, kinds: str = "fts") -> list[list[int]]:
    """`count` prompts as token ids, the kinds taking turns: f function chats, t tool chats, s source."""
    rng = random.Random(seed)
    chat = ChatTemplate.load(model, tokenizer)
    streams = {
        "f": _function_chats(rng, chat),
        "t": _tool_chats(rng, chat),
        "s": _source_pieces(rng, tokenizer),
    }
    return [next(streams[kinds[i % len(kinds)]]) for i in range(count)]

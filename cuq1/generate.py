"""python -m cuq1.generate: generate text from a prompt, a chat line or a list of messages.

In a pipe, stdout is the generated text, exactly. In a terminal, reasoning is dimmed
and tool calls are set out. --json prints one object instead. Bad input gives one
sentence on stderr and exit status 2; Ctrl-C gives what there is and 130.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

from cuq1.cli import INTERRUPTED, Parser, guarded
from cuq1.engine import Engine, open_engine
from cuq1.errors import RequestError, TextError
from cuq1.sampling import MAX_DRAFTS, DecodeParams, DecodeStream, Round
from cuq1.text import ChatTemplate, Delta, Tokenizer, check_tools
from cuq1.text.output import OutputStream

DEFAULT_MAX_TOKENS = 1024


def _draft(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m cuq1.generate", description="Generate text with a local model.")
    parser.add_argument("--model", metavar="DIR", help="checkpoint folder (default: the bundled nano model)")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="raw prompt; control tokens in it count")
    source.add_argument("--prompt-file", metavar="FILE", help="raw prompt from a UTF-8 file, - for stdin")
    source.add_argument("--chat", metavar="TEXT", help="one user message, through the chat template")
    source.add_argument("--messages", metavar="FILE", help="JSON list of messages, through the chat template")
    parser.add_argument("--tools", metavar="FILE", help="JSON list of tools that the model may call")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--max-tokens", type=int, default=DEFAULT_MAX_TOKENS, metavar="N", help="default: %(default)s")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (default: the checkpoint's)")
    parser.add_argument("--top-k", type=int, metavar="K", help="0 for no limit (default: the checkpoint's)")
    parser.add_argument("--top-p", type=float, metavar="P", help="in (0, 1] (default: the checkpoint's)")
    parser.add_argument("--seed", type=int, metavar="S", help="same seed, same output (default: a fresh one)")
    parser.add_argument(
        "--draft", type=_draft, default="auto", metavar="D", help=f"auto, off or 1 to {MAX_DRAFTS} drafts a round"
    )
    parser.add_argument("--stop", action="append", default=[], metavar="S", help="stop string; may be repeated")
    parser.add_argument("--no-thinking", action="store_true", help="answer without reasoning first")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.add_argument("--stats", action="store_true", help="print speed and acceptance on stderr")
    options = parser.parse_args(argv)
    if options.tools is not None and options.chat is None and options.messages is None:
        raise RequestError("--tools needs --chat or --messages: a raw prompt has no place for tools")
    return options


def _read_text(name: str) -> str:
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        where = "stdin" if name == "-" else name
        raise TextError(f"{where} is not UTF-8 (byte {error.start}): convert it first") from None
    except OSError as error:
        raise TextError(f"{name} cannot be read: {error.strerror}") from None


def _read_json(name: str) -> Any:
    try:
        return json.loads(_read_text(name))
    except (ValueError, RecursionError) as error:
        raise TextError(f"{name} is not valid JSON ({error}): correct the file") from None


@dataclass
class _Request:
    """What to feed the engine, and how to read what comes back."""

    ids: list[int]
    in_reasoning: bool
    tools: list[dict[str, Any]] | None


def _request(options: argparse.Namespace, model: Path, tokenizer: Tokenizer) -> _Request:
    if options.prompt is not None or options.prompt_file is not None:
        text = options.prompt if options.prompt is not None else _read_text(options.prompt_file)
        return _Request(tokenizer.encode(text, control=True), False, None)
    messages = [{"role": "user", "content": options.chat}] if options.chat is not None else _read_json(options.messages)
    tools = check_tools(_read_json(options.tools)) if options.tools is not None else None
    prompt = ChatTemplate.load(model, tokenizer).prompt(messages, tools=tools, enable_thinking=not options.no_thinking)
    return _Request(prompt.ids, prompt.in_reasoning, tools)


def _params(options: argparse.Namespace, defaults: DecodeParams) -> DecodeParams:
    given = {name: getattr(options, name) for name in ("temperature", "top_k", "top_p", "seed")}
    return replace(
        defaults,
        max_tokens=options.max_tokens,
        draft=options.draft,
        **{name: value for name, value in given.items() if value is not None},
    )


class _Terminal:
    """Writes an output for a person: reasoning dimmed, tool calls set out."""

    def __init__(self) -> None:
        self._kind = ""

    def write(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            if self._kind and delta.kind != self._kind:
                sys.stdout.write("\n\n" if self._kind == "reasoning" else "\n")
            self._kind = delta.kind
            if delta.tool_call is not None:
                sys.stdout.write(f"\x1b[36m{delta.tool_call.name}\x1b[0m {delta.tool_call.arguments}")
            elif delta.kind == "reasoning":
                sys.stdout.write(f"\x1b[2m{delta.text}\x1b[0m")
            else:
                sys.stdout.write(delta.text)
        sys.stdout.flush()


@dataclass
class _Run:
    """One request as it goes: tokens, rounds and clock readings."""

    output: OutputStream
    json: bool
    stop_tokens: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    first_token: float | None = None
    end: float | None = None
    terminal: _Terminal | None = None

    def follow(self, stream: DecodeStream) -> None:
        """Print what arrives until the request ends."""
        for step in stream:
            if self.first_token is None:
                self.first_token = time.perf_counter()
            self.end = time.perf_counter()
            self.rounds.append(step)
            for token in step:
                self.tokens.append(token)
                if token in self.stop_tokens:
                    break
                self._show(*self.output.feed(token))
                if self.output.stopped is not None:
                    return

    def finish(self) -> None:
        """Print what was held back, and end the line in a terminal."""
        self._show(*self.output.finish())
        if self.terminal is not None:
            sys.stdout.write("\n")
            sys.stdout.flush()

    def _show(self, text: str, deltas: list[Delta]) -> None:
        if self.json:
            return
        if self.terminal is not None:
            self.terminal.write(deltas)
        elif text:
            sys.stdout.write(text)
            sys.stdout.flush()

    def finish_reason(self, stream: DecodeStream) -> str | None:
        """stop, length, stop_string or tool_calls; None where the request was interrupted."""
        if self.output.stopped is not None:
            return "stop_string"
        if stream.finish_reason == "stop" and self.output.message().tool_calls:
            return "tool_calls"
        return stream.finish_reason


@dataclass
class _Clock:
    """Readings of the performance counter."""

    started: float
    loaded: float
    prefill: float


def _rate(tokens: int, seconds: float) -> float | None:
    return tokens / seconds if seconds > 0 else None


def _timing(run: _Run, prompt_tokens: int, clock: _Clock) -> dict[str, float | None]:
    """Seconds and tokens a second; decoding is counted from the first token on, the prompt up to it."""
    load = clock.loaded - clock.started
    if run.first_token is None or run.end is None:
        return {"load_s": load, "first_token_s": None, "prompt_s": None, "decode_s": None}
    prompt, decode = run.first_token - clock.prefill, run.end - run.first_token
    return {
        "load_s": load,
        "first_token_s": run.first_token - clock.started,
        "prompt_s": prompt,
        "decode_s": decode,
        "prompt_tokens_per_s": _rate(prompt_tokens, prompt),
        "decode_tokens_per_s": _rate(len(run.tokens) - 1, decode),
    }


def _stats(run: _Run, prompt_tokens: int, timing: dict[str, float | None]) -> str:
    """The report of --stats."""

    def speed(key: str) -> str:
        value = timing.get(key)
        return "-" if value is None else f"{value:.1f} tokens/s"

    rounds = [step for step in run.rounds if not step.from_prompt]
    lines = [
        f"prompt: {prompt_tokens} tokens, {speed('prompt_tokens_per_s')}",
        f"decode: {len(run.tokens)} tokens, {speed('decode_tokens_per_s')}",
        f"rounds: {len(rounds)}",
    ]
    if rounds:
        mean = sum(step.accepted for step in rounds) / len(rounds)
        drafted = sum(step.drafted for step in rounds) / len(rounds)
        lines.append(f"mean accepted: {mean:.2f} of {drafted:.2f} drafts a round")
    for depth in range(1, max((step.drafted for step in rounds), default=0) + 1):
        tried = [step for step in rounds if step.drafted >= depth]
        accepted = sum(step.accepted >= depth for step in tried)
        lines.append(f"  depth {depth}: {accepted}/{len(tried)} accepted ({accepted / len(tried):.0%})")
    return "\n".join(lines) + "\n"


def _progress(done: int, total: int) -> None:
    sys.stderr.write(f"\rloading layers: {done}/{total}" if done < total else "\r\x1b[K")
    sys.stderr.flush()


def _generate(options: argparse.Namespace) -> int:
    started = time.perf_counter()
    model = Path(options.model) if options.model else Path(str(resources.files("cuq1") / "assets" / "iquest-q1-nano"))
    progress = _progress if sys.stderr.isatty() else None
    with open_engine(model, options.device, progress=progress) as engine:
        tokenizer = Tokenizer.load(model, engine.vocab_size)
        loaded = time.perf_counter()
        request = _request(options, model, tokenizer)
        params = _params(options, engine.default_params)
        output = OutputStream(tokenizer, stops=options.stop, tools=request.tools, reasoning=request.in_reasoning)
        terminal = _Terminal() if sys.stdout.isatty() and not options.json else None
        run = _Run(output, options.json, params.stop_tokens, terminal=terminal)
        return _serve(engine, request, params, run, options, _Clock(started, loaded, time.perf_counter()))


def _serve(
    engine: Engine, request: _Request, params: DecodeParams, run: _Run, options: argparse.Namespace, clock: _Clock
) -> int:
    """Generate, and report as the options ask; returns the exit status."""
    status = 0
    engine.prefill(request.ids)
    stream = engine.decode(params)
    try:
        run.follow(stream)
    except KeyboardInterrupt:
        status = INTERRUPTED
    run.finish()
    timing = _timing(run, len(request.ids), clock)
    if options.json:
        message = run.output.message()
        result = {
            "prompt_tokens": len(request.ids),
            "token_ids": run.tokens,
            "text": run.output.text,
            "finish_reason": None if status else run.finish_reason(stream),
            "content": message.content,
            "reasoning": message.reasoning,
            "tool_calls": [call.to_openai() for call in message.tool_calls],
            "seed": stream.seed,
            "rounds": [
                {"drafted": step.drafted, "accepted": step.accepted} for step in run.rounds if not step.from_prompt
            ],
            "timing": timing,
        }
        sys.stdout.write(json.dumps(result, ensure_ascii=False) + "\n")
        sys.stdout.flush()
    if options.stats:
        sys.stderr.write(_stats(run, len(request.ids), timing))
    return status


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character must not end the answer
    return guarded("cuq1.generate", lambda: _generate(_arguments(argv)))


if __name__ == "__main__":
    sys.exit(main())

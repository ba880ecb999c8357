"""python -m cuq1.generate: generate text from a prompt, a chat line or a list of messages.

In a pipe, stdout is the generated text, exactly, in UTF-8. In a terminal, reasoning
is dimmed and tool calls are set out. --json prints one object instead. Bad input gives
one sentence on stderr and exit status 2; Ctrl-C gives what there is and 130.

--tp N on GPUs runs this program as N ranks (cuq1.parallel), each on a GPU of its own: rank 0
reads and prints, the others follow its engine.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from cuq1.answer import Answer, Clock, PlainWriter, TerminalWriter
from cuq1.cli import INTERRUPTED, Parser, guarded
from cuq1.cuda.driver import require_devices
from cuq1.description import Description
from cuq1.engine import Engine, check_qwen2, has_gpus, open_engine
from cuq1.errors import RequestError, TextError
from cuq1.parallel.rank import Part, as_rank, launched
from cuq1.sampling import MAX_DRAFTS, DecodeParams
from cuq1.sampling.params import check_draft, check_prompt
from cuq1.text import ChatTemplate, Tokenizer, check_tools
from cuq1.text.formats import CallFormat
from cuq1.text.jsontext import refuse_constant
from cuq1.text.output import OutputStream

DEFAULT_MAX_TOKENS = 1024


def _draft(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m cuq1.generate", description="Generate text with a local model.")
    parser.add_argument(
        "--model", metavar="PATH", help="checkpoint folder or .nanoqwen file (default: the bundled nano model)"
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="raw prompt; control tokens in it count")
    source.add_argument("--prompt-file", metavar="FILE", help="raw prompt from a UTF-8 file, - for stdin")
    source.add_argument("--chat", metavar="TEXT", help="one user message, through the chat template")
    source.add_argument("--messages", metavar="FILE", help="JSON list of messages, - for stdin")
    parser.add_argument("--tools", metavar="FILE", help="JSON list of tools that the model may call")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument(
        "--tp", type=int, metavar="N", help="GPUs that share the model (default: 1, or the ranks of cuq1-launch)"
    )
    parser.add_argument(
        "--activations",
        choices=["f16", "fp8"],
        default="f16",
        help="what enters the experts on the GPU: halves, or E4M3 with a scale a row",
    )
    parser.add_argument(
        "--loop",
        choices=["device", "host"],
        default="device",
        help="who launches rounds on the GPU: the device itself, or the host, for comparison",
    )
    parser.add_argument(
        "--context", type=int, metavar="N", help="tokens of prompt and answer at the most (default: the model's)"
    )
    parser.add_argument("--max-tokens", type=int, default=DEFAULT_MAX_TOKENS, metavar="N", help="default: %(default)s")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (default: the checkpoint's)")
    parser.add_argument("--top-k", type=int, metavar="K", help="0 for no limit (default: the checkpoint's)")
    parser.add_argument("--top-p", type=float, metavar="P", help="in (0, 1] (default: the checkpoint's)")
    parser.add_argument("--seed", type=int, metavar="S", help="same seed, same output (default: a fresh one)")
    parser.add_argument(
        "--draft", type=_draft, default="auto", metavar="D", help=f"auto, off or 1 to {MAX_DRAFTS} drafts a round"
    )
    parser.add_argument("--stop", action="extend", nargs="+", default=[], metavar="S", help="stop strings")
    parser.add_argument("--no-thinking", action="store_true", help="in a chat, answer without reasoning first")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.add_argument("--stats", action="store_true", help="print speed and acceptance on stderr")
    options = parser.parse_args(argv)
    if options.chat is None and options.messages is None:
        for name in ("tools", "no_thinking"):
            if getattr(options, name):
                option = name.replace("_", "-")
                raise RequestError(f"--{option} needs --chat or --messages: a raw prompt goes through no template")
    if options.messages == "-" and options.tools == "-":
        raise RequestError("--messages and --tools cannot both be stdin: put one into a file")
    return options


def _read_text(name: str) -> str:
    where = "stdin" if name == "-" else name
    try:
        if name != "-":
            data = Path(name).read_bytes()
        elif sys.stdin is not None:
            data = sys.stdin.buffer.read()
        else:
            raise TextError("stdin is closed: pipe the text in, or name a file")
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TextError(f"{where} is not UTF-8 (byte {error.start}): convert it first") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise TextError(f"{where} cannot be read ({reason}): name a readable file") from None


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is beyond the range of a number")
    return value


def _read_json(name: str) -> Any:
    text = _read_text(name)
    try:
        return json.loads(text.removeprefix("\ufeff"), parse_constant=refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        where = "stdin" if name == "-" else name
        raise TextError(f"{where} is not valid JSON ({error}): correct it") from None


@dataclass
class _Request:
    """What to feed the engine, and how to read what comes back."""

    ids: list[int]
    in_reasoning: bool = False
    tools: list[dict[str, Any]] | None = None
    calls: CallFormat | None = None


def _request(options: argparse.Namespace, model: Description, tokenizer: Tokenizer) -> _Request:
    if options.prompt is not None or options.prompt_file is not None:
        text = options.prompt if options.prompt is not None else _read_text(options.prompt_file)
        return _Request(tokenizer.encode(text, control=True))
    messages = [{"role": "user", "content": options.chat}] if options.chat is not None else _read_json(options.messages)
    tools = check_tools(_read_json(options.tools)) if options.tools is not None else None
    template = ChatTemplate.load(model.text, tokenizer)
    prompt = template.prompt(messages, tools=tools, enable_thinking=not options.no_thinking)
    return _Request(prompt.ids, prompt.in_reasoning, tools, template.calls)


def _params(options: argparse.Namespace, defaults: DecodeParams) -> DecodeParams:
    given = {name: getattr(options, name) for name in ("temperature", "top_k", "top_p", "seed")}
    return replace(
        defaults,
        max_tokens=options.max_tokens,
        draft=options.draft,
        **{name: value for name, value in given.items() if value is not None},
    )


def _progress(done: int, total: int) -> None:
    sys.stderr.write(f"\rloading layers: {done}/{total}" if done < total else "\r\x1b[K")
    sys.stderr.flush()


def _model(options: argparse.Namespace) -> Description:
    nano = Path(str(resources.files("cuq1") / "assets" / "iquest-q1-nano"))
    return Description.open(nano if options.model is None else Path(options.model))


def _context(options: argparse.Namespace, model: Description) -> int:
    if options.context is not None and not 1 <= options.context <= model.context:
        raise RequestError(f"--context must be from 1 to the model's {model.context}, not {options.context}")
    return model.context if options.context is None else int(options.context)


def _engine(options: argparse.Namespace, model: Description, part: Part | None) -> Engine:
    progress = _progress if sys.stderr.isatty() else None
    return open_engine(
        model.source,
        options.device,
        options.tp,
        progress=progress,
        activations=options.activations,
        loop=options.loop,
        meeting=None if part is None else part.meeting,
        context=options.context,
    )


def _generate(options: argparse.Namespace, model: Description, part: Part | None, started: float) -> int:
    """Everything that can be refused is checked before the weights are read, and before other ranks start."""
    params = _params(options, DecodeParams(**vars(model.sampling)))
    check_draft(params.draft, model.max_drafts)
    tokenizer = Tokenizer.load(model.text, model.vocab_size)
    request = _request(options, model, tokenizer)
    ids = check_prompt(request.ids, model.vocab_size, _context(options, model), room=1)
    output = OutputStream(
        tokenizer, stops=options.stop, tools=request.tools, reasoning=request.in_reasoning, calls=request.calls
    )
    if model.unapplied:
        sys.stderr.write(
            f"cuq1.generate: not applied, though the checkpoint asks for it: {', '.join(model.unapplied)}\n"
        )
    writer = None if options.json else TerminalWriter() if sys.stdout.isatty() else PlainWriter()
    if part is not None and options.device == "cuda" and options.tp > 1:
        require_devices(options.tp)
        part.begin()
    with _engine(options, model, part) as engine:
        loaded = time.perf_counter()
        answer = Answer(len(ids), output, params.stop_tokens, writer, Clock(started, loaded, loaded))
        return _answer(engine, ids, params, answer, options)


def _answer(engine: Engine, ids: list[int], params: DecodeParams, answer: Answer, options: argparse.Namespace) -> int:
    """Generate, and report as the options ask, also after Ctrl-C; returns the exit status."""
    status = 0
    try:
        engine.prefill(ids)
        answer.follow(engine.decode(params))
    except KeyboardInterrupt:
        status = INTERRUPTED
    answer.end()
    if options.json:
        sys.stdout.write(json.dumps(answer.as_json(), ensure_ascii=False) + "\n")
        sys.stdout.flush()
    if options.stats:
        sys.stderr.write(answer.statistics())
    return status


def _run(argv: Sequence[str] | None, part: Part | None) -> int:
    started = time.perf_counter()
    options = _arguments(argv)
    model = _model(options)
    options.tp, options.device = _ranks(options, model, part)
    if part is None and options.tp > 1 and options.device == "cuda":
        return _launch(options, sys.argv[1:] if argv is None else argv)
    if part is not None and not part.channel.leads:
        with _engine(options, model, part):
            raise AssertionError("a rank that follows has no engine to call")
    if isinstance(sys.stdout, TextIOWrapper):
        if sys.stdout.isatty():
            sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character must not end the answer
        else:
            sys.stdout.reconfigure(encoding="utf-8", newline="\n")
    return _generate(options, model, part, started)


def _ranks(options: argparse.Namespace, model: Description, part: Part | None) -> tuple[int, str]:
    """How many ranks share the model, and on what: several are on GPUs where there are any."""
    world = 1 if part is None else part.meeting.world
    tp = world if options.tp is None else options.tp
    if tp < 1:
        raise RequestError(f"--tp must be at least 1, not {tp}")
    if model.is_qwen2:
        check_qwen2(tp, options.activations)
        return 1, options.device
    model.check_ranks(tp)
    if options.device == "cpu" or tp == world == 1:
        return tp, options.device
    if part is not None and tp != world:
        raise RequestError(f"--tp {tp} does not go with {world} ranks of cuq1-launch: leave it out")
    return tp, "cuda" if options.device == "cuda" or has_gpus(tp) else "cpu"


def _launch(options: argparse.Namespace, argv: Sequence[str]) -> int:
    """This program once more, as a rank for each GPU; what their launcher can refuse, it does."""
    from cuq1.parallel.launch import Launch  # noqa: PLC0415  (few need it)

    return Launch([sys.executable, "-m", "cuq1.generate", *argv], options.tp, program="cuq1.generate").run()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    if launched():
        return guarded("cuq1.generate", lambda: as_rank(lambda part: _run(argv, part)))
    return guarded("cuq1.generate", lambda: _run(argv, None))


if __name__ == "__main__":
    sys.exit(main())

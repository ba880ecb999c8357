"""One answer as it arrives: shown, timed and summed up for the command line."""

import sys
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from cuq1.sampling import DecodeStream, Round
from cuq1.text import Delta
from cuq1.text.output import OutputStream


class Writer(Protocol):
    """Shows an answer's pieces."""

    def write(self, text: str, deltas: list[Delta]) -> None:
        """Show what one token settled: its text, and the same parsed."""

    def end(self) -> None:
        """The answer is complete."""


class PlainWriter:
    """Writes the text, exactly."""

    def write(self, text: str, deltas: list[Delta]) -> None:
        if text:
            sys.stdout.write(text)
            sys.stdout.flush()

    def end(self) -> None:
        pass


class TerminalWriter:
    """Writes for a person: reasoning dimmed, tool calls set out."""

    def __init__(self) -> None:
        self._kind = ""

    def write(self, text: str, deltas: list[Delta]) -> None:
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

    def end(self) -> None:
        sys.stdout.write("\n")
        sys.stdout.flush()


@dataclass
class Clock:
    """Readings of the performance counter: the program's start, the model loaded, the prompt's start."""

    started: float
    loaded: float
    prompt: float


@dataclass
class Answer:
    """Tokens, rounds and clock readings of one request, shown through `writer` where there is one."""

    prompt_tokens: int
    output: OutputStream
    stop_tokens: tuple[int, ...]
    writer: Writer | None
    clock: Clock
    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    seed: int | None = None
    finish_reason: str | None = None
    first_token: float | None = None
    last_token: float | None = None

    def follow(self, stream: DecodeStream) -> None:
        """Take the request's rounds until it ends; what Ctrl-C leaves is kept."""
        self.seed = stream.seed
        for step in stream:
            self.last_token = time.perf_counter()
            self.first_token = self.first_token or self.last_token
            self.rounds.append(step)
            if not self._take(step):
                break
        self.finish_reason = "stop_string" if self.output.stopped is not None else stream.finish_reason

    def _take(self, step: Round) -> bool:
        """Show a round's tokens; False where a stop string ended the answer."""
        for token in step:
            self.tokens.append(token)
            if token not in self.stop_tokens:  # a stop token comes last, and is no text
                self._show(*self.output.feed(token))
            if self.output.stopped is not None:
                return False
        return True

    def end(self) -> None:
        """Show what was held back."""
        self._show(*self.output.finish())
        if self.writer is not None:
            self.writer.end()
        if self.finish_reason == "stop" and self.output.message().tool_calls:
            self.finish_reason = "tool_calls"

    def _show(self, text: str, deltas: list[Delta]) -> None:
        if self.writer is not None:
            self.writer.write(text, deltas)

    def timing(self) -> dict[str, float | None]:
        """Seconds and tokens a second; decoding is counted from the first token on, the prompt up to it."""
        clock = self.clock
        times: dict[str, float | None] = {"load_s": clock.loaded - clock.started}
        if self.first_token is None or self.last_token is None:
            return times | {"first_token_s": None, "prompt_s": None, "decode_s": None}
        prompt, decode = self.first_token - clock.prompt, self.last_token - self.first_token
        return times | {
            "first_token_s": self.first_token - clock.started,
            "prompt_s": prompt,
            "decode_s": decode,
            "prompt_tokens_per_s": _rate(self.prompt_tokens, prompt),
            "decode_tokens_per_s": _rate(len(self.tokens) - 1, decode),
        }

    def as_json(self) -> dict[str, Any]:
        """The object that --json prints."""
        message = self.output.message()
        return {
            "prompt_tokens": self.prompt_tokens,
            "token_ids": self.tokens,
            "text": self.output.text,
            "finish_reason": self.finish_reason,
            "content": message.content,
            "reasoning": message.reasoning,
            "tool_calls": [call.to_openai() for call in message.tool_calls],
            "seed": self.seed,
            "rounds": [{"drafted": step.drafted, "accepted": step.accepted} for step in self._speculative()],
            "timing": self.timing(),
        }

    def statistics(self) -> str:
        """The report of --stats, a line each."""
        timing, rounds = self.timing(), self._speculative()
        lines = [
            f"prompt: {self.prompt_tokens} tokens, {_speed(timing.get('prompt_tokens_per_s'))}",
            f"decode: {len(self.tokens)} tokens, {_speed(timing.get('decode_tokens_per_s'))}",
            f"rounds: {len(rounds)}",
        ]
        drafted = sum(step.drafted for step in rounds)
        if drafted:
            mean = sum(step.accepted for step in rounds) / len(rounds)
            lines.append(f"mean accepted: {mean:.2f} of {drafted / len(rounds):.2f} drafts a round")
        for depth in range(1, max((step.drafted for step in rounds), default=0) + 1):
            tried = [step for step in rounds if step.drafted >= depth]
            accepted = sum(step.accepted >= depth for step in tried)
            lines.append(f"  depth {depth}: {accepted}/{len(tried)} accepted ({accepted / len(tried):.0%})")
        return "\n".join(lines) + "\n"

    def _speculative(self) -> list[Round]:
        """The rounds that verified drafts, or would have: all but the prompt's own token."""
        return [step for step in self.rounds if not step.from_prompt]


def _rate(tokens: int, seconds: float) -> float | None:
    return tokens / seconds if seconds > 0 else None


def _speed(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} tokens/s"

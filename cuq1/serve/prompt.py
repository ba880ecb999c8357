"""A prompt on the engine, in steps: between two of them is seen whether anybody still wants the answer."""

import time
from collections.abc import Callable, Sequence

from cuq1.engine import Engine
from cuq1.serve.failures import engine_calls
from cuq1.serve.request import Generation

STEP = 256  # tokens of a prompt between two looks at whether anybody still wants the answer, at first
STEP_SECONDS = 0.2  # what they should take: steps grow until they do
MAX_STEP = 16 * STEP
WORTH = 128  # tokens: less is computed sooner than it is brought back


class PromptSteps:
    """Computes prompts, in steps as long as this engine's speed allows."""

    def __init__(self) -> None:
        self._step = STEP

    def run(
        self, engine: Engine, generation: Generation, begun: Callable[[int], None], wanted: Callable[[], bool]
    ) -> bool:
        """Make the prompt the engine's sequence; False where it was not wanted any more on the way.

        begun: told how many tokens were held, once. What the next turn begins with is remembered, and so is the first
        message: other conversations of the same agent begin with it. Raises as `engine_calls`.
        """
        ids = generation.prompt.ids
        first = _first_message(ids, generation.params.stop_tokens)
        with engine_calls():
            done, started = engine.held(ids), False
            while wanted():
                end = min(len(ids), done + self._step)
                if done < first < end:
                    end = first
                at = time.monotonic()
                kept = engine.prefill(ids[:end])
                if not started:
                    begun(kept)
                    started = True
                self._pace(end - max(kept, done), time.monotonic() - at)
                if end in (first, len(ids)):
                    engine.remember(generation.hint, turn=end == len(ids))
                if end == len(ids):
                    return True
                done = end
        return False

    def _pace(self, tokens: int, seconds: float) -> None:
        """Longer steps where they are quick, shorter ones where they are not; always in whole chunks."""
        if tokens < self._step:
            return
        if seconds < STEP_SECONDS / 2:
            self._step = min(2 * self._step, MAX_STEP)
        elif seconds > 2 * STEP_SECONDS:
            self._step = max(self._step // 2, STEP)


def _first_message(ids: Sequence[int], ends: Sequence[int]) -> int:
    """Where a prompt's first message ends; 0 where that is nothing to come back to."""
    places = [ids.index(token) + 1 for token in ends if token in ids]
    first = min(places, default=0)
    return first if WORTH <= first < len(ids) - WORTH else 0

"""Put the exchange among ranks to the test: sums that every rank has bit for bit, and failures that are told.

    python -m tools.check_exchange [--exchanges 1000000] [--ranks 2] [--sanitizer memcheck] [--log] [CHECK ...]

Starts its ranks itself, a GPU each, or several on one where there are fewer. Every check prints a JSON line; rows of
the same go to tools/benchlog/exchange.jsonl with --log. Exchanges have 1 to 8 rows of 3072 columns, drawn; blocks and
ranks pause at random; graphs of several lengths take turns; the GPU compares the bits of every sum with those of a sum
that the host took in the order of ranks, and counts what it compared.

many: that, for --exchanges. places: a tenth of them with two places on each rank. cancelling: likewise, of words whose
sum another order changes. infinite, nan: an error that is reported, and no wait for what has come. skipped: a place
leaves out a block's words once; all name it, and the buffer, within the limit. damaged, never, late, order, isnan:
broken variants, which have to be noticed: a bit of a sum that is expected, no re-arming, re-arming an exchange too
late, addition in another order, and a sentinel that is any NaN.

Where a GPU has no native atomics on host memory, memcheck calls the report of a fault an error: for it the default is
those checks that end without one.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuq1.cli import Parser, guarded
from cuq1.cuda.abi import INBOXES, constant
from cuq1.parallel import Rendezvous
from cuq1.parallel.rendezvous import RANK
from cuq1.plan.dims import ROWS
from tools.bench import append_row, at_least_one
from tools.exchange_probe import Probe, Setting, dims, in_order, open_rank, partials, rows_of, start

COLUMNS = dims(2).hidden
NOT_FINITE, PEER = constant("FAULT_NOT_FINITE"), constant("FAULT_PEER")
SHORT_MS = 300  # the limit of waits that are to run out
SECONDS = 5.0  # for a wait of the usual limit to have ended everywhere

SUMMED = """    float4 total = part[0];
#pragma unroll
    for (int r = 1; r < RANKS; ++r) total = added(total, part[r]);
"""
ANY_ORDER = """    const int first = int(clock64() >> 4 & 0xffff) % RANKS;
    float4 total = part[first];
    for (int r = 1; r < RANKS; ++r) total = added(total, part[(first + r) % RANKS]);
"""
HAS_COME = "if (!has_come(part[r])) missing = r;"
IS_NUMBER = HAS_COME.replace(
    "!has_come(part[r])",
    "part[r].x != part[r].x || part[r].y != part[r].y || part[r].z != part[r].z || part[r].w != part[r].w",
)

Found = dict[str, Any]


@dataclass
class Rank:
    """What a check is given."""

    meeting: Rendezvous
    exchanges: int
    seed: int

    @property
    def two(self) -> int:
        """Places: one on each rank, at least two."""
        return max(2, self.meeting.world)

    @property
    def four(self) -> int:
        """As many again: a sum of two is the same in any order."""
        return min(2 * self.two, 8)

    def setting(self, exchanges: int, places: int, kind: str = "all", patterns: int = 16, **more: Any) -> Setting:
        values = partials(kind, patterns, places, COLUMNS, np.random.default_rng(self.seed))
        return Setting(exchanges, values, in_order(values), seed=self.seed, **more)

    def run(self, setting: Setting) -> list[Found]:
        """What every rank found, on all of them."""
        with Probe(self.meeting, setting) as probe:
            return self.share(probe.run())

    def share(self, found: Found) -> list[Found]:
        return [json.loads(one) for one in self.meeting.gather("found", json.dumps(found).encode())]


def right(rank: Rank, setting: Setting) -> Found:
    """A run that has to be right."""
    found = rank.run(setting)
    exchanges = found[0]["launched"]
    rows = rows_of(exchanges, setting.seed)
    words = int(rows.sum()) * COLUMNS * (setting.places // rank.meeting.world)
    wrong = sum(one["wrong"] for one in found)
    faults = [one["fault"] for one in found if one["fault"]]
    bad = wrong or faults or any(one["compared"] != words or one["done"] != exchanges for one in found)
    first = next(
        ({name: one[name] for name in ("exchange", "place", "row", "column")} for one in found if one["wrong"]), None
    )
    return {
        "places": setting.places,
        "exchanges": exchanges,
        "rows": np.bincount(rows, minlength=ROWS + 1)[1:].tolist(),
        "words": words * rank.meeting.world,
        "wrong": wrong,
        "first": first,
        "faults": faults,
        "us": round(max(one["seconds"] for one in found) / exchanges * 1e6, 2),
        "failed": int(bool(bad)),
    }


def noticed(rank: Rank, setting: Setting) -> Found:
    """A broken run, which must not pass."""
    found = rank.run(setting)
    seen = [bool(one["wrong"] or one["what"]) for one in found]
    return {
        "places": setting.places,
        "launched": found[0]["launched"],
        "wrong": sum(one["wrong"] for one in found),
        "faults": [one["fault"] for one in found if one["fault"]],
        "failed": int(not any(seen)),
    }


def many(rank: Rank) -> Found:
    return right(rank, rank.setting(rank.exchanges, rank.two))


def places(rank: Rank) -> Found:
    return right(rank, rank.setting(max(rank.exchanges // 10, 300), rank.four, patterns=8))


def cancelling(rank: Rank) -> Found:
    return right(rank, rank.setting(max(rank.exchanges // 10, 300), rank.four, "cancelling", patterns=8))


def infinite(rank: Rank) -> Found:
    """Infinities of opposite signs on two places, in one word."""
    setting = rank.setting(3, rank.two, "plain", 1, graphs=(3,))
    setting.values[0, 0, 0, 17], setting.values[0, 1, 0, 17] = np.inf, -np.inf
    return reported(rank, setting)


def nan(rank: Rank) -> Found:
    """NaNs that a kernel computed, one of them with the sentinel's bits: they arrive, and are an error."""
    setting = rank.setting(1, rank.two, "plain", 1, graphs=(1,))
    bits = np.array([0xFFFFFFFF, 0x7FC00001, 0xFFFFFFFE], np.uint32)
    setting.values.view(np.uint32)[0, 1, 0, :3] = bits
    stored = [0xFFFFFFFE, 0x7FC00001, 0xFFFFFFFE]
    return reported(rank, setting, stored)


def reported(rank: Rank, setting: Setting, stored: Sequence[int] = ()) -> Found:
    """Every rank reports a numerical error, at once; and has these words of place 1 in its inbox."""
    setting.sums = in_order(setting.values)
    with Probe(rank.meeting, setting) as probe:
        found = rank.share(probe.run() | {"words": probe.words()[0, 0, 1, 0, : len(stored)].tolist()})
    bad = any(one["what"] != NOT_FINITE or one["seconds"] > 1 or one["words"] != list(stored) for one in found)
    return {
        "faults": [one["fault"] for one in found],
        "words": found[0]["words"],
        "failed": int(bad or wrong_words(found)),
    }


def wrong_words(found: Sequence[Found]) -> bool:
    """Whether a sum that is a number was wrong: a NaN is as good as another."""
    return any(one["wrong"] for one in found)


def skipped(rank: Rank) -> Found:
    """The last place skips a block's words once: every rank names it, and the buffer, within the usual limit."""
    number, place = 301, rank.two - 1
    found = rank.run(rank.setting(3000, rank.two, skipped=(number, place)))
    bad = any(
        (one["what"], one["blamed"], one["at"]) != (PEER, place, number)
        or f"(buffer {number % INBOXES})" not in one["fault"]
        or one["seconds"] > SECONDS
        for one in found
    )
    seconds = max(one["seconds"] for one in found)
    return {"faults": [one["fault"] for one in found], "seconds": round(seconds, 2), "failed": int(bad)}


def damaged(rank: Rank) -> Found:
    """A bit of one sum that is expected."""
    setting = rank.setting(3000, rank.two)
    setting.sums = setting.sums.copy()
    setting.sums.view(np.uint32)[3, 0, COLUMNS - 1] ^= 1
    return noticed(rank, setting)


def never(rank: Rank) -> Found:
    return noticed(rank, rank.setting(3000, rank.two, behind=0, timeout_ms=SHORT_MS))


def late(rank: Rank) -> Found:
    """One exchange later, or two where a single process's launches keep places in step."""
    behind = 2 if rank.meeting.world > 1 else INBOXES
    return noticed(rank, rank.setting(3000, rank.two, behind=behind, pause=8000, timeout_ms=SHORT_MS))


def order(rank: Rank) -> Found:
    return noticed(rank, rank.setting(3000, rank.four, "cancelling", 8, patch=(SUMMED, ANY_ORDER)))


def isnan(rank: Rank) -> Found:
    """With such a sentinel, a computed NaN has never come: it is waited for, and called missing."""
    setting = rank.setting(3, rank.two, "plain", 1, timeout_ms=SHORT_MS, patch=(HAS_COME, IS_NUMBER), graphs=(3,))
    setting.values[0, 1, 0, 5] = np.nan
    setting.sums = in_order(setting.values)
    found = rank.run(setting)
    bad = any(one["what"] != PEER for one in found)
    return {"faults": [one["fault"] for one in found], "failed": int(bad)}


CHECKS: dict[str, Callable[[Rank], Found]] = {
    one.__name__: one for one in (many, places, cancelling, infinite, nan, skipped, damaged, never, late, order, isnan)
}
QUIET = ("many", "places", "cancelling", "damaged", "order")  # nothing is reported


def _seed(text: str) -> int:
    value = int(text)
    if not 0 <= value < 1 << 32:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to {(1 << 32) - 1}")
    return value


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="check_exchange", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=f"of {', '.join(CHECKS)}; by default all")
    parser.add_argument("--exchanges", type=at_least_one, default=1_000_000, metavar="N")
    parser.add_argument("--ranks", type=int, choices=(1, 2, 4, 8), default=2)
    parser.add_argument("--seed", type=_seed, default=1)
    parser.add_argument("--sanitizer", choices=("memcheck", "racecheck", "initcheck", "synccheck"))
    parser.add_argument("--log", action="store_true", help="append rows to tools/benchlog/exchange.jsonl")
    options = parser.parse_args(argv)
    unknown = [name for name in options.checks if name not in CHECKS]
    if unknown:
        parser.error(f"{unknown[0]!r} is no check: choose of {', '.join(CHECKS)}")
    return options


def _rank(options: argparse.Namespace) -> int:
    failed = 0
    with Rendezvous() as meeting:
        device = open_rank(meeting)
        for name in options.checks or (QUIET if options.sanitizer == "memcheck" else CHECKS):
            found = CHECKS[name](Rank(meeting, options.exchanges, options.seed))
            failed += found["failed"]
            if meeting.rank == 0:
                row = {"check": name, "ranks": meeting.world, "device": device, **found}
                print(json.dumps(row), flush=True)
                if options.log:
                    append_row("exchange", row)
    return int(failed > 0)


def _run(argv: Sequence[str]) -> int:
    options = _options(argv)
    if RANK in os.environ:
        return _rank(options)
    tool = options.sanitizer
    prefix = () if tool is None else ("compute-sanitizer", "--tool", tool, "--error-exitcode", "9")
    return start("tools.check_exchange", options.ranks, argv, prefix)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return guarded("check_exchange", lambda: _run(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    sys.exit(main())

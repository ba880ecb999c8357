"""Qualify a machine's NVLink multicast for the exchange among ranks: held against peer push, bit by bit.

    python -m tools.check_multicast --yes-use-multicast [--ranks 8] [--exchanges 3000] [--log] [CHECK ...]

Starts its ranks itself, a GPU each, and prints a JSON line for each check; the last one says whether all passed, as
does the exit status (0, else 1; 2 where multicast cannot be used here). MULTICAST OBJECTS ARE MADE ON THE GPUS OF THIS
MACHINE, which nothing else of cuq1 does: run it where nobody else needs them, and where you may reset them.
--peer-loads makes none: kernels load each rank's memory in the switch's place, which tests this tool and the kernels'
logic, not the switch; `time` says nothing then.

Each exchange has 1 to 8 rows of 3072 columns; ranks pause at random. Both paths get the same partials. Of each kind of
numbers (plain, whole, cancelling, subnormal, zeros, largest) the sums are compared:

    among_ranks  every rank's sums and norms have to have the same bits.
    from_push    sums that have other bits than the push path's, which adds in the order of ranks, in FP32. None may
                 where two ranks exchange; of more ranks, none of whole numbers, whose sums are exact in any order. The
                 order in which a switch adds is its own, and its precision is not documented.
    beyond       sums that are further from the sum in FP64 than additions in FP32, in the worst order, can be: none.
                 Of `largest`, not with more than two ranks: sums may overflow on the way in another order than push's.

norms: what follows a sum, against the push path's. nan, infinite: an error on all ranks, at once, with nobody waiting.
skipped: a rank does not send; the others name it within the limit, and a new start works. damaged: one other bit in
what rank 0 pushes, which must be noticed. time: microseconds from exchange to exchange in a graph.
"""

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuq1.cli import Parser, guarded
from cuq1.cuda.abi import constant
from cuq1.errors import DeviceError, RequestError
from cuq1.parallel import Rendezvous, topology
from cuq1.parallel.multicast import switched_off, wanted
from cuq1.parallel.rendezvous import RANK
from cuq1.plan.dims import ROWS
from tools.bench import append_row, at_least_one
from tools.exchange_probe import open_rank, partials, rows_of, start
from tools.multicast_paths import BATCH, PATTERNS, PUSH, SWITCH, Paths, Result

Found = dict[str, Any]
Floats = NDArray[np.float32]

NOT_FINITE, PEER = constant("FAULT_NOT_FINITE"), constant("FAULT_PEER")
KINDS = ("plain", "whole", "cancelling", "subnormal", "zeros", "largest")
SECONDS = 5.0  # for a wait of the usual limit to have ended everywhere
PAUSE = 20_000  # nanoseconds at most, before half of the sends


def numbers(kind: str, places: int, columns: int, rng: np.random.Generator) -> Floats:
    """[PATTERNS, places, ROWS, columns]: as exchange_probe.partials, or `whole` numbers, or normally distributed."""
    shape = (PATTERNS, places, ROWS, columns)
    if kind == "whole":
        return rng.integers(-(2**20), 2**20, shape).astype(np.float32)
    if kind == "normal":
        return rng.standard_normal(shape, np.float32)
    return partials(kind, PATTERNS, places, columns, rng)


def judged(kind: str, values: Floats, switch: Floats, push: Floats) -> Found:
    """Sums [rows, columns] of values [places, rows, columns], as the two paths have them."""
    places = len(values)
    differ = switch.view(np.uint32) != push.view(np.uint32)
    wide = values.astype(np.float64)
    with np.errstate(invalid="ignore"):
        error = np.abs(switch - wide.sum(axis=0))
    # places - 1 roundings, of numbers no larger than the sum of all magnitudes, by half an ulp each
    beyond = ~(error <= (places - 1) * (2.0**-24 * np.abs(wide).sum(axis=0) + 2.0**-150))
    if kind == "largest" and places > 2:
        beyond[:] = False
    strict = places == 2 or kind == "whole"
    failed = beyond.any() or (strict and differ.any())
    return {"from_push": int(differ.sum()), "beyond": int(beyond.sum()), "failed": int(failed)}


def apart(switch: NDArray[Any], push: NDArray[Any], tolerance: float) -> bool:
    """Whether results differ by more than the roundings of a sum do."""
    wanted_ = push.astype(np.float64)
    return not np.linalg.norm(switch - wanted_) <= tolerance * np.linalg.norm(wanted_)


class Rank:
    """A rank's part in the checks, which all ranks run together."""

    def __init__(self, meeting: Rendezvous, paths: Paths, exchanges: int, seed: int) -> None:
        self.meeting, self.paths, self.exchanges, self.seed = meeting, paths, exchanges, seed

    def share(self, found: Found) -> list[Found]:
        return [json.loads(one) for one in self.meeting.gather("found", json.dumps(found).encode())]

    def values(self, kind: str) -> Floats:
        return numbers(kind, self.meeting.world, self.paths.dims.hidden, np.random.default_rng(self.seed))

    def pauses(self, first: int) -> NDArray[np.int64]:
        """Of a batch: this rank's own, and for half of the exchanges of all ranks none."""
        own = np.random.default_rng([self.seed, first, self.meeting.rank]).integers(0, PAUSE, BATCH)
        return np.asarray(own * np.random.default_rng([self.seed, first]).integers(0, 2, BATCH))

    def compare(self, kind: str, *, norms: bool = False, pushed: Floats | None = None) -> Found:
        """Exchanges of one kind by both paths. pushed: what is pushed instead."""
        values = self.values(kind)
        # The norm of the largest numbers is an error, by both paths: there, nobody is told.
        self.paths.set_norms(norms, faults=kind != "largest")
        total: Found = {"sums": 0, "from_push": 0, "beyond": 0, "failed": 0}
        bits, first = hashlib.sha256(), 0
        faults: list[str] = []
        while first < self.exchanges and not faults:
            counts = rows_of(first + BATCH, self.seed)[first:]
            found = []
            for path, given in ((SWITCH, values), (PUSH, values if pushed is None else pushed)):
                self.paths.load(given)
                found.append(self.paths.run(path, counts, self.pauses(first)))
            faults = self.all_faults(found)
            for number, count in enumerate(counts):
                switch, push = ((one.residual[number, :count], one.normed[number, :count]) for one in found)
                for one in switch:
                    bits.update(one.tobytes())
                if norms:
                    total["failed"] += apart(switch[0], push[0], 1e-5) or apart(switch[1], push[1], 1e-3)
                    continue
                total["sums"] += int(switch[0].size)
                for name, n in judged(kind, values[number % PATTERNS, :, :count], switch[0], push[0]).items():
                    total[name] += n
            first += BATCH
        ranks = self.share(total | {"bits": bits.hexdigest()})
        total = {name: sum(one[name] for one in ranks) for name in total}
        among = len({one["bits"] for one in ranks}) - 1
        failed = int(bool(total.pop("failed") or among or faults))
        return {"exchanges": first, **total, "among_ranks": among, "faults": faults, "failed": failed}

    def all_faults(self, found: Sequence[Result]) -> list[str]:
        """Of all ranks, so that all go on, or none."""
        own = [one.fault for one in found if one.fault is not None]
        return [one for rank in self.share({"faults": own}) for one in rank["faults"]]

    def norms(self) -> Found:
        return self.compare("normal", norms=True)

    def damaged(self) -> Found:
        pushed = self.values("whole")
        pushed[1, 0, 0, 5] += 1
        found = self.compare("whole", pushed=pushed)
        return {"from_push": found["from_push"], "failed": int(found["from_push"] == 0 or bool(found["faults"]))}

    def once(self, values: Floats, exchanges: int, skip: int | None = None) -> list[Found]:
        """A few exchanges of 8 rows through the switch, and a reset: what each rank was told."""
        self.paths.load(values)
        self.paths.set_norms(False)
        counts, pauses = np.full(exchanges, ROWS), np.zeros(exchanges, np.int64)
        found = self.share(self.paths.run(SWITCH, counts, pauses, skip).told())
        self.paths.reset()
        return found

    def reported(self, *words: float) -> Found:
        """Words of the first ranks that are not finite, or do not add up to what is."""
        values = np.ones_like(self.values("whole"))
        values[:, : len(words), 2, 77] = words
        found = self.once(values, 1)
        bad = any(one["what"] != NOT_FINITE or one["seconds"] > 1 for one in found)
        return {"faults": [one["fault"] for one in found], "failed": int(bad)}

    def skipped(self) -> Found:
        last, at = self.meeting.world - 1, 4
        values = self.values("normal")
        found = self.once(values, at + 1, at if self.meeting.rank == last else None)
        again = self.once(values, at + 1)
        seconds = max(one["seconds"] for one in found)
        bad = any((one["what"], one["blamed"], one["at"]) != (PEER, last, at) for one in found)
        bad = bad or seconds > SECONDS or any(one["what"] for one in again)
        return {"faults": [one["fault"] for one in found], "seconds": round(seconds, 2), "failed": int(bad)}

    def time(self) -> Found:
        self.paths.load(self.values("normal"))
        self.paths.set_norms(True)
        us = {path: [round(one, 3) for one in self.paths.period(path)] for path in (SWITCH, PUSH)}
        return {"us": us, "failed": 0}


CHECKS: dict[str, Callable[[Rank], Found]] = {
    **{kind: partial(Rank.compare, kind=kind) for kind in KINDS},
    "norms": Rank.norms,
    "nan": lambda rank: rank.reported(np.nan),
    "infinite": lambda rank: rank.reported(np.inf, -np.inf),
    "skipped": Rank.skipped,
    "damaged": Rank.damaged,
    "time": Rank.time,
}


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="check_multicast", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=f"of {', '.join(CHECKS)}; all by default")
    parser.add_argument(
        "--yes-use-multicast", action="store_true", help="make multicast objects on this machine's GPUs"
    )
    parser.add_argument("--peer-loads", action="store_true", help="make none, and load each rank's memory instead")
    parser.add_argument("--ranks", type=int, choices=range(2, 9), default=2, metavar="N", help="2 to 8")
    parser.add_argument("--exchanges", type=at_least_one, default=3000, metavar="N", help="of each kind of numbers")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log", action="store_true", help="append rows to tools/benchlog/multicast.jsonl")
    options = parser.parse_args(argv)
    unknown = [name for name in options.checks if name not in CHECKS]
    if unknown:
        parser.error(f"{unknown[0]!r} is no check: choose of {', '.join(CHECKS)}")
    return options


def _refuse(options: argparse.Namespace) -> None:
    """Raises, before any rank is started, where multicast was not asked for or cannot be had."""
    if not options.yes_use_multicast:
        raise RequestError(
            "this makes multicast objects on the GPUs of this machine: say --yes-use-multicast on one whose GPUs "
            "nobody else needs and that you may reset, or use --peer-loads"
        )
    off = switched_off()
    if off is not None:
        raise DeviceError(off)
    gpus = topology.read().gpus
    if len(gpus) < options.ranks:
        raise DeviceError(f"{options.ranks} ranks need a GPU each, and {len(gpus)} are visible: give --ranks")
    for one in gpus[: options.ranks]:
        if not one.multicast:
            raise DeviceError(f"GPU {one.ordinal} ({one.name}, {one.bus}) has no NVLink multicast: use --peer-loads")


def _rank(options: argparse.Namespace) -> int:
    failed: list[str] = []
    with Rendezvous() as meeting:
        device = open_rank(meeting)
        if not options.peer_loads:
            wanted(meeting, asked=options.yes_use_multicast)
        begin = {"ranks": meeting.world, "device": device, "loads": "peers" if options.peer_loads else "switch"}
        with Paths(meeting, peer_loads=options.peer_loads) as paths:
            for name in options.checks or CHECKS:
                found = CHECKS[name](Rank(meeting, paths, options.exchanges, options.seed))
                failed += [name] * found["failed"]
                _print(meeting, options, {"check": name, **begin, **found})
        _print(meeting, options, {"check": "all", **begin, "failed": failed})
    return int(bool(failed))


def _print(meeting: Rendezvous, options: argparse.Namespace, row: Found) -> None:
    if meeting.rank == 0:
        print(json.dumps(row), flush=True)
        if options.log:
            append_row("multicast", row)


def _run(argv: Sequence[str]) -> int:
    options = _options(argv)
    if RANK in os.environ:
        return _rank(options)
    if not options.peer_loads:
        _refuse(options)
    return start("tools.check_multicast", options.ranks, argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return guarded("check_multicast", lambda: _run(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    sys.exit(main())

"""What one rank's engine has of the others: agreement before anything is computed, the inbox, and NCCL for prompts."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from cuq1.checkpoint import Checkpoint
from cuq1.cuda import abi
from cuq1.cuda.compile import digest
from cuq1.cuda.driver import bindings, check, require
from cuq1.cuda.weights import weights_plan
from cuq1.errors import ConfigError, DeviceError, PeerError
from cuq1.models import decode, loop, prefill
from cuq1.models.q1 import Model, resolve
from cuq1.parallel.exchange import SharedInbox
from cuq1.parallel.nccl import Communicator
from cuq1.parallel.rendezvous import Rendezvous
from cuq1.plan.dims import ROWS
from cuq1.plan.types import Plan
from cuq1.sampling.depth import DepthRule, default_rule

PEER_TIMEOUT = abi.DEFAULT_PEER_TIMEOUT_MS / 1000  # seconds after which a kernel gives up what a peer was to push
# What it waited for, by its name; what else polls has nothing of peers.
PUSHED = {
    "qkv": "draft's entry",
    "attn_tail": "attention output",
    "mlp_tail": "experts' output",
    "accept": "candidates",
    "draft_sample": "candidates",
}


class Ranks:
    """This rank among those of `meeting`, each a process with a GPU of its own. Raises DeviceError for too many."""

    def __init__(self, meeting: Rendezvous) -> None:
        self._meeting = meeting
        self.rank, self.world = meeting.rank, meeting.world
        self._inbox: SharedInbox | None = None
        self._nccl: Communicator | None = None
        if self.world > abi.MAX_RANKS:
            raise DeviceError(f"tp {self.world} is more than the {abi.MAX_RANKS} GPUs that can exchange")

    def agree(self, name: str, values: dict[str, str]) -> None:
        """Raises LaunchError, on all ranks, where they differ in any of the values."""
        self._meeting.agree(name, values)

    def meet(self, name: str) -> None:
        """Waits for all ranks. Raises LaunchError."""
        self._meeting.barrier(name)

    def open(self, nbytes: int) -> SharedInbox:
        """The inbox, mapped by all ranks and NOT_READY; and NCCL's communicator."""
        self._inbox = SharedInbox(self._meeting, nbytes)
        self._nccl = Communicator(self._meeting)
        return self._inbox

    def reset(self) -> None:
        """Makes the inboxes NOT_READY again, on all ranks together, when nothing is under way on any."""
        assert self._inbox is not None
        self.meet("before inboxes are reset")
        self._inbox.reset()
        self.meet("inboxes are reset")

    def sum(self, address: int, count: int, stream: int) -> None:
        """Enqueues the sum over ranks of `count` FP32 numbers, in place; all ranks get the same bits."""
        assert self._nccl is not None
        self._nccl.all_reduce(address, count, stream)

    def gather(self, source: int, target: int, count: int, stream: int) -> None:
        """Enqueues [ranks, count] FP32 from every rank's `count`."""
        assert self._nccl is not None
        self._nccl.all_gather(source, target, count, stream)

    def failed_elsewhere(self) -> NoReturn:
        """After kernels ended for another rank's fault: raises what that rank says."""
        self.meet("another rank's fault")  # where that rank never comes, as it fails
        raise DeviceError("kernels ended for a fault that no rank has reported: start the program again")

    def close(self) -> None:
        """Gives memory and communicator back, on all ranks together."""
        nccl, self._nccl = self._nccl, None
        if nccl is not None:
            nccl.close()
        inbox, self._inbox = self._inbox, None
        if inbox is not None:
            inbox.close()


def shared_rule(model: Model) -> DepthRule:
    """The default stop rule, with the threshold that suits the most GPUs which can share the model.

    On fewer, a draft more pays a little sooner or later. But how many are drafted decides which numbers a sampled token
    is drawn from, and a seed is to give the same tokens on any number of GPUs.
    """
    rule = default_rule()
    config, draft = model.config, model.draft_config
    for tp in range(abi.MAX_RANKS, 0, -1):
        try:
            layout = weights_plan(config, draft, tp, 0)
        except ConfigError:
            continue  # the model does not divide into so many shares
        fp8 = model.fp8_activations
        widest = resolve(config, draft, layout, tp=tp, ranks=tp, sms=model.sms, fp8_activations=fp8)
        return replace(rule, threshold=loop.draft_threshold(widest, rule.worth))
    return rule


def missing_part(fault: abi.Fault, where: str, layers: int) -> PeerError:
    """A FAULT_PEER as an error. where: the layer, as part of a sentence; layers: how many the target has."""
    kernel = abi.KERNELS.get(fault.kernel, "")
    what = PUSHED.get(kernel, "results")
    place = "" if kernel == "qkv" else f" of {where}"
    return PeerError(
        f"rank {fault.detail}'s part of the {what}{place} never came within {PEER_TIMEOUT:g} s: its process may have "
        "been stopped, or its GPU be busy with something else",
        *order(kernel, fault.layer, layers),
    )


def order(kernel: str, layer: int, layers: int) -> tuple[int, tuple[int, ...]]:
    """The number of the exchange in which a kernel waits, in the order of a round's; and those that may follow it.

    Attention and MLP of each layer, candidates; the draft's entry, attention, MLP and candidates, of all depths alike.
    """
    first, candidates, entry = 0, 2 * layers, 2 * layers + 1
    match kernel:
        case "accept":
            return candidates, (entry, first)
        case "qkv":
            return entry, (entry + 1, first)
        case "draft_sample":
            return entry + 3, (entry, first)
        case "mlp_tail":
            place = entry + 2 if layer < 0 else 2 * layer + 1
            last = layer < 0 or layer == layers - 1  # sampling on the host takes no candidates
            return place, (place + 1, entry, first) if last else (place + 1,)
        case _:
            place = entry + 1 if layer < 0 else 2 * layer
            return place, (place + 1,)


def setup(checkpoint: Checkpoint, **options: object) -> dict[str, str]:
    """What all ranks must be started with alike, before any of them takes memory."""
    draft = checkpoint.draft_config
    return {
        "version of cuq1": _version(),
        "config": _hash(repr(checkpoint.config)),
        "draft's config": "none" if draft is None else _hash(repr(draft)),
        "checkpoint": _hash(_tensors(checkpoint)),
        **{name: str(value) for name, value in options.items()},
    }


def plan_values(model: Model, rule: DepthRule, arch: str) -> dict[str, str]:
    """What ranks compute with: kernels, and plans, which differ in places and first rows alone: as rank 0 has them."""
    first = replace(model, rank=0, place=0)
    most = 0 if model.draft is None else 1
    plans = [
        decode.round_of(first, ROWS, most),
        loop.round_of(first, ROWS, most, short=True),
        loop.first_of(first, most),
        prefill.chunk_plan(first, prefill.Chunk(0, 33)),
    ]
    kernels = dict.fromkeys(kernel for plan in plans for kernel in plan.kernels())
    return {
        "plan": _hash("\n".join(map(printed, plans))),
        "kernels": _hash("".join(digest(kernel, arch) for kernel in kernels)),
        "rule for drafts": _hash(repr(rule)),
        "versions": versions(),
    }


def printed(plan: Plan) -> str:
    """A plan as text, without addresses."""
    lines = [repr(buffer) for buffer in plan.buffers]
    for launch in plan.launches:
        kernel = launch.kernel
        geometry = (kernel.source, kernel.entry, kernel.defines, kernel.grid, kernel.block, kernel.cluster, kernel.smem)
        lines.append(f"{launch.label} {launch.layer} {geometry} {sorted(launch.args.items())}")
    return "\n".join(lines)


def versions() -> str:
    """Of what the ranks compute and exchange with."""
    nccl = require("cupy.cuda.nccl")
    found = {
        "driver": int(check(bindings().cuDriverGetVersion())),
        "cupy": require("cupy").__version__,
        "nccl": nccl.get_version() if nccl.available else 0,
    }
    return json.dumps(found)


def _version() -> str:
    """Of this package: its files, which say more than a number does."""
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    return _hash("".join(file.read_text(encoding="utf-8") for file in files))


def _tensors(checkpoint: Checkpoint) -> str:
    """Names, types, shapes and places of all tensors; not their values, which would all have to be read."""
    lines: list[Any] = []
    for index in (checkpoint.target_index, checkpoint.draft_index):
        if index is not None:
            lines += [(name, index.path(name).name, index.entry(name)) for name in sorted(index.names)]
    return repr(lines)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]

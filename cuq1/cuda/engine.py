"""IQuest-Q1 on a GPU, or on a rank's of several, behind `Engine`."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from cuq1.checkpoint import Checkpoint
from cuq1.config import Q1Config, load_sampling_defaults
from cuq1.cuda.device_engine import DeviceEngine, LoopKind, Options
from cuq1.cuda.driver import open_device, require_devices
from cuq1.cuda.loop import TIMEOUT
from cuq1.cuda.ranks import Ranks, plan_values, setup, shared_rule
from cuq1.cuda.weights import rank_weights
from cuq1.errors import DeviceError, RequestError
from cuq1.models import q1
from cuq1.parallel.rendezvous import Rendezvous
from cuq1.plan.types import Defines
from cuq1.sampling.depth import DepthRule
from cuq1.sampling.params import DecodeParams

Activations = Literal["f16", "fp8"]


class CudaEngine(DeviceEngine):
    """One request at a time on one GPU, or on this rank's GPU of several: the rank's number among those visible.

    tp: the number of ranks. meeting: where they meet, if there are several; all of them open their engines together,
    and call them alike (cuq1.parallel.follow). activations: "f16" computes with half-precision activations; "fp8"
    quantises what enters the experts to E4M3, with a scale a row. capacity: positions that the caches hold, the model's
    context where it is None. loop, timeout, progress, defines: as in Options. Raises ConfigError, CheckpointError,
    DeviceError where there is no usable GPU or too little memory, and LaunchError where ranks differ.
    """

    def __init__(
        self,
        model_dir: str | Path,
        tp: int = 1,
        *,
        progress: Callable[[int, int], None] | None = None,
        depth_rule: DepthRule | None = None,
        activations: Activations = "f16",
        capacity: int | None = None,
        loop: LoopKind = "device",
        timeout: float = TIMEOUT,
        defines: Mapping[str, Defines] | None = None,
        meeting: Rendezvous | None = None,
    ) -> None:
        super().__init__()
        options = Options(loop, timeout, progress, defines)
        if tp > 1 and (meeting is None or meeting.world != tp):
            raise DeviceError(f"with tp {tp} the CUDA engine is one of {tp} ranks': start as many with cuq1-launch")
        if activations not in ("f16", "fp8"):
            raise RequestError(f"activations must be f16 or fp8, not {activations!r}")
        checkpoint = Checkpoint.open(model_dir)
        self.config: Q1Config = checkpoint.config
        self.default_params = DecodeParams(**vars(load_sampling_defaults(model_dir, checkpoint.config)))
        longest = self.config.max_position_embeddings
        self._take_context(min(longest, capacity or longest))
        ranks = Ranks(meeting) if meeting is not None and tp > 1 else None
        rank = 0 if ranks is None else ranks.rank
        if ranks is not None:
            if rank == 0:
                require_devices(tp)  # before the others look for theirs: it is said once
            ranks.agree("setup", setup(checkpoint, tp=tp, context=self.context, activations=activations, loop=loop))
        device = open_device(rank)
        weights = rank_weights(checkpoint, tp, rank)
        model = q1.resolve(
            checkpoint.config,
            checkpoint.draft_config,
            weights.layout,
            tp=tp,
            rank=rank,
            capacity=self.context,
            sms=device.multiprocessors,
            fp8_activations=activations == "fp8",
            ranks=tp,
            place=rank,
        )
        drafts = checkpoint.draft_config.num_draft_slots if checkpoint.draft_config is not None else 0
        rule = depth_rule or shared_rule(model)
        if ranks is not None:
            ranks.agree("plan", plan_values(model, rule, device.arch))
        self._start(model, weights, rule, options, drafts=drafts, ranks=ranks)

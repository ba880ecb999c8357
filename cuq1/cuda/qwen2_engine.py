"""Qwen2 models on a GPU, behind `Engine`: INT4 weights, a paged KV cache, a token a round."""

import sys
from collections.abc import Callable, Mapping

from cuq1.checkpoint.packed import packed
from cuq1.checkpoint.qwen2 import Qwen2Model
from cuq1.config_qwen2 import Qwen2Config
from cuq1.cuda.abi import QWEN2_LAYERS
from cuq1.cuda.device_engine import DeviceEngine, LoopKind, Options
from cuq1.cuda.driver import open_device
from cuq1.cuda.loop import TIMEOUT
from cuq1.cuda.memory import free_memory, round_up
from cuq1.cuda.qwen2_weights import Qwen2Layout, Qwen2Random, Qwen2Source, qwen2_layout, qwen2_source
from cuq1.models import loop as loop_plans
from cuq1.models import qwen2
from cuq1.models.qwen2_forms import Form
from cuq1.models.qwen2_plans import Qwen2Plans
from cuq1.plan.qwen2_dims import PAGE
from cuq1.plan.types import Defines
from cuq1.sampling.depth import default_rule
from cuq1.sampling.params import DecodeParams

RESERVE = 512 << 20  # bytes of the GPU that are left to staging, kernels and graphs


def _say(text: str) -> None:
    sys.stderr.write(f"cuq1: {text}\n")
    sys.stderr.flush()


class Qwen2CudaEngine(DeviceEngine):
    """One request at a time on one GPU. A folder's weights are rounded to INT4 as they are loaded, as cuq1.pack does.

    model: opened, or for benchmarks a config alone, or a layout: its weights are then random.
    context: positions that the caches hold; where it is None the model's, or as many as memory holds. loop, timeout,
    progress, defines: as in Options. form, layers_per_launch: as in models.qwen2.resolve. say(text): is told what is
    not as one may expect. Raises ConfigError, CheckpointError, RequestError for a context that the model does not have,
    and DeviceError where there is no usable GPU or too little memory.
    """

    def __init__(
        self,
        model: Qwen2Model | Qwen2Config | Qwen2Layout,
        *,
        progress: Callable[[int, int], None] | None = None,
        context: int | None = None,
        loop: LoopKind = "device",
        timeout: float = TIMEOUT,
        defines: Mapping[str, Defines] | None = None,
        form: Form | None = None,
        layers_per_launch: int = QWEN2_LAYERS,
        say: Callable[[str], None] = _say,
    ) -> None:
        super().__init__()
        options = Options(loop, timeout, progress, defines)
        if isinstance(model, Qwen2Config):
            model = qwen2_layout(model)
        source = Qwen2Random(model) if isinstance(model, Qwen2Layout) else qwen2_source(packed(model))
        self.config: Qwen2Config = model.config
        self.default_params = DecodeParams(**vars(model.config.sampling))
        self._take_context(context)
        device = open_device()
        if context is None:
            longest, held = self.context, fitting(source.layout, free_memory())
            if held < longest:
                self._take_context(held)
                say(f"the context is cut from {longest} to {held} positions, which this GPU's free memory holds")
        if isinstance(source, Qwen2Source) and source.packed.rounded:
            say(f"{source.packed.where} is rounded to INT4 while it is loaded: pack it once with python -m cuq1.pack")
        resolved = qwen2.resolve(
            self.config,
            source.layout,
            capacity=self.context,
            sms=device.multiprocessors,
            form=form,
            layers_per_launch=layers_per_launch,
        )
        self._start(resolved, source, default_rule(), options)


def fitting(layout: Qwen2Layout, free: int) -> int:
    """Positions, up to the model's context, that `free` bytes hold beside all else; whole pages where they are fewer.

    The model's context where not even a page fits: taking memory then fails, and says what takes how much.
    """
    longest = layout.config.max_position_embeddings
    page = qwen2.resolve(layout.config, layout, capacity=PAGE)
    buffers = [*Qwen2Plans(page).buffers(), *loop_plans.working_buffers()]
    fixed = RESERVE + round_up(layout.nbytes) + sum(round_up(buffer.bytes) for buffer in buffers)
    more = (free - fixed) // (PAGE * (qwen2.position_bytes(layout.config) + 4))
    return longest if more < 0 else min(longest, (1 + int(more)) * PAGE)

"""One rank's model on the GPU: memory, graphs, and the request's state as host and device share it."""

import time
from collections.abc import Callable, Mapping, Sequence
from ctypes import addressof, memmove, sizeof

import numpy as np
from numpy.typing import NDArray

from cuq1.cuda import abi, graph
from cuq1.cuda.driver import bindings, check
from cuq1.cuda.execute import Program
from cuq1.cuda.memory import Arena, Mapped, MappedFault, copy_in
from cuq1.cuda.ranks import Ranks, missing_part
from cuq1.cuda.weights_device import Source, load_weights
from cuq1.errors import Cuq1Error, DeviceError
from cuq1.models import loop
from cuq1.models.family import plans_of
from cuq1.models.plans import DeviceModel
from cuq1.plan.types import Defines, Plan
from cuq1.sampling.depth import DepthRule
from cuq1.sampling.params import DecodeParams
from cuq1.sampling.rounds import Round

FAULT_PEER = abi.constant("FAULT_PEER")
_STATE = sizeof(abi.State)
_REPORTING = 0.1  # seconds that a kernel may take between a report's first store and its last


class Runtime:
    """Holds everything that a request needs, allocated and compiled before it.

    sizes: bytes of GPU memory by name. addresses: of every buffer that a plan may name. defines: what Plan.with_defines
    adds to decode plans, for tools and tests. ranks: the group, where the model is one rank's of several; all of them
    make theirs together.
    """

    def __init__(
        self,
        model: DeviceModel,
        weights: Source,
        rule: DepthRule,
        progress: Callable[[int, int], None] | None = None,
        defines: Mapping[str, Defines] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.model = model
        self.plans = plans_of(model)
        self.ranks = ranks
        self._defines = defines or {}
        self.stream = graph.stream()
        self._rule = rule
        self._graphs: dict[tuple[str, int, int], graph.Graph] = {}
        self._closed = False
        buffers = [*self.plans.buffers(), *loop.working_buffers()]
        self.sizes = {"weights": weights.layout.nbytes, **{b.name: b.bytes for b in buffers if b.name != "fault"}}
        self._arena = Arena({name: size for name, size in self.sizes.items() if name != "inbox"})
        self._fault = MappedFault()
        self._upload = Mapped(_STATE)
        self._readback = Mapped(_STATE)
        self.addresses = self._arena.addresses | {"fault": self._fault.address}
        base = self._arena["weights"]
        self.addresses |= {name: base + tensor.offset for name, tensor in weights.layout.tensors.items()}
        try:
            self._arena.clear()  # caches: a masked slot's value has to be finite
            load_weights(weights, base, self.stream, progress)
            for name, table in model.inverse_frequencies.items():
                self.write(name, table)
            self.empty()
            if ranks is not None:
                self._share(ranks)
        except BaseException:
            if ranks is None:
                self.close()
            else:
                self.lost = "this rank could not be set up"  # peers may have its memory: it goes with the process
            raise

    def _share(self, ranks: Ranks) -> None:
        """Maps every rank's inbox; nobody pushes before all have come this far."""
        inbox = ranks.open(self.sizes["inbox"])
        self.addresses["inbox"] = inbox.address
        self.write("peers", inbox.distances)

    def close(self) -> None:
        """Gives the memory back; of several ranks, on all of them together."""
        if self._closed or self.lost:
            return
        self._closed = True
        for ready in self._graphs.values():
            ready.close()
        if self.ranks is not None:
            self.ranks.close()
        self._arena.close()
        for mapped in (self._upload, self._readback, self._fault):
            mapped.close()

    @property
    def state(self) -> abi.State:
        """The request's state, as the last graph left it."""
        return abi.State.from_address(self._readback.address)

    def write(self, name: str, values: NDArray[np.generic]) -> None:
        """Copies an array to the start of a buffer; the bytes are there when it returns."""
        self.check_alive()
        copy_in(self.addresses[name], values)

    def read(self, name: str, out: NDArray[np.generic]) -> None:
        """Copies the start of a buffer into a contiguous array."""
        self.check_alive()
        check(bindings().cuMemcpyDtoH(out.ctypes.data, self._pointer(name), out.nbytes))

    def read_logits(self, name: str, out: NDArray[np.float32]) -> None:
        """The first rows of a buffer of logits, as float32 [rows, vocabulary]: every rank's columns of it."""
        if self.ranks is None:
            self.read(name, out)
            return
        rows, share = len(out), self.model.dims.vocab
        self.ranks.gather(self.addresses[name], self.addresses["prefill.all_logits"], rows * share, self.stream)
        self.wait()
        parts = np.empty((self.ranks.world, rows, share), np.float32)
        self.read("prefill.all_logits", parts)
        out.reshape(rows, self.ranks.world, share)[...] = parts.swapaxes(0, 1)

    def _pointer(self, name: str) -> object:
        return bindings().CUdeviceptr(self.addresses[name])

    def send(self, state: abi.State) -> None:
        """Makes `state` the request's state on the device."""
        self.wait()
        memmove(self._upload.address, addressof(state), _STATE)
        self.copy("state", self._upload.address, _STATE)

    def copy(self, name: str, source: int, size: int) -> None:
        """Enqueues a copy of mapped host memory to the start of a buffer."""
        driver = bindings()
        check(driver.cuMemcpyHtoDAsync(self._pointer(name), source, size, driver.CUstream(self.stream)))

    def wait(self) -> None:
        """Returns when the stream is done; raises what kernels reported."""
        self.check_alive()
        try:
            graph.synchronize(self.stream)
        except DeviceError as error:
            self._raise_fault(error)
            raise
        self.check_faults()

    def check_faults(self) -> None:
        """Raises what kernels have reported so far."""
        self._raise_fault(None)

    def drop_faults(self) -> bool:
        """Whether kernels have reported anything, which is then forgotten; what they wrote is not to be used."""
        if self._fault.read() is None:
            return False
        self._fault.clear()
        self.poisoned = True
        return True

    def check_alive(self) -> None:
        """Raises DeviceError once the GPU has stopped answering: a call to its driver would then never return."""
        if self.lost:
            raise DeviceError(self.lost)

    def _raise_fault(self, cause: Exception | None) -> None:
        fault = self._fault.read()
        limit = time.monotonic() + _REPORTING
        while fault is not None and fault.what < 0 and time.monotonic() < limit:
            fault = self._fault.read()  # a kernel is about to finish its report
        if fault is None:
            return
        self.poisoned = True
        if self.ranks is None:  # else it stays, and ends what other ranks would go on with
            self._fault.clear()
        layers = len(self.model.layers)
        where = (
            "the draft's layer" if fault.layer < 0 else f"layer {fault.layer}" if fault.layer < layers else "the head"
        )
        if fault.what == FAULT_PEER:
            raise missing_part(fault, where, layers) from cause
        what = abi.FAULTS.get(fault.what, "an unfinished report")
        kernel = abi.KERNELS.get(fault.kernel, f"kernel {fault.kernel}")
        error = Cuq1Error if fault.what == 1 else DeviceError
        raise error(
            f"{what} appeared in {kernel} of {where}: the checkpoint's values are damaged, or too large for "
            "half-precision activations"
            if fault.what == 1
            else f"{what} ended {kernel} of {where}"
        ) from cause

    poisoned = False
    lost = ""  # why nothing may be asked of the driver any more

    def recover(self) -> None:
        """After values that are not finite, clears what they may have reached; weights stay."""
        if not self.poisoned:
            return
        self.poisoned = False
        driver = bindings()
        for name, size in self.sizes.items():
            if name not in ("weights", "inbox", "peers") and not name.startswith("rope."):
                check(driver.cuMemsetD8(driver.CUdeviceptr(self.addresses[name]), 0, size))
        check(driver.cuCtxSynchronize())
        if self.ranks is not None:
            self._fault.clear()
            self.ranks.reset()

    def empty(self) -> None:
        """What buffers have to hold where the sequence is empty."""
        for name, values in self.model.empty.items():
            self.write(name, values)

    def run(self, kind: str, rows: int, drafts: int, plan: Callable[[], Plan]) -> None:
        """Replays a plan's graph, captured at its first use, and reads the state back."""
        key = (kind, rows, drafts)
        if key not in self._graphs:
            self._graphs[key] = self._capture(self.program(plan()))
            self.meet()
        self._graphs[key].launch(self.stream)
        self.wait()

    def meet(self) -> None:
        """Before graphs are launched that were just compiled, which takes ranks more or less time: wait for all."""
        if self.ranks is not None:
            self.ranks.meet("graphs")

    def program(self, plan: Plan) -> Program:
        """A decode plan, bound to this runtime's memory."""
        return Program(plan.with_defines(self._defines), self.addresses)

    def _capture(self, program: Program) -> graph.Graph:
        driver = bindings()
        with graph.capture(self.stream) as captured:
            program.issue(self.stream)
            source = driver.CUdeviceptr(self.addresses["state"])
            stream = driver.CUstream(self.stream)
            check(driver.cuMemcpyDtoHAsync(self._readback.address, source, _STATE, stream))
        ready = captured.instantiate()
        ready.upload(self.stream)
        return ready

    def request(self, params: DecodeParams, seed: int, done: int, limit: int) -> abi.State:
        """The state of a request whose caches hold `done` positions and that drafts at most `limit` tokens a round."""
        state = abi.State()
        state.temperature, state.top_p = params.temperature, params.top_p
        state.seed_lo, state.seed_hi = seed & 0xFFFFFFFF, seed >> 32
        state.top_k = 1 if params.temperature == 0 else params.top_k
        state.draft_limit, state.auto_depth = limit, int(params.draft == "auto")
        for decision in range(len(self._rule.coefficients)):
            weights = self._rule.weights(decision, greedy=params.temperature == 0)
            for feature, weight in enumerate(weights):
                state.rule_weights[decision][feature] = weight
        state.rule_threshold = self._rule.threshold
        state.done = done
        return state

    def first(self, params: DecodeParams, seed: int, done: int, limit: int) -> int:
        """Draws a request's first token from the logits' row 0, and drafts after it."""
        self.send(self.request(params, seed, done, limit))
        self.run("first", 1, limit, lambda: self.plans.first_of(limit))
        return int(self.state.log_tokens[0])

    def target(self, rows: int, done: int) -> None:
        """The target's forward pass of the state's rows, from position `done` on."""
        short = self.model.is_short(done)
        kind = "target, short" if short else "target"
        self.run(kind, rows, 0, lambda: self.plans.target_of(rows, short=short))

    def round(self, limit: int) -> Round:
        """Verifies the pending token and its drafts, and drafts after what was committed."""
        rows = self.state.drafts + 1
        short = self.model.is_short(self.state.done)
        kind = "round, short" if short else "round"
        self.run(kind, rows, limit, lambda: self.plans.round_of(rows, limit, short=short))
        state = self.state
        return Round(tuple(state.log_tokens[: state.log_count]), state.log_drafted, state.log_accepted)

    def verify(self, tokens: Sequence[int], start: int) -> NDArray[np.float32]:
        """Logits float32 [rows, vocab] of at most eight tokens at positions start, start + 1, …."""
        state = abi.State()
        for i, token in enumerate(tokens):
            state.tokens[i], state.positions[i] = token, start + i
        self.send(state)
        self.target(len(tokens), start)
        out = np.empty((len(tokens), self.model.dims.vocab_total), np.float32)
        self.read_logits("logits", out)
        return out

"""Times all layers of a Qwen2 token as one launch, beside attention and the chain: see speed_qwen2.py."""

from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from cuq1.cuda.abi import Qwen2AttentionArgs, Qwen2ChainArgs, Qwen2CombineArgs, Qwen2EmbedArgs, Qwen2LayersArgs
from cuq1.cuda.kernels import qwen2_attention, qwen2_gemv, qwen2_layers, qwen2_rows
from cuq1.cuda.launch import launch
from cuq1.cuda.module import build
from cuq1.plan.qwen2_dims import PAGE
from tests.kernels.qwen2_layers_case import Handed

CONSTANTS = ("UNITS", "MAX_STAGES", "AHEAD", "SLOTS", "SPAN_PAGES", "PARTS")
CONTEXT = 576  # of 512 tokens in and 128 out, halfway
ROUNDING = 2e-2  # of residuals' root mean square: halves of attention's spans, through all layers


@contextmanager
def constants(values):
    """qwen2_layers with other constants than its own."""
    before = {name: getattr(qwen2_layers, name) for name in values}
    try:
        for name, value in values.items():
            setattr(qwen2_layers, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(qwen2_layers, name, value)


def variant(word):
    """layers=U,S,A,.. as constants: of CONSTANTS, an empty place for one as it is; others as NAME:number.

    Raises ValueError for a name that qwen2_layers does not have.
    """
    given = word.partition("=")[2].split(",") if "=" in word else []
    named = [one.split(":") for one in given if ":" in one]
    numbers = [one for one in given if ":" not in one]
    found = {name: int(number) for name, number in [*zip(CONSTANTS, numbers, strict=False), *named] if number}
    unknown = [name for name in found if not isinstance(getattr(qwen2_layers, name, None), int)]
    if unknown or len(numbers) > len(CONSTANTS):
        raise ValueError(f"{word}: {unknown or numbers[len(CONSTANTS) :]} is no constant of qwen2_layers")
    return found


class Token:
    """What a token at the end of `context` positions has besides weights; pages in any order."""

    def __init__(self, layers, context):
        self.layers, self.gpu, self.dims, self.context = layers, layers.gpu, layers.dims, context
        gpu, dims, rng = self.gpu, self.dims, np.random.default_rng(1)
        self.pages = (context - 1) // PAGE + 1
        self.kv_bytes = 2 * dims.kv_heads * dims.head_size * 2 * context
        shape = (self.pages, dims.kv_heads, PAGE, dims.head_size)
        self.caches = [[self._random(shape) for _ in range(2)] for _ in range(layers.count)]
        self.splits = qwen2_attention.splits_for(dims)
        self.short = context <= qwen2_attention.short_positions(dims)
        statistics = (dims.kv_heads, dims.group, self.splits)
        self.arrays = {
            "positions": gpu.array(np.array([context - 1], np.int32)),
            "page_table": gpu.array(rng.permutation(self.pages).astype(np.int32)),
            "inverse_frequencies": gpu.array(1e6 ** (-2 * np.arange(dims.head_size // 2) / dims.head_size)),
            "partial_out": gpu.poison((dims.kv_heads, self.splits, dims.group, dims.head_size), np.float32),
            "partial_max": gpu.poison(statistics, np.float32),
            "partial_sum": gpu.poison(statistics, np.float32),
            "attended": layers.attended,
        }
        self.bias = gpu.array(rng.standard_normal(dims.qkv_rows, np.float32).astype(np.float16))
        self.tokens, self.counts = (gpu.array(np.zeros(4, np.int32)) for _ in range(2))
        self.table = gpu.array(rng.standard_normal((1, dims.hidden), np.float32).astype(np.float16))

    def _random(self, shape):
        return self.gpu.cupy.random.standard_normal(shape, np.float32).astype(np.float16)

    def _filled(self, kind, layer, **more):
        args = kind(fault=self.gpu.fault.address, layer=layer, rows=1, **more)
        for name, array in self.arrays.items():
            if name in dict(kind._fields_):
                setattr(args, name, array.data.ptr)
        return args

    def whole(self):
        """(kernel, args) of the launch that clears what is handed over, and of all layers; and residual_out."""
        layers, dims = self.layers, self.dims
        handed, out = Handed(self.gpu, dims, guarded=False), self.gpu.poison(dims.hidden, np.float32)
        embed = Qwen2EmbedArgs(
            fault=self.gpu.fault.address, rows=1, tokens=self.tokens.data.ptr, table=self.table.data.ptr,
            positions=self.arrays["positions"].data.ptr, residual=layers.residual[0].data.ptr,
            pages=self.counts.data.ptr, page_table=self.arrays["page_table"].data.ptr, free_pages=self.counts.data.ptr,
            max_pages=self.pages, unready_pieces=handed.bytes.nbytes // 16, unready=handed.bytes.data.ptr,
        )  # fmt: skip
        args = self._filled(
            Qwen2LayersArgs, 0, residual=layers.residual[0].data.ptr, residual_out=out.data.ptr, layers=layers.count
        )
        for i, (weights, (k, v)) in enumerate(zip(layers.weights, self.caches, strict=True)):
            for name, short in (("qkv", "qkv"), ("o", "o_proj"), ("gate_up", "gate_up"), ("down", "down")):
                getattr(args, f"{name}_weights")[i] = weights[short].data.ptr
            args.input_norm[i] = args.post_norm[i] = layers.norm.data.ptr
            args.bias[i], args.k_pages[i], args.v_pages[i] = self.bias.data.ptr, k.data.ptr, v.data.ptr
        handed.point(args)
        kernels = (
            qwen2_rows.embed(replace(dims, vocab=1)),
            qwen2_layers.layers(dims, short=self.context <= qwen2_layers.short_positions(dims)),
        )
        return list(zip(kernels, (embed, args), strict=True)), out, handed

    def chained(self):
        """(kernel, args) of all layers as launches of attention and of the chain."""
        layers, dims = self.layers, self.dims
        attend = qwen2_attention.attention_short(dims) if self.short else qwen2_attention.attention(dims)
        qkv, chain, calls = layers.zeros["qkv"].data.ptr, qwen2_gemv.chain(dims), []
        for layer, (weights, (k, v)) in enumerate(zip(layers.weights, self.caches, strict=True)):
            more = {"pieces": qkv, "bias": self.bias.data.ptr, "k_pages": k.data.ptr, "v_pages": v.data.ptr}
            calls.append((attend, self._filled(Qwen2AttentionArgs, layer, splits=self.splits, **more)))
            if not self.short:
                combine = qwen2_attention.combine(dims)
                calls.append((combine, self._filled(Qwen2CombineArgs, layer, splits=self.splits)))
            following, turn = layers.weights[(layer + 1) % layers.count], layer % 2
            o, down, inner = layers.handed[turn]
            args = self._filled(
                Qwen2ChainArgs, layer, o_weights=weights["o_proj"].data.ptr,
                gate_up_weights=weights["gate_up"].data.ptr, down_weights=weights["down"].data.ptr,
                qkv_weights=following["qkv"].data.ptr, post_norm=layers.norm.data.ptr, next_norm=layers.norm.data.ptr,
                residual=layers.residual[turn].data.ptr, residual_out=layers.residual[1 - turn].data.ptr,
                o_pieces=o, down_pieces=down, inner=inner, qkv_pieces=qkv,
                unready=layers.handed[1 - turn][0], unready_pieces=layers.handed_words // 4,
            )  # fmt: skip
            calls.append((chain, args))
        return calls

    def show(self, name, us, spread, more=""):
        size, ceiling = self.layers.layer_bytes + self.kv_bytes, self.gpu.read_ceiling()
        rate = size / us / 1e3
        print(
            f"  {name}: layer {us:6.2f} us +- {spread / 2:.2f}, {rate:5.0f} GB/s {rate / ceiling:4.0%}{more}",
            flush=True,
        )


def run_once(gpu, calls):
    functions = [(build(kernel, gpu.device.arch), args) for kernel, args in calls]
    gpu.cupy.cuda.Device().synchronize()
    for function, args in functions:
        launch(function, args, gpu.stream)
    gpu.wait()


def report(layers, context, variants):
    """A table of variants (constants each), behind the chain's line. Returns whether all give the same residual."""
    token = Token(layers, context)
    token.show(f"attention and chain, {context} positions", *layers.time(token.chained(), layers.count))
    first, same = None, True
    for values in variants:
        with constants(values):
            calls, out, _handed = token.whole()
            kernel = calls[-1][0]
            run_once(layers.gpu, calls)
            found = out.get().astype(np.float64)
            first = found if first is None else first
            apart = np.abs(found - first).max() / np.sqrt(np.square(first).mean())
            same = same and bool(apart < ROUNDING)
            named = [f"{name}:{value}" for name, value in values.items() if name not in CONSTANTS]
            name = ",".join([str(getattr(qwen2_layers, name)) for name in CONSTANTS] + named)
            more = f", {dict(kernel.defines)['STAGES']} stages, {kernel.smem >> 10} KB, differs by {apart:.1e}"
            token.show(f"layers={name}", *layers.time(calls, layers.count), more)
    return same

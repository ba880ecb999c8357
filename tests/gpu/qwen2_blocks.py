"""A Qwen2 token on the GPU, launch by launch, beside the same mathematics in float64."""

from collections.abc import Iterator

import numpy as np

from cuq1.cuda import abi
from cuq1.cuda.driver import bindings, check
from cuq1.cuda.execute import Program
from cuq1.cuda.kernels import qwen2_layers
from cuq1.cuda.kernels.qwen2_gemv import INNER_SCALE
from cuq1.plan.qwen2_dims import PAGE, padded, pieces
from cuq1.plan.types import Plan
from cuq1.reference.qwen2_weights import load_qwen2
from tests.kernels.twins.qwen2 import swizzled


def rms(x, weight, eps):
    return x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + eps) * weight


class Float64:
    """The model in float64, a token at a time, with caches that only grow."""

    def __init__(self, model):
        self.config = model.config
        self.weights = load_qwen2(model)
        self.k = [[] for _ in self.weights.layers]
        self.v = [[] for _ in self.weights.layers]

    def rope(self, x, position):
        """x [heads, size], its halves rotated against each other."""
        half = x.shape[1] // 2
        angle = position * self.config.rope_theta ** (-np.arange(half) / half)
        a, b = x[:, :half], x[:, half:]
        return np.concatenate((a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)), axis=1)

    def token(self, token, position) -> Iterator[tuple[int, str, np.ndarray]]:
        """(layer, what, values) of everything that the launches leave, in order."""
        config, size, eps = self.config, self.config.head_dim, self.config.rms_norm_eps
        x = self.weights.embed_tokens[token].astype(np.float64)
        yield 0, "embed", x
        for number, layer in enumerate(self.weights.layers):
            n = rms(x, layer.input_norm.astype(np.float64), eps)
            qkv = np.concatenate([matrix.astype(np.float64) @ n for matrix in (layer.q, layer.k, layer.v)])
            yield number, "qkv", qkv
            q, k, v = np.split(
                qkv + np.concatenate((layer.q_bias, layer.k_bias, layer.v_bias)),
                [config.q_size, config.q_size + config.kv_size],
            )
            self.k[number].append(self.rope(k.reshape(-1, size), position))
            self.v[number].append(v.reshape(-1, size))
            keys, values = np.stack(self.k[number]), np.stack(self.v[number])  # [positions, kv_heads, size]
            group = config.num_attention_heads // config.num_key_value_heads
            heads = self.rope(q.reshape(-1, size), position).reshape(-1, group, size)
            scores = np.einsum("hgd,phd->hgp", heads, keys) / np.sqrt(size)
            p = np.exp(scores - scores.max(-1, keepdims=True))
            p /= p.sum(-1, keepdims=True)
            attended = np.einsum("hgp,phd->hgd", p, values).ravel()
            yield number, "k", keys
            yield number, "v", values
            yield number, "attended", attended
            o = layer.o.astype(np.float64) @ attended
            yield number, "o_proj", o
            x = x + o
            yield number, "middle", x
            n = rms(x, layer.post_norm.astype(np.float64), eps)
            gate, up = layer.gate.astype(np.float64) @ n, layer.up.astype(np.float64) @ n
            inner = gate / (1 + np.exp(-gate)) * up
            yield number, "gate_up", inner * INNER_SCALE
            down = layer.down.astype(np.float64) @ inner
            yield number, "down", down
            x = x + down
            yield number, "residual", x
        n = rms(x, self.weights.norm.astype(np.float64), eps)
        yield len(self.weights.layers), "norm", n
        yield len(self.weights.layers), "lm_head", self.weights.lm_head.astype(np.float64) @ n


class OnGpu:
    """The launches of an engine's runtime, one at a time, and what they leave."""

    def __init__(self, runtime):
        self.runtime = runtime
        self.model = runtime.model

    def read(self, name, shape, dtype=np.float32, offset=0):
        out = np.empty(shape, dtype)
        source = bindings().CUdeviceptr(self.runtime.addresses[name] + offset)
        check(bindings().cuMemcpyDtoH(out.ctypes.data, source, out.nbytes))
        return out.astype(np.float64)

    def summed(self, ref, rows, k):
        """Pieces [pieces, rows] of a matrix of k columns. What no block writes are zeros, as memory was cleared, or
        NOT_READY, a NaN."""
        found = self.read(ref.buffer, (pieces(rows, k), rows), offset=ref.offset)
        assert np.isfinite(found[0]).all()
        return np.nan_to_num(found, nan=0.0).sum(axis=0)

    def cache(self, name, positions):
        """Keys or values [positions, kv_heads, size], through the page table."""
        d = self.model.sizes
        pages = swizzled(self.read(name, (self.model.pages, d.kv_heads, PAGE, d.head_size), np.float16))
        table = self.read("page_table", (self.model.pages,), np.int32).astype(int)[: -(-positions // PAGE)]
        assert (table >= 0).all()
        return pages[table].transpose(0, 2, 1, 3).reshape(-1, d.kv_heads, d.head_size)[:positions]

    def token(self, token, position, *, short) -> Iterator[tuple[int, str, np.ndarray]]:
        """As Float64.token, of what is still there behind a launch: of many layers in one, each one's keys and values,
        and the last one's residual and MLP."""
        state = abi.State()
        state.tokens[0], state.positions[0], state.done = token, position, position
        self.runtime.send(state)
        plan, d = self.runtime.plans.target_of(1, short=short), self.model.sizes
        sums = {"qkv": (d.qkv_rows, d.hidden), "o_proj": (d.hidden, d.q_width), "down": (d.hidden, d.inner)}
        for launch in plan.launches:
            Program(Plan(plan.buffers, (launch,)), self.runtime.addresses).issue(self.runtime.stream)
            self.runtime.wait()
            number, label, args = launch.layer, launch.label, launch.args
            if label == "embed":
                yield number, label, self.read("residual", d.hidden)
            elif label in sums:
                yield number, label, self.summed(args["out"], *sums[label])
            elif label == "combine" or (label == "attention" and short):
                yield from self.cached(number, position)
                yield number, "attended", self.read("attended", d.q_width, np.float16)
            elif label == "gate_up":
                yield number, label, self.read("inner", d.inner, np.float16)
            elif label == "chain":
                yield number, "o_proj", self.summed(args["o_pieces"], *sums["o_proj"])
                yield number, "gate_up", self.read("handed", d.inner, np.float16, args["inner"].offset)
                yield number, "down", self.summed(args["down_pieces"], *sums["down"])
                if args["qkv_pieces"]:
                    yield number + 1, "qkv", self.summed(args["qkv_pieces"], *sums["qkv"])
            elif label == "layers":
                last = number + args["layers"] - 1
                for layer in range(number, last + 1):
                    yield from self.cached(layer, position)
                handed = self.last_of(args)
                yield last, "middle", handed["rows_handed"][0]
                yield last, "gate_up", handed["inner"][: d.inner]
                yield last, "down", np.nan_to_num(handed["down_pieces"], nan=0.0).sum(axis=(0, 1))
                yield last, "residual", self.read("residual", d.hidden, offset=args["residual_out"].offset)
            elif label == "norm":
                yield number, label, self.read("hidden16", d.hidden, np.float16)
            elif label == "lm_head":
                yield number, label, self.read("logits", d.vocab)

    def last_of(self, args):
        """What the last layer of a launch of several has left of what layers have in turns, by name. Of pieces
        [parts, n, rows], those that no block writes are NaN."""
        d, turn = self.model.sizes, (args["layers"] - 1) % 2
        shapes = {
            "rows_handed": (2, 2, d.hidden),
            "inner": (2, padded(d.inner)),
            "down_pieces": (2, qwen2_layers.parts(d), qwen2_layers.down_pieces(d), d.hidden),
        }
        kinds = {"inner": np.float16}
        return {
            name: self.read(args[name].buffer, shape, kinds.get(name, np.float32), args[name].offset)[turn]
            for name, shape in shapes.items()
        }

    def cached(self, layer, position):
        for kind in "kv":
            yield layer, kind, self.cache(f"layers.{layer}.{kind}_pages", position + 1)


def differences(float64: Float64, gpu: OnGpu, tokens, *, start=0, short=True) -> Iterator[tuple[str, float]]:
    """(what, relative error) of everything that a few tokens leave."""
    for i, token in enumerate(tokens):
        position = start + i
        expected = float64.token(token, position)
        for layer, what, found in gpu.token(token, position, short=short):
            values = next(values for at, name, values in expected if (at, name) == (layer, what))
            error = float(np.linalg.norm(found - values) / np.linalg.norm(values))
            yield f"position {position}, layer {layer}: {what}", error

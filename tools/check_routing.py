"""Folded against unfolded routing: the experts that both choose from the same inputs, layer by layer, and their rounds.

    python -m tools.check_routing --tp 2                                nano: real weights, real prompts
    python -m tools.check_routing --random iquest-q1 --tp 8             a few layers of random weights of those sizes
    python -m tools.check_routing --time iquest-q1 --tp 8               a round of each form, in turn

All ranks run on one GPU (tools/emulated.py); with --tp above 1 they exchange. Before each MoE layer's o_proj, both
forms route what lies there, and float64 does as well: from attention's FP32 output, the residual, and the weights as
they are stored. Folded routing takes that output as it is; the other form multiplies it as halves, so that its logits
differ by some 2**-12 of their size. Both errors are measured, and may not exceed a limit each (of a row's root mean
square logit). Where the two choose different experts, these experts' logits have to lie closer together, in float64,
than both errors of that row reach: such places are listed.

Each run ends with controls: folds that are wrong in one way, which have to be found.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuq1.checkpoint import Checkpoint
from cuq1.cli import Parser, guarded
from cuq1.config import load_config
from cuq1.cuda import abi
from cuq1.cuda.repack import TILE, untile
from cuq1.cuda.weights import Layout, rank_weights, weights_plan
from cuq1.cuda.weights_device import DeviceArena, load_weights, random_weights
from cuq1.cuda.weights_load import Fold, fold_of
from cuq1.errors import Cuq1Error, RequestError
from cuq1.models import decode
from cuq1.models.q1 import Layer
from cuq1.plan.dims import HEAD_DIM, ROWS
from cuq1.plan.types import Plan, Ref
from tools.bench import append_row, at_least_one, nano
from tools.bench_round import ASSETS
from tools.emulated import Ranks

F64 = NDArray[np.float64]
# Of a row's root mean square logit. Folded: FP32 sums, and o's norm, which is of products of halves, but an average of
# their errors; unfolded: these errors, half of a half's step in every product.
LIMITS = {"folded": 2.0**-11, "unfolded": 2.0**-9}


@dataclass(frozen=True)
class Form:
    """What one form made of a layer's rows: logits float64, chosen ids and their weights [rows, top_k]."""

    logits: F64
    ids: NDArray[np.int32]
    weights: NDArray[np.float32]


@dataclass
class Found:
    """Sums over all rows that were compared; places: those where the forms differ."""

    rows: int = 0
    worst: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LIMITS, 0.0))
    weights: float = 0.0
    places: list[str] = field(default_factory=list)


def judge(exact: F64, forms: dict[str, Form], where: str, found: Found) -> None:
    """Compares the forms' rows with float64's logits and with each other.

    Raises Cuq1Error for a form whose error exceeds its limit, or whose choice its errors do not explain.
    """
    size = np.sqrt(np.mean(exact**2, axis=1))
    errors = {name: np.abs(form.logits - exact).max(axis=1) for name, form in forms.items()}
    for row in range(len(exact)):
        for name in forms:
            relative = float(errors[name][row] / size[row])
            found.worst[name] = max(found.worst[name], relative)
            if not relative <= LIMITS[name]:
                raise Cuq1Error(
                    f"{where}, row {row}: {name} logits are {relative:.1e} of their size from float64's, which may be "
                    f"{LIMITS[name]:.1e}"
                )
        reach = float(sum(error[row] for error in errors.values()))
        chosen = {name: {int(one) for one in form.ids[row]} for name, form in forms.items()}
        if any(len(ids) < forms["folded"].ids.shape[1] for ids in chosen.values()):
            raise Cuq1Error(f"{where}, row {row}: an expert was chosen twice")
        only = [chosen["folded"] - chosen["unfolded"], chosen["unfolded"] - chosen["folded"]]
        found.rows += 1
        if not only[0]:
            shares = [
                dict(zip(form.ids[row].tolist(), form.weights[row].tolist(), strict=True)) for form in forms.values()
            ]
            apart = max(abs(shares[0][one] - shares[1][one]) for one in shares[0])
            found.weights = max(found.weights, apart)
            if apart > reach + 1e-6:  # a softmax moves by less than its logits
                raise Cuq1Error(f"{where}, row {row}: weights differ by {apart:.1e}, and logits by {reach:.1e} at most")
            continue
        gap = max(abs(exact[row, one] - exact[row, other]) for one in only[0] for other in only[1])
        text = f"{where}, row {row}: folded {sorted(only[0])}, unfolded {sorted(only[1])}; float64's logits differ by"
        text += f" {gap:.1e}, errors reach {reach:.1e}"
        if gap > reach:
            raise Cuq1Error(text)
        found.places.append(text)


class Checker:
    """Both forms of a target's decode pass of 8 rows, on the same ranks."""

    def __init__(self, ranks: Ranks, layouts: list[Layout]) -> None:
        self.ranks, self.layouts = ranks, layouts
        self.plan = decode.target_of(ranks.models[0], ROWS)
        other = decode.target_of(replace(ranks.models[0], folded=False), ROWS)
        self.programs = {
            "folded": ranks.programs(lambda model: decode.target_of(model, ROWS)),
            "unfolded": ranks.programs(lambda model: decode.target_of(replace(model, folded=False), ROWS)),
        }
        self._places = {name: _places(plan) for name, plan in (("folded", self.plan), ("unfolded", other))}
        self._matrices: dict[int, tuple[list[F64], F64, F64, F64]] = {}
        for rank in range(len(layouts)):
            ranks.write(rank, "ones", np.ones(ranks.models[0].dims.hidden, np.float32))

    def run(self, tokens: list[int], start: int, where: str, found: Found, *, controls: bool = False) -> list[str]:
        """A pass of eight tokens at positions start, start + 1, …; returns the controls that were found."""
        state = abi.State()
        for i, token in enumerate(tokens):
            state.tokens[i], state.positions[i] = token, start + i
        for rank in range(len(self.layouts)):
            self.ranks.write(rank, "state", np.frombuffer(bytes(state), np.uint8))
        index = 0
        noticed: list[str] = []
        while index < len(self.plan.launches):
            launch = self.plan.launches[index]
            if (launch.label, launch.layer) not in self._places["folded"]:
                self.ranks.step(self.programs["folded"], index)
                index += 1
                continue
            layer = self.ranks.models[0].layers[launch.layer]
            at = f"{where}, position {start}, layer {layer.number}"
            exact = self._exact(layer)
            forms = {name: self._route(name, layer) for name in ("unfolded", "folded")}
            judge(exact, forms, at, found)
            if controls:
                noticed += self._controls(layer, exact, forms, at)
            index += 2
        return noticed

    def _route(self, name: str, layer: Layer) -> Form:
        """o_proj up to the choice, with nothing left of the other form."""
        ranks, d = self.ranks, layer.dims
        for rank in range(len(self.layouts)):
            o, size = self._inbox(layer)
            ranks.set(rank, o, 0xFF, size)
            ranks.set(rank, "routed", 0, 4 * ROWS * d.top_k * 4)
            for buffer in ("expert_ids", "expert_weights", "h"):
                ranks.set(rank, buffer, 0xFF, ROWS * (d.hidden if buffer == "h" else d.top_k) * 4)
        labels = ("o_proj", "attn_tail") if name == "folded" else ("o_proj", "attn_tail", "router", "route")
        for label in labels:
            ranks.step(self.programs[name], self._places[name][label, layer.number])
        shape = (ROWS, d.top_k)
        ids = [ranks.read(rank, "expert_ids", shape, np.int32) for rank in range(len(self.layouts))]
        weights = [ranks.read(rank, "expert_weights", shape) for rank in range(len(self.layouts))]
        if any(one.tobytes() != ids[0].tobytes() for one in ids) or any(
            one.tobytes() != weights[0].tobytes() for one in weights
        ):
            raise Cuq1Error(f"layer {layer.number}: ranks do not route alike")
        return Form(self._folded_logits(layer) if name == "folded" else self._logits(layer), ids[0], weights[0])

    def _inbox(self, layer: Layer) -> tuple[Ref, int]:
        """Where o and the router's parts lie, and in how many bytes."""
        inbox = self.ranks.models[0].inbox
        if inbox is not None:
            return inbox.whole("o", layer.number), inbox.pieces("o", "router_residual") * 16
        return Ref("o"), ROWS * (layer.dims.hidden + 2 * layer.dims.experts) * 4

    def _folded_logits(self, layer: Layer) -> F64:
        """From the parts that attn_tail adds."""
        d, ranks = layer.dims, len(self.layouts)
        args = self.plan.launches[self._places["folded"]["attn_tail", layer.number]].args

        def total(name: str, width: int) -> F64:
            where = args[name]
            assert isinstance(where, Ref)
            parts = self.ranks.read(0, where, (ranks, ROWS, width))
            return np.asarray(parts.astype(np.float64).sum(axis=0))

        o, h = total("o", d.hidden), self.ranks.read(0, "h", (ROWS, d.hidden)).astype(np.float64)
        attended, residual = total("router_attended", d.experts), total("router_residual", d.experts)
        scale = layer.attn_scale
        return (scale * _inverse_rms(o, d.eps) * attended + residual) * _inverse_rms(h, d.eps)

    def _logits(self, layer: Layer) -> F64:
        launch = self.programs["unfolded"][0].plan.launches[self._places["unfolded"]["router", layer.number]]
        parts = self.ranks.read(0, "router_logits", (launch.kernel.grid[1], ROWS, layer.dims.experts))
        return np.asarray(parts.astype(np.float64).sum(axis=0))

    def _exact(self, layer: Layer) -> F64:
        """float64's logits [rows, experts] of what lies before the layer's o_proj."""
        d = layer.dims
        matrices, out_norm, ffn_norm, router = self._weights(layer)
        args = self.plan.launches[self._places["folded"]["o_proj", layer.number]].args
        x = self.ranks.read(0, "residual", (ROWS, d.hidden)).astype(np.float64)
        if isinstance(args["inverse"], Ref):
            x *= self.ranks.read(0, args["inverse"], (ROWS, 1))
        attended = [self.ranks.read(rank, "attended32", (ROWS, d.q_width)) for rank in range(len(matrices))]
        o = np.zeros((ROWS, d.hidden))
        for one, matrix in zip(attended, matrices, strict=True):
            o += one.astype(np.float64) @ matrix.T
        h = x + layer.attn_scale * o * _inverse_rms(o, d.eps) * out_norm
        return np.asarray((h * _inverse_rms(h, d.eps) * ffn_norm) @ router.T)

    def _weights(self, layer: Layer) -> tuple[list[F64], F64, F64, F64]:
        """The ranks' W_o [hidden, q width], both norms, and the router [experts, hidden]."""
        if layer.number not in self._matrices:
            d, p, read = layer.dims, layer.prefix, self.ranks.read
            matrices = []
            for rank in range(len(self.layouts)):
                packed = read(rank, f"{p}.o.weights", (d.hidden * d.q_width * (1 if d.fp8_attention else 2),), np.uint8)
                matrix = untile(packed, d.hidden, d.q_width, fp8=d.fp8_attention).astype(np.float64)
                if d.fp8_attention:
                    scales = read(rank, f"{p}.o.scales", (d.hidden // TILE, d.q_heads)).astype(np.float64)
                    matrix *= np.repeat(np.repeat(scales, TILE, axis=0), HEAD_DIM, axis=1)
                matrices.append(matrix)
            out_norm = read(0, f"{p}.attn_out_norm", (d.hidden,)).astype(np.float64)
            ffn_norm = read(0, f"{p}.ffn_norm", (d.hidden,)).astype(np.float64)
            router = read(0, f"{p}.router", (d.experts, d.hidden)).astype(np.float64)
            self._matrices[layer.number] = (matrices, out_norm, ffn_norm, router)
        return self._matrices[layer.number]

    def _controls(self, layer: Layer, exact: F64, forms: dict[str, Form], where: str) -> Iterator[str]:
        """Folds that are wrong in one way each, which `judge` has to refuse; the right one is made again."""
        for name in ("ffn_norm", "attn_out_norm", "slice"):
            if name == "slice" and len(self.layouts) == 1:
                continue
            self._fold(layer, name)
            wrong = {**forms, "folded": self._route("folded", layer)}
            self._fold(layer, "")
            try:
                judge(exact, wrong, where, Found())
            except Cuq1Error as error:
                yield f"without {name}: {error}" if name != "slice" else f"with another rank's slice: {error}"
            else:
                raise RequestError(f"{where}: a fold that is wrong in {name} was not noticed")
        again = self._route("folded", layer)
        if again.ids.tobytes() != forms["folded"].ids.tobytes() or (again.logits != forms["folded"].logits).any():
            raise Cuq1Error(f"{where}: folding again gave other logits")

    def _fold(self, layer: Layer, wrong: str) -> None:
        """Makes the ranks' folds: right ones, or without a norm, or of another rank's slice."""
        d = layer.dims
        for rank, layout in enumerate(self.layouts):
            base, own = self.ranks.addresses[rank]["weights"], layout.layer(layer.number)
            fold: Fold = fold_of(own, layout.tensors, d.hidden, d.q_heads, d.slice_width, rank)
            if wrong == "slice":
                fold = replace(fold, slice_start=(rank + 1) % len(self.layouts) * d.slice_width)
            elif wrong:
                fold = replace(fold, **{wrong: self.ranks.addresses[rank]["ones"] - base})
            with DeviceArena(base, self.ranks.stream) as arena:
                arena.fold(fold)
                arena.report()


def _places(plan: Plan) -> dict[tuple[str, int], int]:
    """Where the launches from o_proj to the choice stand, of each layer that routes."""
    routing = {one.layer for one in plan.launches if one.label == "gate_up" and one.args["routed"]}
    labels = ("o_proj", "attn_tail", "router", "route")
    return {
        (one.label, one.layer): i for i, one in enumerate(plan.launches) if one.layer in routing and one.label in labels
    }


def _inverse_rms(x: F64, eps: float) -> F64:
    return np.asarray(1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps))


def _nano(tp: int, count: int, most: int) -> tuple[Checker, list[list[int]]]:
    folder, _, make_prompts = nano()
    checkpoint = Checkpoint.open(folder)
    shares = [rank_weights(checkpoint, tp, rank, draft=False) for rank in range(tp)]
    layouts = [share.layout for share in shares]

    def fill(layout: Layout, base: int, stream: int) -> None:
        load_weights(shares[layout.rank], base, stream)

    prompts = [ids[:most] for ids in make_prompts(count, 29)]
    ranks = Ranks(checkpoint.config, layouts, fill, most + ROWS, {"ones": checkpoint.config.hidden_size * 4})
    return Checker(ranks, layouts), prompts


def _random(name: str, tp: int, layers: int, count: int, most: int, seed: int) -> tuple[Checker, list[list[int]]]:
    folder = Path(name) if Path(name).is_dir() else ASSETS / name
    whole, _ = load_config(folder)
    config = replace(whole, layer_types=whole.layer_types[:layers])
    layouts = [weights_plan(config, None, tp, rank) for rank in range(tp)]
    rng = np.random.default_rng(seed)
    prompts = rng.integers(config.vocab_size, size=(count, most)).tolist()

    def fill(layout: Layout, base: int, stream: int) -> None:
        random_weights(layout, base, stream, seed)

    ranks = Ranks(config, layouts, fill, most + ROWS, {"ones": config.hidden_size * 4})
    return Checker(ranks, layouts), prompts


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return guarded("check_routing", lambda: _run(argv))


def _run(argv: list[str] | None) -> int:
    parser = Parser(prog="python -m tools.check_routing", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tp", type=at_least_one, default=1, help="ranks, all of them on one GPU")
    parser.add_argument("--random", metavar="CONFIG", help="random weights of a folder of cuq1/assets, or a path")
    parser.add_argument("--time", metavar="CONFIG", help="a round of one rank of it, folded and not, in turn")
    parser.add_argument("--layers", type=at_least_one, default=4, help="of --random (default: %(default)s)")
    parser.add_argument("--prompts", type=at_least_one, default=6)
    parser.add_argument("--tokens", type=at_least_one, default=96, help="of a prompt, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", action="store_true", help="append a row to tools/benchlog/")
    args = parser.parse_args(argv)
    if args.time is not None:
        from tools import time_routing  # noqa: PLC0415  (needs the memory that the rest takes)

        return time_routing.run(args)
    return _compare(args)


def _compare(args: argparse.Namespace) -> int:
    if args.random is None:
        checker, prompts = _nano(args.tp, args.prompts, args.tokens)
    else:
        checker, prompts = _random(args.random, args.tp, args.layers, args.prompts, args.tokens, args.seed)
    found, noticed = Found(), []
    for number, ids in enumerate(prompts):
        for start in range(0, len(ids) - ROWS + 1, ROWS):
            where, first = f"prompt {number}", number == start == 0
            noticed += checker.run(ids[start : start + ROWS], start, where, found, controls=first)
    what = "nano" if args.random is None else f"random weights of {args.random}"
    print(
        f"{what}, tp {args.tp}, {checker.ranks.name}: {found.rows} rows of {len(prompts)} prompts, over all MoE layers"
    )
    print(
        "largest error of a row's logits, of their root mean square: "
        + ", ".join(f"{name} {worst:.1e} (limit {LIMITS[name]:.1e})" for name, worst in found.worst.items())
        + f"; weights of equal choices differ by {found.weights:.1e} at most"
    )
    print(f"choices that differ, each between experts closer than the errors reach: {len(found.places)}")
    for place in found.places:
        print(f"  {place}")
    print(f"wrong folds noticed: {len(noticed)}, as")
    for one in noticed[:3]:
        print(f"  {one}")
    if args.log:
        numbers: dict[str, Any] = {"rows": found.rows, "errors": found.worst, "differing": len(found.places)}
        append_row(
            "routing", {"gpu": checker.ranks.name, "what": what, "tp": args.tp, **numbers, "noticed": len(noticed)}
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Pack a Qwen2 model's Hugging Face folder into one INT4 file: python -m cuq1.pack HF_DIR OUT.nanoqwen

The format is specified in cuq1/checkpoint/NANOQWEN.md. Weights are read, rounded and written a piece at a time, so
memory stays bounded whatever the model's size.
"""

import argparse
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from cuq1.checkpoint import int4
from cuq1.checkpoint.nanoqwen import SUFFIX
from cuq1.checkpoint.nanoqwen_dims import Dims
from cuq1.checkpoint.nanoqwen_header import FILES
from cuq1.checkpoint.nanoqwen_writer import Pieces, write_nanoqwen
from cuq1.checkpoint.packed import half
from cuq1.checkpoint.qwen2_folder import EMBEDDING, NORM, Qwen2Folder
from cuq1.cli import Parser, guarded
from cuq1.config import is_present, read_json
from cuq1.errors import CheckpointError

TOKENIZER = "tokenizer.json"

_BAR = 30
_PERIOD = 0.1  # seconds between two states of the progress bar


def pack(
    model_dir: str | Path,
    out: str | Path,
    int4_head: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Write the folder's model to `out`, replacing a file of that name, and return the file's length in bytes.

    The folder's own files are not replaced, but those whose names end in .nanoqwen.

    int4_head: the logits' matrix, too, becomes INT4; a tied embedding is then stored a second time.
    progress: called with the bytes written and those to write.
    Raises ConfigError for a model that is not computed, CheckpointError for files that are missing, damaged or hold
    values that are not finite, and where `out` cannot be written; `out` is then as it was before.
    """
    folder = Qwen2Folder.open(model_dir)
    _keep_source(folder.path, Path(out))
    dims = Dims.of(folder.config, int4_head)
    return write_nanoqwen(Path(out), dims, _files(folder.path), lambda: _pieces(folder, int4_head), progress)


def _keep_source(folder: Path, out: Path) -> None:
    """Refuse to replace what the model is read from."""
    own = out.suffix != SUFFIX and os.path.isfile(out)  # noqa: PTH113  (Path's raises for names that cannot be)
    if own and out.parent.resolve() == folder.resolve():
        raise CheckpointError(
            f"{out} is there already, in the checkpoint's own folder: choose a name that ends in {SUFFIX}"
        )


def _files(folder: Path) -> dict[str, bytes]:
    """Configuration, tokenizer and template, as far as the folder has them."""
    files = {}
    for name in FILES:
        path = folder / name
        if not is_present(path):
            continue
        if path.suffix == ".json":
            read_json(path)  # a pointer or half a file is found now, and not by whoever gets the packed one
        try:
            files[name] = path.read_bytes()
            files[name].decode()
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be read ({error.strerror}): check the path and its permissions"
            ) from None
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{path} is not UTF-8 ({error}): copy the file again") from None
    return files


def _pieces(folder: Qwen2Folder, int4_head: bool) -> Pieces:
    """Every tensor of the packed file, in its order."""
    yield from _halves(folder, {"embed_tokens": EMBEDDING})
    for layer in range(folder.config.num_hidden_layers):
        ours, theirs = f"layers.{layer}.", f"model.layers.{layer}."
        attention = {f"{ours}{name}": f"{theirs}self_attn.{name}_proj" for name in "qkv"}
        yield from _halves(folder, {f"{ours}input_norm": f"{theirs}input_layernorm.weight"})
        yield from _linears(folder, {name: f"{prefix}.weight" for name, prefix in attention.items()})
        yield from _halves(folder, {f"{name}.bias": f"{prefix}.bias" for name, prefix in attention.items()})
        yield from _linears(folder, {f"{ours}o": f"{theirs}self_attn.o_proj.weight"})
        yield from _halves(folder, {f"{ours}post_norm": f"{theirs}post_attention_layernorm.weight"})
        yield from _linears(folder, {f"{ours}{name}": f"{theirs}mlp.{name}_proj.weight" for name in ("gate", "up")})
        yield from _linears(folder, {f"{ours}down": f"{theirs}mlp.down_proj.weight"})
    yield from _halves(folder, {"norm": NORM})
    if int4_head:
        yield from _linears(folder, {"lm_head": folder.head})
    elif not folder.config.tie_word_embeddings:
        yield from _halves(folder, {"lm_head": folder.head})


def _halves(folder: Qwen2Folder, names: dict[str, str]) -> Pieces:
    """FP16 tensors."""
    for ours, theirs in names.items():
        for values in folder.pieces(theirs):
            yield ours, half(values, folder.source(theirs))


def _linears(folder: Qwen2Folder, names: dict[str, str]) -> Pieces:
    """INT4 matrices: the words of all of them, then the scales, which are kept meanwhile."""
    kept: dict[str, list[int4.Scales]] = {}
    for ours, theirs in names.items():
        kept[ours] = []
        for values in folder.pieces(theirs):
            codes, scales = int4.quantise(values, folder.source(theirs))
            kept[ours].append(scales)
            yield f"{ours}.words", int4.pack(codes)
    for ours, parts in kept.items():
        for scales in parts:
            yield f"{ours}.scales", scales


class ProgressBar:
    """The bytes written, as one line that is overwritten; nothing where stderr is no terminal."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._shown = sys.stderr.isatty()
        self._start = time.monotonic()
        self._next = self._start
        self._drawn = False

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if not self._shown or (now < self._next and done < total):
            return
        self._next, self._drawn = now + _PERIOD, True
        bar = "#" * (_BAR * done // total)
        speed = done / max(now - self._start, 1e-3)
        text = f"{self._name} [{bar:<{_BAR}}] {done * 100 // total:3}% {done / 1e9:.2f}/{total / 1e9:.2f} GB"
        columns = shutil.get_terminal_size().columns - 1  # a longer line would not be overwritten, but followed
        sys.stderr.write(f"\r{f'{text} {speed / 1e6:.0f} MB/s'[:columns]}\x1b[K")
        sys.stderr.flush()

    def close(self) -> None:
        """Leave the line, so that what is printed next has its own."""
        if self._drawn:
            sys.stderr.write("\n")
            sys.stderr.flush()


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="cuq1.pack", description="Pack a Qwen2 model in INT4 into one file.")
    parser.add_argument("model", metavar="HF_DIR", type=Path, help="a Hugging Face folder with safetensors")
    parser.add_argument(
        "out", metavar="OUT.nanoqwen", type=Path, help="the file to write; one of that name is replaced"
    )
    parser.add_argument(
        "--lm-head",
        choices=("int4", "fp16"),
        default="fp16",
        help="how the logits' matrix is stored (default fp16); int4 is smaller and less exact",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return guarded("cuq1.pack", lambda: _run(_arguments(argv)))


def _run(args: argparse.Namespace) -> int:
    bar = ProgressBar(args.out.name)
    start = time.monotonic()
    try:
        size = pack(args.model, args.out, args.lm_head == "int4", bar)
    finally:
        bar.close()
    name = str(args.out).encode(errors="replace").decode()  # it may not be text, but was written all the same
    if not is_present(args.model / TOKENIZER):
        sys.stderr.write(f"cuq1.pack: {args.model} has no {TOKENIZER}, so the packed model takes token ids alone\n")
    print(f"{name}: {size / 1e6:.1f} MB in {time.monotonic() - start:.1f} s")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it, too, leaves nothing half-written
    sys.exit(main())

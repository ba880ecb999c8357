"""Write a random IQuest-Q1 or Qwen2 checkpoint of any config, in any layout, for tests and benchmarks.

    python tools/make_checkpoint.py --config cuq1/assets/iquest-q1-nano --experts fused --shards 3 OUT
    python tools/make_checkpoint.py --config qwen2.5-coder-7b OUT
    python tools/make_checkpoint.py --config qwen2.5-coder-7b-tiny OUT

The same seed gives the same values in every layout. Tensors are written as they
are made, so memory stays bounded whatever the model's size; the folder appears
under its name only when it is complete.
"""

import argparse
import copy
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:  # run as a script, whose folder is on the path instead of the repository
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cuq1.cli import Parser, guarded
from cuq1.config import FULL, SLIDING, parse_draft, parse_target, read_json
from cuq1.config_qwen2 import MODEL_TYPE, parse_qwen2
from cuq1.errors import ConfigError
from tools.checkpoint_qwen2 import NAMES, default_shards, qwen2_config, qwen2_tensors, write_qwen2_text
from tools.checkpoint_tensors import Layout, Tensor, draft_tensors, target_tensors
from tools.checkpoint_writer import check_shards, new_folder, write_json, write_weights

QUANTIZATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
# The names under which exports know the draft: what config.json then says.
DRAFT_ALIASES: dict[str, dict[str, Any]] = {
    "IQuestQ1MTPRecursive": {"architectures": ["IQuestQ1MTPRecursive"], "model_type": "iquest_q1_mtp_recursive"},
    "IQuestQ1MtpRecursive": {"architectures": ["IQuestQ1MtpRecursive"], "model_type": "iquest_q1_mtp_recursive"},
    "iquest_q1_mtp": {"architectures": ["IQuestQ1MTPRecursive"], "model_type": "iquest_q1_mtp"},
}
# Options that say nothing about a Qwen2 checkpoint.
_Q1_OPTIONS = (
    "experts",
    "router_name",
    "router_dtype",
    "sink_leading_one",
    "scale_dtype",
    "scales",
    "no_draft",
    "mtp_alias",
    "with_training_draft",
)
_DTYPES = {"fp8": "F8_E4M3", "bf16": "BF16", "fp16": "F16", "fp32": "F32"}
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def tiny_config(**overrides: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Raw config.json and mtp/config.json of a model small enough for unit tests.

    4 layers (full, sliding, sliding, full; the first dense) of 8 query and 2 KV heads. Overrides
    are keys of config.json, and `draft_window` and `num_draft_slots` of the draft's.
    """
    draft_window = overrides.pop("draft_window", 8)
    num_draft_slots = overrides.pop("num_draft_slots", 7)
    target: dict[str, Any] = {
        "architectures": ["IQuestQ1ForCausalLM"],
        "model_type": "iquest_q1",
        "torch_dtype": "bfloat16",
        "num_hidden_layers": 4,
        "vocab_size": 96,
        "hidden_size": 64,
        "dense_intermediate_size": 256,
        "intermediate_size": 128,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 0,
        "tie_word_embeddings": False,
        "rope_theta": 1e6,
        "rope_scaling": None,
        "attention_bias": False,
        "rotary_dim": 16,
        "no_rope_layers": [],
        "swa_rope_theta": 1e4,
        "sliding_window": 24,
        "use_hybrid_layers": True,
        "use_sliding_window": True,
        "first_layers_types": [FULL],
        "hybrid_layers_types_block": [SLIDING],
        "num_hybrid_layers_block": 2,
        "last_layers_types": [FULL],
        "mlp_only_layers": [0],
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_router_dtype": "fp32",
        "enable_sink_attention": True,
        "first_layer_attn_out_scale": 1.0,
        "first_layer_ffn_out_scale": 1.0,
        "attn_out_scale": 1.0,
        "ffn_out_scale": 0.53881590608,
        "softmax_scale": None,
        "logit_scale": 1.0,
        "enable_lm_head_fp32": True,
    }
    target.update(overrides)
    draft = {
        "architectures": ["IQuestQ1MTPRecursive"],
        "model_type": "iquest_q1_mtp_recursive",
        "torch_dtype": "bfloat16",
        "target_config": copy.deepcopy(target),
        "num_draft_slots": num_draft_slots,
        "num_target_layers": target["num_hidden_layers"],
        "sliding_window": draft_window,
        "swa_rope_theta": 1e4,
        "fp32_residual_connection": True,
        "quantization_config": copy.deepcopy(QUANTIZATION),
    }
    target["quantization_config"] = copy.deepcopy(QUANTIZATION)
    return target, draft


def write_checkpoint(
    folder: str | Path,
    target: dict[str, Any],
    draft: dict[str, Any] | None,
    layout: Layout | None = None,
    seed: int = 0,
    shards: int = 1,
    text_from: Path | None = None,
) -> Path:
    """Write a checkpoint of raw configs (as `tiny_config` gives) to `folder`, new or empty, and return its path.

    `quantization_config` is set or removed to fit the layout. Files of TEXT_FILES are copied from
    `text_from` where it has them. Raises ConfigError for what cannot be written; nothing is left then.
    """
    folder, layout = Path(folder).resolve(), layout or Layout()
    target = _quantized(target, layout)
    config = parse_target(target)
    plans: list[tuple[str, dict[str, Any], list[Tensor]]] = [("", target, target_tensors(config, layout, seed))]
    if draft is not None:
        draft = _quantized(draft, layout)
        plans.append(("mtp", draft, draft_tensors(parse_draft(draft, config).layer, layout, seed)))
    check_shards(shards, min(len(tensors) for _, _, tensors in plans))
    needed = sum(tensor.nbytes for _, _, tensors in plans for tensor in tensors)
    with new_folder(folder, needed) as partial:
        _copy_text(text_from, partial)
        if not (partial / "generation_config.json").exists():
            defaults = {"do_sample": True, "temperature": 1.0, "top_k": 20, "top_p": 0.95}
            write_json(partial / "generation_config.json", {**defaults, "eos_token_id": target.get("eos_token_id")})
        for name, raw, tensors in plans:
            (partial / name).mkdir(exist_ok=True)
            write_json(partial / name / "config.json", raw)
            write_weights(partial / name, tensors, shards)
    return folder


def write_qwen2_checkpoint(
    folder: str | Path,
    raw: dict[str, Any],
    seed: int = 0,
    shards: int | None = None,
    dtype: str = "BF16",
    text_from: Path | None = None,
) -> Path:
    """As `write_checkpoint`, of a Qwen2 model's raw config (as `qwen2_config` gives).

    shards: None makes files of at most about 4 GB. Text files that `text_from` does not have are made up.
    """
    folder = Path(folder).resolve()
    tensors = qwen2_tensors(parse_qwen2(raw), seed, dtype)
    shards = default_shards(tensors) if shards is None else shards
    check_shards(shards, len(tensors))
    with new_folder(folder, sum(tensor.nbytes for tensor in tensors)) as partial:
        _copy_text(text_from, partial)
        write_qwen2_text(partial, raw)
        write_json(partial / "config.json", raw)
        write_weights(partial, tensors, shards)
    return folder


def _copy_text(source: Path | None, folder: Path) -> None:
    for name in TEXT_FILES:
        if source is not None and (source / name).exists():
            shutil.copyfile(source / name, folder / name)


def _quantized(raw: dict[str, Any], layout: Layout) -> dict[str, Any]:
    raw = {key: value for key, value in raw.items() if key != "quantization_config"}
    return {**raw, "quantization_config": copy.deepcopy(QUANTIZATION)} if layout.fp8 else raw


@dataclass(frozen=True)
class _Configs:
    target: dict[str, Any]
    draft: dict[str, Any] | None
    folder: Path | None


def _read_configs(source: str) -> _Configs:
    """`tiny`, a Qwen2.5-Coder's name, a folder with config.json (and mtp/config.json), or a config.json alone."""
    path = Path(source)
    if source == "tiny" and not path.exists():
        return _Configs(*tiny_config(), None)
    if source.lower() in NAMES and not path.exists():
        return _Configs(qwen2_config(source.lower()), None, None)
    if not path.is_dir():
        return _Configs(read_json(path), None, path.parent)
    draft = path / "mtp" / "config.json"
    return _Configs(read_json(path / "config.json"), read_json(draft) if draft.exists() else None, path)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="make_checkpoint", description="Write a random IQuest-Q1 or Qwen2 checkpoint.")
    parser.add_argument("out", type=Path, help="the folder to write, new or empty")
    parser.add_argument(
        "--config",
        default="tiny",
        help="a checkpoint's folder, a config.json, 'tiny' (default), or a Qwen2.5-Coder: "
        f"{NAMES[0]} and the like, with -tiny behind it for a small one of its shape",
    )
    parser.add_argument("--experts", choices=("per-expert", "fused"), default="per-expert")
    parser.add_argument(
        "--weights", choices=tuple(_DTYPES), help="fp8 (default) or bf16; of Qwen2 bf16 (default), fp16 or fp32"
    )
    parser.add_argument(
        "--shards",
        type=int,
        metavar="N",
        help="files in each folder (default 1; of Qwen2 as many as keep each to 4 GB)",
    )
    parser.add_argument("--router-name", choices=("router", "gate"), default="router")
    parser.add_argument("--router-dtype", choices=("f32", "bf16"), default="f32")
    parser.add_argument("--sink-leading-one", action="store_true", help="store sink_k as [1, kv_heads, head_dim]")
    parser.add_argument("--scale-dtype", choices=("f32", "bf16"), default="f32")
    parser.add_argument(
        "--scales", choices=("pow2", "any"), default="pow2", help="pow2 makes BF16 copies exact; any rounds them"
    )
    parser.add_argument("--no-draft", action="store_true", help="write no mtp/")
    parser.add_argument("--mtp-alias", choices=tuple(DRAFT_ALIASES), help="how mtp/config.json names the draft")
    parser.add_argument("--with-training-draft", action="store_true", help="add mtp_layers.* to the main files")
    parser.add_argument("--text-from", type=Path, help="copy tokenizer and template from here (default: --config)")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return guarded("make_checkpoint", lambda: _make(_arguments(argv)))


def _make(args: argparse.Namespace) -> int:
    configs = _read_configs(args.config)
    if args.text_from is not None and not args.text_from.is_dir():
        raise ConfigError(f"{args.text_from} is not a folder: point --text-from to one with a tokenizer.json")
    try:
        if configs.target.get("model_type") == MODEL_TYPE:
            _make_qwen2(args, configs)
        else:
            _make_q1(args, configs)
    except OSError as error:
        raise ConfigError(f"{args.out} cannot be written: {error.strerror or error}") from None
    return 0


def _make_qwen2(args: argparse.Namespace, configs: _Configs) -> None:
    plain = _arguments([str(args.out)])
    for option in _Q1_OPTIONS:
        if getattr(args, option) != getattr(plain, option):
            raise ConfigError(f"--{option.replace('_', '-')} is of IQuest-Q1, and {args.config} is a Qwen2 model")
    weights = args.weights or "bf16"
    if weights == "fp8":
        raise ConfigError("--weights fp8 is of IQuest-Q1: a Qwen2 model's are bf16, fp16 or fp32")
    text_from = args.text_from or configs.folder
    write_qwen2_checkpoint(args.out, configs.target, args.seed, args.shards, _DTYPES[weights], text_from)


def _make_q1(args: argparse.Namespace, configs: _Configs) -> None:
    weights = args.weights or "fp8"
    if weights not in ("fp8", "bf16"):
        raise ConfigError(f"--weights {weights} is of Qwen2: an IQuest-Q1 model's are fp8 or bf16")
    draft = None if args.no_draft else configs.draft
    if args.mtp_alias:
        if draft is None:
            raise ConfigError("--mtp-alias names a draft, but none is written: give a --config folder with mtp/")
        draft = {**draft, **DRAFT_ALIASES[args.mtp_alias]}
    layout = Layout(
        fused_experts=args.experts == "fused",
        fp8=weights == "fp8",
        router_name=args.router_name,
        router_dtype=args.router_dtype.upper(),
        sink_leading_one=args.sink_leading_one,
        scale_dtype=args.scale_dtype.upper(),
        pow2_scales=args.scales == "pow2",
        training_draft=args.with_training_draft,
    )
    text_from, shards = args.text_from or configs.folder, 1 if args.shards is None else args.shards
    write_checkpoint(args.out, configs.target, draft, layout, args.seed, shards, text_from)


if __name__ == "__main__":
    sys.exit(main())

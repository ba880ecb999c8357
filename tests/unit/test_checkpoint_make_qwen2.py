"""tools/make_checkpoint.py: random Qwen2 checkpoints of the family's shapes, whole or scaled down."""

import json
import tracemalloc

import numpy as np
import pytest
from safetensors import safe_open

from cuq1.checkpoint.qwen2_folder import Qwen2Folder
from cuq1.config_qwen2 import parse_qwen2
from cuq1.errors import ConfigError
from cuq1.text import ChatTemplate, Tokenizer
from tests.checkpoint_files import read
from tests.paths import NANO
from tools.checkpoint_qwen2 import NAMES, default_shards, qwen2_config, qwen2_tensors
from tools.make_checkpoint import main, write_qwen2_checkpoint

TINY = [name for name in NAMES if name.endswith("-tiny")]
SMALL = "qwen2.5-coder-0.5b-tiny"


def test_the_family_is_named():
    assert NAMES[:6] == tuple(f"qwen2.5-coder-{size}" for size in ("0.5b", "1.5b", "3b", "7b", "14b", "32b"))
    assert tuple(TINY) == tuple(f"{name}-tiny" for name in NAMES[:6])


@pytest.mark.parametrize("name", TINY)
def test_a_legal_checkpoint_by_name(tmp_path, name):
    out = tmp_path / "new" / "m"
    assert main(["--config", name.replace("coder", "Coder"), "--seed", "3", str(out)]) == 0
    folder = Qwen2Folder.open(out)
    assert folder.config.sampling.top_p == 0.8
    assert {path.name for path in out.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert all(folder.index.entry(tensor).dtype == "BF16" for tensor in folder.index.names)
    with safe_open(out / "model.safetensors", "numpy") as file:  # the format's own library agrees
        assert set(file.keys()) == set(folder.index.names)


@pytest.mark.parametrize(
    ("name", "parameters", "files"),
    [
        ("0.5b", 494_032_768, 1),
        ("1.5b", 1_543_714_304, 1),
        ("3b", 3_085_938_688, 2),
        ("7b", 7_615_616_512, 4),
        ("14b", 14_770_033_664, 8),
        ("32b", 32_763_876_352, 17),
    ],
)
def test_the_whole_familys_sizes(name, parameters, files):
    """Parameters as the models' descriptions round them: 0.49, 1.54, 3.09, 7.61, 14.7 and 32.5 billion."""
    tensors = qwen2_tensors(parse_qwen2(qwen2_config(f"qwen2.5-coder-{name}")), 0)
    assert sum(tensor.nbytes for tensor in tensors) == 2 * parameters
    assert default_shards(tensors) == files


@pytest.mark.parametrize(("weights", "dtype"), [("bf16", "BF16"), ("fp16", "F16"), ("fp32", "F32")])
def test_precisions_and_shards(tmp_path, weights, dtype):
    assert main(["--config", SMALL, "--weights", weights, "--shards", "3", str(tmp_path / "m")]) == 0
    folder = Qwen2Folder.open(tmp_path / "m")
    assert len(list((tmp_path / "m").glob("model-*-of-00003.safetensors"))) == 3
    assert {folder.index.entry(name).dtype for name in folder.index.names} == {dtype}


def test_seeds_and_shards(tmp_path):
    def values(name, **options):
        folder = write_qwen2_checkpoint(tmp_path / name, qwen2_config(SMALL), **options)
        return {key: item for path in folder.glob("*.safetensors") for key, item in read(path).items()}

    first = values("a", seed=1)
    assert values("b", seed=1, shards=4) == first
    other = values("c", seed=2)
    assert all(other[name] != first[name] for name in first)


def test_values_are_of_order_one(tmp_path):
    folder = Qwen2Folder.open(write_qwen2_checkpoint(tmp_path / "m", qwen2_config(SMALL)))
    for name, deviation, mean in (
        ("model.layers.0.mlp.down_proj.weight", 304**-0.5, 0),
        ("model.layers.1.self_attn.q_proj.weight", 448**-0.5, 0),
        ("model.layers.1.self_attn.q_proj.bias", 0.3, 0),
        ("model.norm.weight", 0.1, 1),
    ):
        values = folder.tensor(name).astype(np.float32)
        assert abs(values.std() / deviation - 1) < 0.2
        assert abs(values.mean() - mean) < 0.1


def test_memory_is_bounded(tmp_path):
    raw = qwen2_config(SMALL, vocab_size=75_000)
    tracemalloc.start()
    write_qwen2_checkpoint(tmp_path / "m", raw)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 60e6  # the embedding alone is 67 MB, and twice that before it is rounded


@pytest.mark.parametrize("name", [SMALL, "qwen2.5-coder-7b"])
def test_the_tokenizer_has_the_configs_control_tokens(tmp_path, name):
    """Also where they lie far behind the others, as in the released vocabulary."""
    raw = qwen2_config(SMALL)
    if name != SMALL:
        whole = qwen2_config(name)
        raw.update({key: whole[key] for key in ("vocab_size", "bos_token_id", "eos_token_id")})
    out = write_qwen2_checkpoint(tmp_path / "m", raw)
    tokenizer = Tokenizer.load(out, raw["vocab_size"])
    assert tokenizer.control_tokens["<|endoftext|>"] == raw["bos_token_id"]
    assert tokenizer.control_tokens["<|im_end|>"] == raw["eos_token_id"]
    text = "def f(x):\n    return self.value + 12  # \u00fcber \U0001f600\n"
    ids = tokenizer.encode(text, control=False)
    assert tokenizer.decode(ids) == text
    assert len(ids) < len(text.encode())
    prompt = ChatTemplate.load(out, tokenizer).encode([{"role": "user", "content": text}])
    assert prompt.count(raw["eos_token_id"]) == 2
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]}
    rendered = ChatTemplate.load(out, tokenizer).render(
        [{"role": "user", "content": "x"}, call, {"role": "tool", "content": "y"}], tools=tools
    )
    assert '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>' in rendered
    assert "<tool_response>\ny\n</tool_response>" in rendered


def test_a_config_of_ones_own_and_its_text_files(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(qwen2_config(SMALL, num_hidden_layers=1)))
    (source / "generation_config.json").write_text(json.dumps({"do_sample": False}))
    assert main(["--config", str(source), str(tmp_path / "m")]) == 0
    config = Qwen2Folder.open(tmp_path / "m").config
    assert config.num_hidden_layers == 1
    assert config.sampling.temperature == 0
    assert main(["--config", str(source), "--text-from", str(NANO), str(tmp_path / "n")]) == 0
    assert (tmp_path / "n" / "tokenizer.json").read_bytes() == (NANO / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--weights", "fp8"], "--weights fp8 is of IQuest-Q1"),
        (["--experts", "fused"], "--experts is of IQuest-Q1, and qwen2.5-coder-0.5b-tiny is a Qwen2 model"),
        (["--no-draft"], "--no-draft is of IQuest-Q1"),
        (["--shards", "0"], "shards must be from 1 to 26"),
        (["--shards", "27"], "shards must be from 1 to 26"),
        (["--text-from", "/none"], "/none is not a folder"),
    ],
)
def test_options_that_do_not_fit(tmp_path, capsys, options, says):
    assert main(["--config", SMALL, *options, str(tmp_path / "m")]) == 2
    stderr = capsys.readouterr().err
    assert says in stderr
    assert stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_precisions_of_the_other_model(tmp_path, capsys):
    assert main(["--weights", "fp16", str(tmp_path / "m")]) == 2
    assert "--weights fp16 is of Qwen2: an IQuest-Q1 model's are fp8 or bf16" in capsys.readouterr().err


def test_names_that_are_none(tmp_path, capsys):
    with pytest.raises(ConfigError, match="is none of qwen2"):
        qwen2_config("qwen2.5-coder-8b")
    assert main(["--config", "qwen2.5-coder-8b", str(tmp_path / "m")]) == 2
    assert "qwen2.5-coder-8b" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="vocab_size 258 has no room for 256 bytes"):
        write_qwen2_checkpoint(tmp_path / "m", qwen2_config(SMALL, vocab_size=258, bos_token_id=1, eos_token_id=2))
    assert not list(tmp_path.iterdir())

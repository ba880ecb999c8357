"""python -m cuq1.inspect of Qwen2 models."""

import json
from collections import Counter

import pytest

from cuq1.checkpoint.nanoqwen import Nanoqwen
from cuq1.inspect.__main__ import main
from cuq1.pack import pack
from tools.checkpoint_qwen2 import NAMES, qwen2_config
from tools.make_checkpoint import write_qwen2_checkpoint


@pytest.fixture
def shown(capsys):
    def call(*arguments, status=0):
        assert main([str(argument) for argument in arguments]) == status
        out, err = capsys.readouterr()
        assert (err == "", out == "") == (status == 0, status != 0)
        return out or err

    return call


def only_config(folder, name):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(qwen2_config(name)))
    return folder


@pytest.mark.parametrize(
    ("size", "parameters", "kv"),
    [("0.5b", 494_032_768, 12_288), ("7b", 7_615_616_512, 57_344), ("32b", 32_763_876_352, 262_144)],
)
def test_a_config_is_enough(shown, tmp_path, size, parameters, kv):
    folder = only_config(tmp_path / "hf", f"qwen2.5-coder-{size}")
    found = json.loads(shown(folder, "--json", "--bandwidth", "4e12", "--context", 1000))
    assert found["parameters"] == parameters
    assert found["kv"] == {
        "bytes_per_token": kv,
        "read": [{"context": 1000, "bytes": 1000 * kv, "ms": pytest.approx(kv / 4e6)}],
    }
    assert "tensors" not in found


def test_what_a_token_reads_of_the_7b(shown, tmp_path):
    """Of 152,064 x 3,584 halves twice, the embedding is not read."""
    folder = only_config(tmp_path / "hf", "qwen2.5-coder-7b")
    fp16, int4 = json.loads(shown(folder, "--json"))["packed"]
    vocab = 152_064 * 3_584
    linears = 7_615_616_512 - 2 * vocab - 3_584 - 28 * (2 * 3_584 + 3_584 + 2 * 512)
    codes = linears // 2 + linears // 128 * 2
    assert fp16["bytes"] - fp16["read_bytes"] == int4["bytes"] - int4["read_bytes"] == 2 * vocab
    assert fp16["read_bytes"] == pytest.approx(codes + 2 * vocab, rel=1e-3)
    assert int4["read_bytes"] == pytest.approx(codes + vocab * (1 / 2 + 2 / 128), rel=1e-3)
    lines = [" ".join(line.split()) for line in shown(folder).splitlines()]
    assert "fp16 5.55 GB 4.46 GB 0.99" in lines
    assert "heads 28 query, 4 KV, of 128" in lines


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("-tiny")])
@pytest.mark.parametrize("head", ["fp16", "int4"])
def test_folder_and_packed_file_agree(shown, tmp_path, name, head):
    hf = write_qwen2_checkpoint(tmp_path / "hf", qwen2_config(name), shards=2)
    file = tmp_path / "m.nanoqwen"
    pack(hf, file, int4_head=head == "int4")
    folder, packed = (json.loads(shown(path, "--json")) for path in (hf, file))
    assert packed["packed"] == [row for row in folder["packed"] if row["lm_head"] == head]
    header = Nanoqwen.open(file).header
    assert packed["packed"][0]["bytes"] == header.checksums_offset - header.tensors_offset
    assert sum(row["bytes"] for row in folder["tensors"]) == 2 * folder["parameters"]
    stored = sum(row["bytes"] for row in packed["tensors"])
    assert 0 <= packed["packed"][0]["bytes"] - stored < 128 * sum(row["tensors"] for row in packed["tensors"])
    for key in ("config", "parameters", "kv"):
        assert folder[key] == packed[key]
    assert "INT4 codes" in shown(file)


def test_the_launches_of_a_token(shown, tmp_path):
    """Printed from a config alone, and they read what the packed model's report says, and the cache."""
    folder = only_config(tmp_path / "hf", "qwen2.5-coder-7b")
    packed = json.loads(shown(folder, "--json"))["packed"][0]
    for context in (512, 16384):
        found = json.loads(shown(folder, "--plan", "--json", "--context", context, "--bandwidth", "4e12"))
        counts = Counter(launch["label"] for launch in found["launches"])
        assert counts == dict.fromkeys(("embed", "layers", "norm", "lm_head", "top_k", "accept"), 1)
        assert found["read_bytes"] == pytest.approx(packed["read_bytes"] + context * 57_344, rel=2e-3)
        assert found["floor_us"] == pytest.approx(found["read_bytes"] / 4e6)
        text = shown(folder, "--plan", "--context", context)
        assert "layers 0-27" in text
        assert "a token in INT4, lm_head fp16" in text


def test_the_launches_of_each_layer(shown, tmp_path):
    """Of a model whose layers are no single launch."""
    folder = only_config(tmp_path / "hf", "qwen2.5-coder-0.5b-tiny")
    for context, combined in ((512, 0), (8192, 2)):
        found = json.loads(shown(folder, "--plan", "--json", "--context", context))
        counts = Counter(launch["label"] for launch in found["launches"])
        assert (counts["attention"], counts["combine"], counts["chain"]) == (2, combined, 2)
        text = shown(folder, "--plan", "--context", context)
        assert ("combine" in text) == (combined > 0)
        assert sum(line.startswith("  ") for line in text.splitlines()) < 20  # layers that are alike share a line


def test_the_launches_of_a_packed_file(shown, tmp_path):
    hf = write_qwen2_checkpoint(tmp_path / "hf", qwen2_config(NAMES[-1]), shards=1)
    sizes = []
    for head in ("fp16", "int4"):
        file = tmp_path / f"{head}.nanoqwen"
        pack(hf, file, int4_head=head == "int4")
        found = json.loads(shown(file, "--plan", "--json"))
        assert found["lm_head"] == head
        (last,) = (launch for launch in found["launches"] if launch["label"] == "lm_head")
        sizes.append(last["read_bytes"])
    assert sizes[0] > 3 * sizes[1]


def test_what_cannot_be_shown_is_one_sentence(shown, tmp_path):
    folder = only_config(tmp_path / "hf", NAMES[-1])
    for arguments, says in (
        ((folder, "--tp", 2), "which one rank computes"),
        ((folder, "--plan", "--rows", 2), "which one rank computes"),
        ((folder, "--plan", "--context", 8193), "context 8193 is outside the model's: choose one from 1 to 8192"),
        ((folder, "--context", 8193), "context 8193 is outside this model's: choose one from 1 to 8192"),
        ((tmp_path / "a.nanoqwen",), "a.nanoqwen does not exist"),
    ):
        message = shown(*arguments, status=2)
        assert says in message
        assert message.count("\n") == 1
    (folder / "model.safetensors.index.json").write_text("{}")
    assert "weight_map" in shown(folder, status=2)

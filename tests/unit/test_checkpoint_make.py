"""tools/make_checkpoint.py: what it writes is a legal checkpoint, whole or not there at all."""

import json
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from safetensors import safe_open

from cuq1.checkpoint import Checkpoint
from cuq1.errors import ConfigError
from tests.checkpoint_files import read, values
from tests.paths import NANO, RELEASED, ROOT
from tools import make_checkpoint
from tools.checkpoint_tensors import Layout, draft_tensors, target_tensors
from tools.make_checkpoint import main, tiny_config, write_checkpoint


def test_every_option_is_written(tmp_path):
    options = (
        "--experts fused --weights fp8 --shards 3 --router-name gate --router-dtype bf16 --sink-leading-one "
        "--scale-dtype bf16 --scales any --mtp-alias iquest_q1_mtp --with-training-draft --seed 9"
    )
    out = tmp_path / "new" / "m"
    assert main([*options.split(), "--text-from", str(NANO), str(out)]) == 0
    checkpoint = Checkpoint.open(out)
    target = checkpoint.target_index
    assert {path.name for path in out.glob("*.safetensors")} == {
        f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)
    }
    assert target.entry("model.layers.1.mlp.experts.fc").dtype == "F8_E4M3"
    assert target.entry("model.layers.1.mlp.experts.fc_scale_inv").dtype == "BF16"
    assert target.entry("model.layers.1.mlp.gate.weight").dtype == "BF16"
    assert target.entry("model.layers.1.self_attn.sink_k").shape == (1, 2, 32)
    assert any(name.startswith("mtp_layers.") for name in target.names)
    assert json.loads((out / "mtp" / "config.json").read_text())["model_type"] == "iquest_q1_mtp"
    assert (out / "tokenizer.json").read_bytes() == (NANO / "tokenizer.json").read_bytes()
    assert (out / "chat_template.jinja").exists()
    scales = target.view("model.layers.1.mlp.experts.fc_scale_inv").astype(float)
    assert (np.log2(scales) % 1 != 0).any()
    assert len([*out.parent.iterdir()]) == 1


def test_no_draft_and_bf16(tmp_path):
    assert main(["--no-draft", "--weights", "bf16", str(tmp_path / "m")]) == 0
    checkpoint = Checkpoint.open(tmp_path / "m")
    assert checkpoint.draft_config is None
    assert checkpoint.config.fp8_block is None
    assert not any(name.endswith("_scale_inv") for name in checkpoint.target_index.names)


def test_a_config_is_read_from_a_checkpoint_or_a_file(tmp_path):
    write_checkpoint(tmp_path / "source", *tiny_config(vocab_size=104))
    for source, has_draft in ((tmp_path / "source", True), (tmp_path / "source" / "config.json", False)):
        out = tmp_path / f"copy-{has_draft}"
        assert main(["--config", str(source), str(out)]) == 0
        checkpoint = Checkpoint.open(out)
        assert checkpoint.config.vocab_size == 104
        assert (checkpoint.draft_config is not None) == has_draft


def test_the_library_reads_what_is_written(tmp_path):
    folder = write_checkpoint(tmp_path / "m", *tiny_config(), Layout(fp8=False))
    with safe_open(folder / "model.safetensors", "numpy") as file:
        assert set(file.keys()) == set(read(folder / "model.safetensors"))
        assert file.get_tensor("model.norm.weight").shape == (64,)


def test_tensors_are_aligned(tmp_path):
    folder = write_checkpoint(tmp_path / "m", *tiny_config(), Layout(fused_experts=True))
    for index in (Checkpoint.open(folder).target_index, Checkpoint.open(folder).draft_index):
        assert all(index.view(name).flags.aligned for name in index.names)


def test_values_have_the_size_of_a_trained_models(tmp_path):
    folder = write_checkpoint(tmp_path / "m", *tiny_config(hidden_size=256, intermediate_size=256))
    got = values(Checkpoint.open(folder).target())
    for path, deviation in {
        "embed_tokens": 1,
        "lm_head": 1 / 16,
        "layers[1].attention.q": 1 / 16,
        "layers[1].mlp.gate[0]": 1 / 16,
        "layers[1].mlp.down[0]": 1 / 16,
    }.items():
        assert got[path].std() == pytest.approx(deviation, rel=0.05)
        assert abs(got[path].mean()) < deviation / 20
    assert got["norm"].mean() == pytest.approx(1, abs=0.05)


def test_the_same_seed_writes_the_same_bytes(tmp_path):
    one, two = (write_checkpoint(tmp_path / name, *tiny_config(), seed=3) for name in ("one", "two"))
    for file in ("model.safetensors", "mtp/model.safetensors", "config.json"):
        assert (one / file).read_bytes() == (two / file).read_bytes()


def test_memory_stays_bounded():
    """The released model's largest tensors are 2.4 GB; a piece of them is at most 1,024 rows in float32, twice over."""
    config = Checkpoint.open(NANO).config
    big = type(config)(**{**config.__dict__, "vocab_size": 60_000, "hidden_size": 128, "num_experts": 128})
    tensors = {tensor.name: tensor for tensor in target_tensors(big, Layout(fused_experts=True), 0)}
    for name in ("lm_head.weight", "model.layers.1.mlp.experts.fc"):
        tracemalloc.start()
        size = sum(piece.nbytes for piece in tensors[name].pieces())
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert size == tensors[name].nbytes
        assert peak < 8 * 1024 * 128 * 4 < size * 4


def test_the_released_model_could_be_written():
    config, draft = (
        make_checkpoint.read_json(RELEASED / "config.json"),
        make_checkpoint.read_json(RELEASED / "mtp/config.json"),
    )
    target = make_checkpoint.parse_target(config)
    layout = Layout(fused_experts=True)
    total = sum(tensor.nbytes for tensor in target_tensors(target, layout, 0))
    total += sum(tensor.nbytes for tensor in draft_tensors(make_checkpoint.parse_draft(draft, target).layer, layout, 0))
    assert total == pytest.approx(320.3e9 + 983e6 + 4.7e9 + 983e6, rel=2e-3)  # a byte a weight, two for the tables


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--experts", "both"], "invalid choice: 'both'"),
        (["--shards", "0"], "shards must be from 1 to"),
        (["--shards", "9999"], "shards must be from 1 to"),
        (["--shards", "two"], "invalid int value: 'two'"),
        (["--config", "nowhere"], "nowhere does not exist"),
        (["--no-draft", "--mtp-alias", "iquest_q1_mtp"], "--mtp-alias names a draft, but none is written"),
        (["--text-from", "nowhere"], "nowhere is not a folder"),
        (["--unknown"], "unrecognized arguments: --unknown"),
    ],
)
def test_bad_arguments_end_in_one_sentence(tmp_path, capsys, arguments, says):
    try:
        code = main([*arguments, str(tmp_path / "m")])
    except SystemExit as exit_:
        code = exit_.code
    assert code == 2
    message = capsys.readouterr().err
    assert says in message
    assert message.count("\n") == 1
    assert not any(tmp_path.iterdir())


def test_an_occupied_folder_is_left_alone(tmp_path, capsys):
    (tmp_path / "m").mkdir()
    assert main([str(tmp_path / "m")]) == 0  # empty
    before = (tmp_path / "m" / "model.safetensors").read_bytes()
    assert main(["--seed", "1", str(tmp_path / "m")]) == 2
    assert "is not an empty folder" in capsys.readouterr().err
    assert (tmp_path / "m" / "model.safetensors").read_bytes() == before
    (tmp_path / "file").write_text("kept")
    assert main([str(tmp_path / "file")]) == 2
    assert (tmp_path / "file").read_text() == "kept"
    assert main([str(tmp_path / "file" / "below")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_nothing_is_left_of_a_failed_write(tmp_path, monkeypatch):
    class Full:
        free = 1000

    monkeypatch.setattr(make_checkpoint.shutil, "disk_usage", lambda _: Full)
    with pytest.raises(ConfigError, match="1000 free: choose another disk"):
        write_checkpoint(tmp_path / "m", *tiny_config())
    monkeypatch.undo()

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(make_checkpoint, "write_weights", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path / "m", *tiny_config())
    assert not any(tmp_path.iterdir())


def test_it_runs_as_a_script_from_anywhere(tmp_path):
    script = ROOT / "tools" / "make_checkpoint.py"
    subprocess.run([sys.executable, script, "--no-draft", "m"], cwd=tmp_path, check=True, timeout=60)
    Checkpoint.open(tmp_path / "m")

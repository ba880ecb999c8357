"""python -m cuq1.pack: a whole file or none, in bounded memory, and one sentence for whatever cannot be packed."""

import errno
import json
import os
import pty
import resource
import signal
import subprocess
import sys
import time
import tracemalloc
from io import FileIO
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from cuq1 import pack as packer
from cuq1.checkpoint import nanoqwen_writer
from cuq1.checkpoint.nanoqwen import Nanoqwen
from cuq1.pack import main, pack
from tests.checkpoint_files import edit
from tests.paths import NANO, ROOT
from tools.checkpoint_qwen2 import qwen2_config
from tools.make_checkpoint import write_qwen2_checkpoint

SMALL = qwen2_config("qwen2.5-coder-0.5b-tiny", vocab_size=300, bos_token_id=290, eos_token_id=292)
UNTIED = {**SMALL, "tie_word_embeddings": False}
QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    write_qwen2_checkpoint(base / "tied", SMALL, seed=1)
    write_qwen2_checkpoint(base / "untied", UNTIED, seed=1)
    write_qwen2_checkpoint(base / "sharded", SMALL, seed=1, shards=3)
    return base


@pytest.fixture
def copy(models, tmp_path):
    """A copy whose files can be changed."""

    def make(name="tied", **config):
        folder = tmp_path / "hf"
        folder.mkdir()
        for path in (models / name).iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        raw = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**raw, **config}))
        return folder

    return make


@pytest.fixture
def out(tmp_path):
    """Where to pack to: a folder of its own, so that whatever is left there is seen."""
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "m.nanoqwen"


@pytest.fixture
def refusal(out, capsys):
    """The one sentence of a packing that fails, which leaves nothing."""

    def refuse(folder, *options, target=out):
        before = sorted(out.parent.iterdir())
        assert main([str(folder), str(target), *options]) == 2
        stdout, stderr = capsys.readouterr()
        assert not stdout
        assert stderr.startswith("cuq1.pack: ")
        assert stderr.count("\n") == 1
        assert sorted(out.parent.iterdir()) == before
        return stderr

    return refuse


def test_the_command(models, out, capsys):
    assert main([str(models / "tied"), str(out)]) == 0
    stdout, stderr = capsys.readouterr()
    assert stdout.startswith(f"{out}: ")
    assert not stderr  # no progress bar where there is no terminal
    assert [path.name for path in out.parent.iterdir()] == ["m.nanoqwen"]
    assert not Nanoqwen.open(out).int4_head
    size = out.stat().st_size
    assert main([str(models / "tied"), str(out), "--lm-head", "int4"]) == 0  # in the place of the first
    assert Nanoqwen.open(out).int4_head
    assert size < out.stat().st_size  # a tied embedding is FP16 still
    assert out.stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_name_that_is_no_text(models, out, capsys):
    name = os.fsdecode(os.fsencode(out.parent) + b"/\xff.nanoqwen")
    assert main([str(models / "tied"), name]) == 0
    assert "/?.nanoqwen: 1.3 MB in" in capsys.readouterr().out
    Nanoqwen.open(name)


def test_an_int4_head_of_its_own_is_smaller(models, out):
    assert pack(models / "untied", out, True) < pack(models / "untied", out)


def test_shards_make_no_difference(models, out):
    pack(models / "tied", out)
    first = out.read_bytes()
    pack(models / "sharded", out)
    assert out.read_bytes() == first


def test_the_progress_bar_on_a_terminal(models, out):
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "cuq1.pack", str(models / "tied"), str(out)]
    environment = {**os.environ, "COLUMNS": "100"}
    done = subprocess.run(
        command, stderr=slave, stdout=subprocess.PIPE, cwd=ROOT, env=environment, check=True, timeout=60
    )
    shown = os.read(master, 1 << 16).decode()
    environment["COLUMNS"] = "40"
    subprocess.run(command, stderr=slave, stdout=subprocess.DEVNULL, cwd=ROOT, env=environment, check=True, timeout=60)
    narrow = os.read(master, 1 << 16).decode()
    os.close(slave)
    os.close(master)
    assert all(len(line) < 40 for line in narrow.replace("\x1b[K", "").strip().split("\r"))
    assert "\rm.nanoqwen [" in shown
    assert f"[{'#' * 30}] 100%" in shown
    assert "MB/s" in shown
    assert shown.endswith("\n")
    assert done.stdout.decode().startswith(str(out))


def test_memory_is_bounded(tmp_path, out):
    """A tensor of 134 MB in float32, and words and scales of the logits' matrix, in 40 MB."""
    raw = qwen2_config("qwen2.5-coder-0.5b-tiny", vocab_size=75_000)
    folder = write_qwen2_checkpoint(tmp_path / "hf", raw)
    tracemalloc.start()
    pack(folder, out, True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40e6
    assert Nanoqwen.open(out).lm_head.shape == (75_000, 448)


# what cannot be packed


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "llama"}, "config.json: model_type is 'llama', and qwen2 is computed here"),
        ({"architectures": ["Qwen2ForTokenClassification"]}, "and Qwen2ForCausalLM is computed here"),
        ({"use_sliding_window": True}, "use_sliding_window is True, which cuq1 does not compute"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling has type 'yarn'"),
        ({"num_hidden_layers": 3}, "lacks 12 tensors ('model.layers.2.input_layernorm.weight', "),
        ({"num_hidden_layers": 1}, "holds 12 unknown tensors ("),
        ({"intermediate_size": 305}, "has shape [304, 448], but config.json asks for [305, 448]"),
        ({"tie_word_embeddings": False}, "lacks the tensor 'lm_head.weight'"),
        ({"num_hidden_layers": 2**31 - 1}, "use files and config.json of one checkpoint"),
    ],
)
def test_other_models(copy, refusal, change, says):
    assert says in refusal(copy(**change))


def test_another_architecture(refusal):
    assert "config.json: model_type is 'iquest_q1', and qwen2 is computed here" in refusal(NANO)


def test_missing_files(copy, refusal, tmp_path):
    assert "config.json does not exist: point to a folder that holds a checkpoint" in refusal(tmp_path / "none")
    folder = copy("sharded")
    (folder / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors does not exist: the checkpoint is incomplete" in refusal(folder)
    (folder / "model.safetensors.index.json").unlink()
    assert "has neither model.safetensors nor model.safetensors.index.json" in refusal(folder)


def test_a_truncated_shard(copy, refusal):
    folder = copy()
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-2])
    assert "model.safetensors is truncated" in refusal(folder)


def test_a_shard_that_shrinks_while_it_is_read(copy, refusal, monkeypatch):
    folder = copy()
    real = packer.int4.pack

    def shrink(codes):
        os.truncate(folder / "model.safetensors", 4000)
        return real(codes)

    monkeypatch.setattr(packer.int4, "pack", shrink)
    assert "model.safetensors is truncated: it has become shorter" in refusal(folder)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        QUERY,
        "model.layers.0.self_attn.k_proj.bias",
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.1.post_attention_layernorm.weight",
        "model.norm.weight",
        "lm_head.weight",
    ],
)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite(copy, refusal, name, value):
    folder = copy("untied")
    edit(folder, spoil(name, value))
    assert f"model.safetensors: '{name}' holds values that are not finite: copy the checkpoint again" in refusal(folder)


def spoil(name, value):
    def change(tensors):
        dtype, shape, data = tensors[name]
        values = np.frombuffer(data, ml_dtypes.bfloat16).copy()
        values[-1] = value
        tensors[name] = [dtype, shape, values.tobytes()]

    return change


def test_values_beyond_fp16(copy, refusal, out):
    folder = copy()
    edit(folder, spoil("model.norm.weight", 65280.0))
    pack(folder, out)  # FP16's largest number is 65504
    out.unlink()
    edit(folder, spoil("model.norm.weight", 1e5))
    assert "'model.norm.weight' holds a value of 9.984e+04, which exceeds FP16" in refusal(folder)
    edit(folder, spoil("model.norm.weight", 1.0))
    edit(folder, spoil(QUERY, -1e6))
    assert f"'{QUERY}' holds a weight of 9.994e+05, whose INT4 scale exceeds FP16" in refusal(folder)


def test_weights_of_another_dtype(copy, refusal):
    folder = copy()
    edit(folder, lambda tensors: tensors.update({QUERY: ["F8_E4M3", [448, 448], bytes(448 * 448)]}))
    assert f"'{QUERY}' is F8_E4M3, and only BF16 or F16 or F32 is computed" in refusal(folder)


def test_text_files_that_are_none(copy, refusal):
    folder = copy()
    (folder / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "tokenizer.json is not valid JSON" in refusal(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    assert "chat_template.jinja is not UTF-8" in refusal(folder)
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.jinja").symlink_to("nowhere")
    assert "chat_template.jinja is a link to a file that does not exist" in refusal(folder)


def test_options(models, refusal):
    assert "--lm-head: invalid choice: 'int8'" in refusal(models / "tied", "--lm-head", "int8")


# where it cannot be written


def test_places_that_cannot_be_written(models, refusal, tmp_path, out):
    assert "exists and is no file: choose another name" in refusal(models / "tied", target=tmp_path)
    assert "exists and is no file: choose another name" in refusal(models / "tied", target="/dev/null")
    assert "cannot be written (No such file or directory)" in refusal(models / "tied", target=tmp_path / "no" / "m")
    assert "cannot be written (File name too long)" in refusal(models / "tied", target=out.parent / ("m" * 256))
    assert "cannot be written" in refusal(models / "tied", target="a\0b")
    assert "cannot be written" in refusal(models / "tied", target=models / "tied" / "config.json" / "m")


def test_the_checkpoints_own_files_are_not_replaced(copy, refusal, capsys, monkeypatch):
    folder = copy("sharded")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for name in before:
        assert "is there already, in the checkpoint's own folder" in refusal(folder, target=folder / name)
    monkeypatch.chdir(folder)
    assert "is there already" in refusal(".", target="model-00002-of-00003.safetensors")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    for name in ("m.nanoqwen", "m.nanoqwen", "m"):  # a packed file beside them is
        assert main([str(folder), str(folder / name)]) == 0
    other = folder.parent / "model-00002-of-00003.safetensors"  # and one of such a name elsewhere
    other.write_bytes(b"other")
    assert main([str(folder), str(other)]) == 0
    Nanoqwen.open(other)


def test_a_folder_without_a_tokenizer(copy, out, capsys):
    folder = copy()
    (folder / "tokenizer.json").unlink()
    assert main([str(folder), str(out)]) == 0
    expected = f"cuq1.pack: {folder} has no tokenizer.json, so the packed model takes token ids alone\n"
    assert capsys.readouterr().err == expected
    assert "tokenizer.json" not in Nanoqwen.open(out).files


def test_not_enough_disk(models, refusal, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(nanoqwen_writer.shutil, "disk_usage", lambda path: usage)
    message = refusal(models / "tied")
    assert "its disk has 1000 free: free some space, or choose another disk" in message


@pytest.mark.parametrize("at", [1, 200_000, 1_200_000])
def test_a_disk_that_is_full_before_the_end(models, out, at):
    """The kernel refuses to let the file grow."""
    out.write_bytes(b"an earlier file")

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (at, at))

    command = [sys.executable, "-m", "cuq1.pack", str(models / "tied"), str(out)]
    done = subprocess.run(command, capture_output=True, cwd=ROOT, check=False, timeout=60, preexec_fn=limit)
    assert done.returncode == 2
    assert done.stderr.decode().startswith(f"cuq1.pack: '{out}' cannot be written (File too large): check its folder")
    assert done.stderr.count(b"\n") == 1
    assert [path.name for path in out.parent.iterdir()] == ["m.nanoqwen"]
    assert out.read_bytes() == b"an earlier file"


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_that_refuses_at_the_end(models, out, refusal, monkeypatch, call):
    out.write_bytes(b"an earlier file")

    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if call == "fsync":
        monkeypatch.setattr(nanoqwen_writer.os, "fsync", fail)
    else:
        monkeypatch.setattr(Path, "replace", fail)
    assert "cannot be written (No space left on device)" in refusal(models / "tied")
    assert out.read_bytes() == b"an earlier file"


def test_writes_that_take_only_a_part(models, out, monkeypatch):
    pack(models / "tied", out)
    whole = out.read_bytes()

    class Short(FileIO):
        def write(self, data):
            return super().write(data[:70_001])

    monkeypatch.setattr(nanoqwen_writer, "FileIO", Short)
    pack(models / "tied", out)
    assert out.read_bytes() == whole


@pytest.mark.parametrize("calls", [0, 1, 7, 40])
def test_an_interrupt_leaves_what_was_there(models, out, calls):
    out.write_bytes(b"an earlier file")
    left = iter(range(calls))

    def interrupt(done, total):
        if next(left, None) is None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(models / "tied", out, progress=interrupt)
    assert [path.name for path in out.parent.iterdir()] == ["m.nanoqwen"]
    assert out.read_bytes() == b"an earlier file"


def test_the_check_of_what_is_left_sees_half_a_file(models, out, monkeypatch):
    """The negative control: without its clean-up, a packing that fails does leave something."""
    monkeypatch.setattr(Path, "unlink", lambda self, missing_ok: None)
    with pytest.raises(ZeroDivisionError):
        pack(models / "tied", out, progress=lambda done, total: 1 / 0)
    assert len(list(out.parent.iterdir())) == 1


SLOW = """
import runpy, sys, time
from cuq1.checkpoint import nanoqwen_writer
pad = nanoqwen_writer._Body.pad
def slow(body, position):
    pad(body, position)
    if position > 10_000:
        print("busy", flush=True)
        time.sleep(20)
nanoqwen_writer._Body.pad = slow
sys.argv[0] = "cuq1.pack"
runpy.run_module("cuq1.pack", run_name="__main__")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing(models, out, number):
    command = [sys.executable, "-c", SLOW, str(models / "tied"), str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout.readline() == b"busy\n"
        assert len(list(out.parent.iterdir())) == 1  # half a file
        process.send_signal(number)
        start = time.monotonic()
        assert process.wait(15) == 130
        assert time.monotonic() - start < 10
        assert not process.stderr.read()
    assert not list(out.parent.iterdir())

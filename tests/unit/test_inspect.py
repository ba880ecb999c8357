"""python -m cuq1.inspect, as a user meets it."""

import errno
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cuq1.cli import BROKEN_PIPE
from cuq1.inspect.__main__ import main, parse_bandwidth
from tests.checkpoint_files import edit
from tests.paths import NANO, RELEASED, ROOT
from tools.make_checkpoint import Layout, tiny_config, write_checkpoint


def shown(capsys, *arguments):
    assert main([str(argument) for argument in arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def lines(text):
    return [" ".join(line.split()) for line in text.splitlines()]


def test_the_released_config_reproduces_the_table_without_weights(capsys):
    text = shown(capsys, RELEASED, "--tp", 8)
    for line in (
        "8 1.96 GB 0.43 2.70 GB 0.60",
        "11 2.42 GB 0.54 3.16 GB 0.70",
        "37.7 6.53 GB 1.45 7.27 GB 1.62",
        "48 8.11 GB 1.80 8.86 GB 1.97",
        "attention projections, a layer 5.51 MB",
        "router, a layer 1.18 MB",
        "one expert 1.77 MB",
        "dense MLP, a layer 14.2 MB",
        "lm_head 123 MB",
        "one draft depth 149 MB",
        "KV of a token, each layer 512 B",
        "1024 46.1 MB 0.01",
        "196608 2.65 GB 0.59",
        "layers 88: 25 full, 63 sliding; 1 dense, 87 MoE",
        "parameters 320.3 B, 14.9 B active a token",
    ):
        assert line in lines(text)
    assert "tensors" not in text
    assert all(line == line.rstrip() and len(line) < 100 for line in text.splitlines())


def test_a_checkpoint_lists_its_tensors(capsys):
    text = lines(shown(capsys, NANO, "--tp", 2))
    for line in (
        "target: 1059 tensors, 26.4 MB",
        "experts 480 15.7 MB F8_E4M3",
        "routers 5 164 kB F32",
        "block scales 507 5.38 kB F32",
        "draft: 215 tensors, 8.56 MB",
        "one rank of 2 holds",
    ):
        assert line in text
    assert not any(line.startswith("other") for line in text)


def test_json_adds_up(capsys, tmp_path):
    layout = Layout(fused_experts=True, training_draft=True, router_name="gate")
    folder = write_checkpoint(tmp_path / "m", *tiny_config(), layout, shards=2)
    found = json.loads(shown(capsys, folder, "--tp", 4, "--context", 100, "--bandwidth", "2TB/s", "--json"))
    kinds = {row["kind"]: row for row in found["tensors"]["target"]}
    assert "other" not in kinds
    assert kinds["training's draft (not used)"]["tensors"] == 2
    assert kinds["experts"]["tensors"] == 6
    assert kinds["routers"]["tensors"] == 3
    files = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert 0 < files - sum(row["bytes"] for row in kinds.values()) < 20_000  # the headers
    assert found["kv"]["read"] == [
        {"context": 100, "bytes": (2 * 100 + 2 * 24) * 128, "ms": (2 * 100 + 2 * 24) * 128 / 2e9}
    ]
    assert found["floor"]["bandwidth"] == 2e12
    for row in found["floor"]["rounds"]:
        assert row["round_bytes"] == row["target_bytes"] + 5 * found["floor"]["part_bytes"]["one draft depth"]
        assert row["round_ms"] == pytest.approx(row["round_bytes"] / 2e9)
    assert [row["distinct_experts"] for row in found["floor"]["rounds"]] == [2, 8]


def test_no_draft_no_draft_columns(capsys, tmp_path):
    target, _ = tiny_config()
    text = shown(capsys, write_checkpoint(tmp_path / "m", target, None))
    assert "draft" not in text.partition("\n")[2]  # the first line is the path
    assert "distinct experts a layer" in text


@pytest.mark.parametrize(
    "value", ["4.5e12", "4.5TB/s", "4.5 TB/s", "4500 GB/s", "4500GB", "4.5E12", "4.5T", "4500000MB/s", "4.5e3G"]
)
def test_bandwidths(value):
    assert parse_bandwidth(value) == pytest.approx(4.5e12)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "fast",
        "0",
        "1e-320",
        "0.999",
        "0.9B/s",
        "-1",
        "-1TB/s",
        "nan",
        "inf",
        "1e999",
        "1e308T",
        "1..2",
        "4 TiB/s",
        "4.5TB/h",
        "900 Gb/s",
        "4.5tb/s",
        "8b",
    ],
)
def test_bandwidths_that_are_none(value):
    with pytest.raises(ValueError, match="is not a bandwidth"):
        parse_bandwidth(value)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere"], "nowhere/config.json does not exist"),
        ([str(NANO / "config.json")], "is one file of a checkpoint: point to its folder"),
        (
            [str(NANO), "--tp", "8"],
            "tp 8 does not divide this model (num_attention_heads is 12): choose one of 1, 2, 4",
        ),
        ([str(NANO), "--tp", "0"], "tp 0 must be from 1 to"),
        ([str(NANO), "--tp", "two"], "invalid int value: 'two'"),
        ([str(NANO), "--context", "0"], "context 0 is outside this model's: choose one from 1 to 65536"),
        ([str(NANO), "--context", "65537"], "context 65537 is outside"),
        (
            [str(NANO), "--bandwidth", "fast"],
            "'fast' is not a bandwidth of at least 1 byte/s: write bytes a second, as 4.5e12 or 4.5TB/s",
        ),
        ([], "the following arguments are required: model"),
    ],
)
def test_bad_input_ends_in_one_sentence(capsys, arguments, says):
    try:
        code = main(arguments)
    except SystemExit as exit_:
        code = exit_.code
    captured = capsys.readouterr()
    assert code == 2
    assert says in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize("lost", ["model.safetensors", "mtp/model.safetensors", "mtp/config.json"])
def test_half_a_checkpoint_is_no_config_without_weights(capsys, tmp_path, lost):
    folder = write_checkpoint(tmp_path / "m", *tiny_config())
    (folder / lost).unlink()
    assert main([str(folder)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_slowest_memory_has_finite_times(capsys):
    found = json.loads(shown(capsys, NANO, "--bandwidth", "1", "--json"), parse_constant=pytest.fail)
    assert found["floor"]["bandwidth"] == 1
    assert found["floor"]["rounds"][0]["round_ms"] == found["floor"]["rounds"][0]["round_bytes"] * 1e3


def test_a_folder_that_may_not_be_listed_is_named(capsys, monkeypatch):
    def denied(path):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", denied)
    assert main([str(RELEASED)]) == 2
    assert f"{RELEASED} cannot be read (Permission denied): check its permissions" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_named(capsys, tmp_path):
    folder = write_checkpoint(tmp_path / "m", *tiny_config())
    edit(folder, lambda tensors: tensors.pop("model.norm.weight"))
    assert main([str(folder)]) == 2
    assert "lacks the tensor 'model.norm.weight'" in capsys.readouterr().err


def run(*arguments, **options):
    command = [sys.executable, "-m", "cuq1.inspect", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False, **options)


def test_it_runs_as_a_module():
    done = run(RELEASED, "--tp", 8)
    assert (done.returncode, done.stderr) == (0, "")
    assert "320.3 B" in done.stdout
    assert run("nowhere").returncode == 2


def test_a_closed_pipe_is_quiet():
    process = subprocess.Popen(
        [sys.executable, "-m", "cuq1.inspect", str(NANO), "--json"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(60) == BROKEN_PIPE
    process.stderr.close()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names")
def test_a_folder_whose_name_is_not_utf8(tmp_path):
    folder = shutil.copytree(RELEASED, tmp_path / "m\udcff")
    done = run(folder)
    assert (done.returncode, done.stderr) == (0, "")

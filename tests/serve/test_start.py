"""What the server says before it loads."""

import json
import logging
import shutil

import pytest

from cuq1.description import Description
from cuq1.serve import run
from tests.paths import NANO


def asking(folder, **settings):
    """Nano's description with more in its generation_config.json."""
    for path in NANO.iterdir():
        if path.suffix in {".json", ".jinja"}:
            shutil.copy(path, folder)
    (folder / "mtp").mkdir()
    for path in (NANO / "mtp").glob("*.json"):
        shutil.copy(path, folder / "mtp")
    found = json.loads((NANO / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(found | settings))
    return Description.open(folder)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"repetition_penalty": 1.1}, "not applied, though the checkpoint asks for it: repetition_penalty 1.1"),
        ({"repetition_penalty": 1}, None),
    ],
)
def test_what_the_checkpoint_asks_in_vain_is_said(tmp_path, monkeypatch, caplog, settings, says):
    monkeypatch.setattr(run.log, "propagate", True)
    with caplog.at_level(logging.INFO, "cuq1.serve"):
        run.note_unapplied(asking(tmp_path, **settings))
    assert caplog.messages == ([] if says is None else [says])

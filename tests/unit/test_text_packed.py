"""Tokenizer and template of a packed file: the same as those of the folder that it was packed from."""

import pytest

from cuq1.checkpoint.nanoqwen import Nanoqwen
from cuq1.errors import TextError
from cuq1.pack import pack
from cuq1.text import ChatTemplate, PackedText, Tokenizer
from tools.checkpoint_qwen2 import qwen2_config
from tools.make_checkpoint import write_qwen2_checkpoint

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "def f(x): return <|im_end|> x \u00e9"},
    {"role": "assistant", "content": "result"},
    {"role": "user", "content": "and now?"},
]


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """A folder, and its packed text."""
    base = tmp_path_factory.mktemp("packed")
    folder = write_qwen2_checkpoint(base / "hf", qwen2_config("qwen2.5-coder-0.5b-tiny"))
    pack(folder, base / "m.nanoqwen")
    packed = Nanoqwen.open(base / "m.nanoqwen")
    return folder, PackedText(packed.path, packed.files)


def test_the_same_tokens_and_prompts(both):
    tokenizers = [Tokenizer.load(source, 512) for source in both]
    templates = [ChatTemplate.load(*pair) for pair in zip(both, tokenizers, strict=True)]
    ids = [template.encode(TALK) for template in templates]
    assert ids[0] == ids[1]
    assert ids[0].count(tokenizers[0].control_tokens["<|im_end|>"]) == 4  # the typed one is text
    assert tokenizers[1].decode(ids[1]) == templates[0].render(TALK)
    assert tokenizers[1].encode(" return the result", control=False) == [
        tokenizers[0].encode(word, control=False)[0] for word in (" return", " the", " result")
    ]


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_what_is_missing_or_broken_is_named(both, name):
    _, packed = both
    tokenizer = Tokenizer.load(packed, 512)

    def load(source):
        Tokenizer.load(source, 512)
        ChatTemplate.load(source, tokenizer)

    load(packed)
    without = PackedText(packed.path, {key: value for key, value in packed.files.items() if key != name})
    wanted = name if name == "tokenizer.json" else "chat_template.jinja"
    again = "into the folder that this was packed from, and pack it again"
    with pytest.raises(TextError, match=rf"m\.nanoqwen: {wanted} is missing: copy .* {again}"):
        load(without)
    for content in (b"{", b"\xff"):
        with pytest.raises(TextError, match=rf"m\.nanoqwen: {name} (is not JSON|cannot be read) .*: fetch"):
            load(PackedText(packed.path, {**packed.files, name: content}))

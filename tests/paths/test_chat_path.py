"""Chats of a model whose template is missing or broken: refused by name, and raw prompts go on."""

from __future__ import annotations

import pytest

from mzd.daemon.text import read_text
from mzd.errors import MzdError
from tests.paths import harness

KEY = "tokenizer.chat_template"
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("template", "code", "said"),
    [
        (None, "no_chat_template", "tokenizer.chat_template"),
        ("{% for m in messages %}\n{{ m.role }", "invalid_template", "line 2"),
    ],
)
async def test_a_chat_without_a_working_template_is_refused_by_name(
    device, fixture_store, tmp_path, monkeypatch, template, code, said
):
    def read_text_with(metadata):
        others = {key: value for key, value in metadata.items() if key != KEY}
        return read_text(others if template is None else others | {KEY: template})

    monkeypatch.setattr(harness, "read_text", read_text_with)
    async with harness.open_daemon(device, fixture_store, tmp_path) as daemon:
        with pytest.raises(MzdError, match=said) as caught:
            await daemon.call("generate", context="c", messages=MESSAGES, max_tokens=1)
        assert caught.value.code == code
        assert (await daemon.generate("c", [5, 6, 7], 2))["tokens"]

"""Owns what turns conversations into tokens and back: the tokenizer and the chat template of a model file."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mzd.errors import MzdError
from mzd.model.chat_template import ChatTemplate
from mzd.model.tokenizer import Tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Text:
    """A model's tokenizer, and its chat template; in place of one that the file lacks, or has broken, why."""

    tokenizer: Tokenizer
    template: ChatTemplate | MzdError


def read_text(metadata: Mapping[str, Any]) -> Text:
    """Build both from the file's metadata. A broken template is a warning: raw prompts work without it.

    Raises:
        FormatError: the tokenizer cannot be used.
    """
    tokenizer = Tokenizer.from_metadata(metadata)
    try:
        return Text(tokenizer, ChatTemplate.from_metadata(metadata, tokenizer))
    except MzdError as error:
        log.warning("chat: %s", error)
        return Text(tokenizer, error)

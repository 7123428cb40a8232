"""The bodies of POST /tokenize and /detokenize, as in vLLM; and of /v1/corpora and /v1/draft."""

from __future__ import annotations

from typing import Any

from eyas.serve.protocol.chat import TemplateFields
from eyas.serve.protocol.fields import Body

__all__ = ["CorpusBody", "DetokenizeBody", "DraftBody", "TokenizeBody"]


class TokenizeBody(TemplateFields):
    """A text, or a conversation with the fields of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class CorpusBody(Body):
    """One text or several, as strings or as token ids."""

    model: str | None = None
    input: str | list[int] | list[str] | list[list[int]]


class DraftBody(Body):
    """A head: a folder of the server's machine, or a name."""

    path: str | None = None
    name: str | None = None


class DetokenizeBody(Body):
    """Token ids."""

    model: str | None = None
    tokens: list[int]

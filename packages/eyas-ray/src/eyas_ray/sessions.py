"""Derive a session's name from the body of a request.

Requests of one session begin with the same tokens, whose keys and values the replica that answered the last one still
holds. A conversation is known by its beginning: everything up to and including the user's first message. So
clients need to send nothing for it; one that does (`prompt_cache_key`, or the header of `gate.py`) is followed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["previous_response", "session_of"]

PARSED_BYTES = 2**20  # a larger body is known by its first bytes: the proxy must not stop to read it
FIRST_BYTES = 4096
FIRST_CHARACTERS = 512  # characters of a prompt by which its session is known
FIRST_IDS = 128
BEGINNINGS = ("system", "instructions", "tools")
PROMPTS = ("messages", "input", "prompt", "input_prefix")
NAMES = ("prompt_cache_key", "session_id")  # OpenAI's field, and one of vLLM and SGLang
BILLING = re.compile(rb'x-anthropic-billing-header:[^"\\]*')  # Claude Code counts its requests there


def session_of(body: bytes) -> str | None:
    """Return the name of a request's session; None if its body tells nothing of one."""
    if len(body) > PARSED_BYTES:
        return _digest(BILLING.sub(b"", body[: 2 * FIRST_BYTES])[:FIRST_BYTES])
    fields = _fields(BILLING.sub(b"", body))
    for name in NAMES:
        if isinstance(key := fields.get(name), str) and key:
            return _digest(key.encode("utf-8", "surrogatepass"))
    prompt = next((fields[name] for name in PROMPTS if fields.get(name)), None)
    if prompt is None:
        return None
    begins = [_beginning(prompt), *(fields.get(name) for name in BEGINNINGS)]
    return _digest(json.dumps(begins, sort_keys=True).encode())


def previous_response(body: bytes) -> str | None:
    """Return the id of the response that a request of /v1/responses goes on from."""
    found = _fields(body).get("previous_response_id") if len(body) <= PARSED_BYTES else None
    return found if isinstance(found, str) else None


def _fields(body: bytes) -> Mapping[str, Any]:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return {}  # the replica says what is wrong with it
    return fields if isinstance(fields, dict) else {}


def _beginning(prompt: Any) -> Any:
    """Return the part of a prompt that later requests of its session repeat."""
    if isinstance(prompt, str):
        return prompt[:FIRST_CHARACTERS]
    if not isinstance(prompt, list):
        return None
    if not all(isinstance(part, Mapping) for part in prompt):
        return _beginning(prompt[0]) if isinstance(prompt[0], str | list) else prompt[:FIRST_IDS]
    return _up_to_user(prompt)


def _up_to_user(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return the messages up to the user's first one."""
    first = next((i for i, message in enumerate(messages) if message.get("role") == "user"), 0)
    return [{"role": message.get("role"), "content": message.get("content")} for message in messages[: first + 1]]


def _digest(name: bytes) -> str:
    return hashlib.sha256(name).hexdigest()[:32]

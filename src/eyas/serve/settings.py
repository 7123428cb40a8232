"""Settings of one server: its name for clients, and its limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eyas.core.prompts import Budget

__all__ = ["Settings"]


@dataclass(frozen=True)
class Settings:
    """The options of a server that the engine and the endpoints read.

    Attributes:
        name: the model's name for clients.
        rows: sequences that are decoded together, over all methods.
        queue: sequences that may wait for a row; a request beyond it gets status 429.
        max_model_len: tokens of a prompt and its answer together.
        max_tokens: tokens of one answer, and the default of chats.
        prefill_budget: prompt tokens that are read between two cycles; "auto": see `core.prompts`.
        max_sequences: prompts x samples of one request.
        timeout: seconds after which a request is given up.
        keep_alive: seconds of silence after which a stream sends a comment.
        max_body_bytes: the largest body of a request.
        remembered: responses that /v1/responses remembers.
        admin_key: the key that may replace the head; None: nobody may.
    """

    name: str
    rows: int = 8
    queue: int = 256
    max_model_len: int = 4096
    max_tokens: int = 4096
    prefill_budget: Budget = "auto"
    max_sequences: int = 128
    timeout: float = 600.0
    keep_alive: float = 10.0
    max_body_bytes: int = 16 * 2**20
    remembered: int = 256
    admin_key: str | None = field(default=None, repr=False)

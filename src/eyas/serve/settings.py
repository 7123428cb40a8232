"""The name and the limits of one server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from eyas.serve.errors import bad_request

if TYPE_CHECKING:
    from eyas.core.prompts import Budget

UNLIMITED = -1  # the word of llama.cpp and LM Studio for an answer as long as there is room


@dataclass(frozen=True)
class Settings:
    """The options of a server that the engine and the endpoints read."""

    name: str  # the model's name for clients
    rows: int = 8  # sequences that are decoded together, over all methods
    queue: int = 256  # sequences that may wait for a row; a request beyond it gets status 429
    max_model_len: int = 4096  # tokens of a prompt and its answer together
    max_tokens: int = 4096  # tokens of one answer, and the default of chats
    prefill_budget: Budget = "auto"  # prompt tokens that are read between two cycles; "auto": see `core.prompts`
    max_sequences: int = 128  # prompts x samples of one request
    timeout: float = 600.0  # seconds after which a request is given up
    keep_alive: float = 10.0  # seconds of silence after which a stream sends a comment
    max_body_bytes: int = 16 * 2**20
    remembered: int = 256  # responses that /v1/responses remembers
    admin_key: str | None = field(default=None, repr=False)  # may replace the head; None: nobody may

    def check_count(self, prompts: int, n: int) -> None:
        """Refuse a request for more sequences than the server takes at once."""
        if prompts * n > self.max_sequences:
            raise bad_request(
                f"{prompts} prompts x {n} samples are more than {self.max_sequences}: ask for fewer at once", "n"
            )

    def answer_tokens(self, prompt: int, asked: int | None, default: int | None = None) -> int:
        """Return the tokens that an answer may have: at most the server's limit and the room after the prompt. Clients
        know neither, so their answer is cut there. A prompt without room is refused in words by which clients know it.
        """
        context = self.max_model_len
        if prompt >= context:
            message = (
                f"This model's maximum context length is {context} tokens. However, your messages resulted in {prompt} "
                f"tokens (prompt is too long: {prompt} tokens > {context - 1} maximum). Please reduce the length of the "
                "messages."
            )
            raise bad_request(message, "messages", code="context_length_exceeded")
        room = min(self.max_tokens, context - prompt)
        wanted = default if asked is None else asked
        return room if wanted in (None, UNLIMITED) else min(wanted, room)

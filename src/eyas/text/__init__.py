"""Text and token ids, both ways.

_messages.py   what clients and data files write as messages, in one form
_prompts.py    chats by the template, and raw prompts, to token ids
forms.py       other forms of a chat, for templates that refuse the one it has
_pieces.py     token ids to text, token by token; stop strings
"""

from eyas.text._messages import REASONING, ROLES, check_messages, read_arguments, template_keywords
from eyas.text._pieces import Detokeniser, StopPiece, StopStrings, token_bytes
from eyas.text._prompts import (
    Span,
    encode,
    encode_part,
    for_template,
    has_place_for_tools,
    render,
    reply_message,
    write_chat,
)

__all__ = [
    "REASONING", "ROLES", "Detokeniser", "Span", "StopPiece", "StopStrings", "check_messages", "encode", "encode_part",
    "for_template", "has_place_for_tools", "read_arguments", "render", "reply_message", "template_keywords", "token_bytes",
    "write_chat",
]  # fmt: skip

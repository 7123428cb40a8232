"""Load a target with a drafter (_loading.py); generate, stream, chat (_llm.py). They add up the engine's Steps.

    llm = eyas.load("meta-llama/Llama-3.1-8B-Instruct", draft="path/or/hub-id")
    llm.generate("Why is the sky blue?").text

This module knows prompts, tokenizers and results; it knows no tree and no model family.
"""

from eyas.api._llm import LLM, Chat, new_policy
from eyas.api._loading import LOAD_KEYWORDS, load
from eyas.api._results import Piece, Result, Stats, Stream, TextReader
from eyas.arguments import Prompt

__all__ = [
    "LLM", "LOAD_KEYWORDS", "Chat", "Piece", "Prompt", "Result", "Stats", "Stream", "TextReader", "load", "new_policy",
]  # fmt: skip

"""Prompts that ask for the middle of a text: `suffix` of /v1/completions, and /infill. A model that was trained to fill
in reads (prefix mark) before (suffix mark) after (middle mark), and then writes the middle (Bavarian et al., arXiv
2207.14255).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eyas.serve.errors import bad_request
from eyas.text import encode, encode_part

# the three marks, by family: Qwen2.5-Coder, CodeGemma; StarCoder, Granite; SantaCoder; DeepSeek-Coder; Code Llama; GLM
MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
)
FILES = ("<|file_sep|>", "<file_sep>", "<|file_separator|>")  # before the name of a further file
ENDS = (*FILES, "<|fim_pad|>", "<fim_pad>", "<|repo_name|>", "<repo_name>", "<|endoftext|>", "▁<EOT>")  # end the middle


@dataclass(frozen=True)
class Middle:
    """A prompt that asks for the middle, and its ends in addition to the model's own end."""

    ids: tuple[int, ...]
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]

    def end(self, keywords: dict[str, Any]) -> None:
        """Add the ends of a text in the middle to the keywords of a request."""
        given = keywords.get("stop") or ()
        if stops := [*([given] if isinstance(given, str) else given), *self.stop]:
            keywords["stop"] = stops
        keywords["stop_token_ids"] = self.stop_token_ids.union(keywords.get("stop_token_ids") or ())


def middle_of(tokenizer: Any, before: str, after: str, files: Sequence[tuple[str, str]] = ()) -> Middle:
    """Return the prompt for the text between two texts. `files`: names and texts of further files."""
    vocabulary = tokenizer.get_vocab()
    marks = next((names for names in MARKS if all(name in vocabulary for name in names)), None)
    if marks is None:
        raise bad_request("this model cannot fill in: its tokenizer has no tokens for a suffix; leave it out", "suffix")
    prefix, suffix, middle = (vocabulary[name] for name in marks)
    file_mark = [vocabulary[name] for name in FILES if name in vocabulary][:1]
    ids = _opening(tokenizer)
    for name, text in files:
        ids += [*file_mark, *encode_part(tokenizer, f"{name}\n{text}\n" if file_mark else f"{text}\n\n", "input_extra")]
    ids += [*(file_mark if files else ()), prefix, *encode_part(tokenizer, before, "the text before")]
    ids += [suffix, *encode_part(tokenizer, after, "the suffix"), middle]
    ends = [name for name in (*ENDS, *marks) if name in vocabulary]
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    # an answer leaves out special tokens; a mark that is an ordinary token must be cut off
    return Middle(
        tuple(ids),
        tuple(name for name in ends if name not in special),
        frozenset(vocabulary[name] for name in ends if name in special),
    )


def _opening(tokenizer: Any) -> list[int]:
    first = encode(tokenizer, "a")[:1]
    return first if first == [tokenizer.bos_token_id] else []

"""Measure what constraints cost a cycle: the masks of draft trees by both grammar libraries.

    python runs/masks.py --output docs/results/masks.json

The trees are random, over random places of random texts of one JSON schema; about half of the nodes
are allowed. A vocabulary is the embedded model's, the other one 128,000 tokens that are joined from
two of its tokens. "walk" is the library's part, "mask" the whole call of `Constraint.mask`, "apply"
the masking of the scores. Times are of one thread, in microseconds: medians and the 95th
percentile. The first masks of a grammar's states take longer: they are in "first", the same trees
before they were seen.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from _common import numbers, parser, quantiles, run, write
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eyas import tiny
from eyas.grammar import GrammarConstraint, Grammars, structure_of

LIBRARIES = ("llguidance", "xgrammar")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "kind": {"enum": ["cat", "dog", "bird"]},
        "friends": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "kind", "friends"],
    "additionalProperties": False,
}
STRUCTURE = structure_of({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}})


def joined_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with so many tokens: the embedded one's, and pairs of them."""
    vocab, rng = dict(tiny.tokenizer().get_vocab()), random.Random(0)
    pieces = [piece for piece in vocab if not piece.startswith("<|")]
    while len(vocab) < size:
        vocab.setdefault(rng.choice(pieces) + rng.choice(pieces), len(vocab))
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>")


def text_of(new: Callable[[], GrammarConstraint], rng: random.Random, most: int) -> list[int]:
    """Random tokens of the schema, at most so many."""
    made, ids = new(), list[int]()
    while not made.finished and len(ids) < most:
        ids.append(rng.choice(made.mask([-1], [0])[0].nonzero().flatten().tolist()))
        made.accept(ids[-1:])
    return ids if not made.finished else ids[:-1]


def tree_of(made: GrammarConstraint, nodes: int, vocab: int, rng: random.Random) -> tuple[list[int], list[int]]:
    """The parents and tokens of a random tree at the constraint's place."""
    parents, tokens = [-1], [0]
    while len(parents) < nodes:
        parent = rng.choice(range(max(0, len(parents) - 8), len(parents)))
        allowed = made.mask(parents, tokens)[parent].nonzero().flatten().tolist()
        tokens.append(rng.choice(allowed) if rng.random() < 0.6 else rng.randrange(vocab))
        parents.append(parent)
    return parents, tokens


def timed(call: Callable[[], Any]) -> float:
    """Microseconds of a call."""
    began = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - began)


def measure(library: str, tokenizer: Any, vocab: int, nodes: list[int], places: int, repeats: int) -> dict[str, Any]:
    """The times of one library with one vocabulary, by number of nodes."""
    assert STRUCTURE is not None
    made_by = Grammars(tokenizer, vocab, library)
    began = time.perf_counter()
    made_by.constraint(STRUCTURE, {tokenizer.eos_token_id})
    setup_ms = 1e3 * (time.perf_counter() - began)

    def new() -> GrammarConstraint:
        return made_by.constraint(STRUCTURE, {tokenizer.eos_token_id})

    result: dict[str, Any] = {"setup_ms": round(setup_ms, 1)}
    for count in nodes:
        rng, times = random.Random(count), {name: list[float]() for name in ("first", "walk", "mask", "apply")}
        for _ in range(places):
            ids = text_of(new, rng, rng.randrange(40))
            planner, made = new(), new()
            planner.accept(ids)
            parents, tokens = tree_of(planner, count, vocab, rng)
            made.accept(ids)
            scores_NV = torch.randn(count, vocab)
            children = [[i for i, parent in enumerate(parents) if parent == node] for node in range(count)]
            for repeat in range(repeats):
                made._root = None
                times["first" if repeat == 0 else "mask"].append(timed(partial(made.mask, parents, tokens)))
                bits_NW = torch.full((count, made._vocabulary.words), -1, dtype=torch.int32)
                times["walk"].append(timed(partial(made._matcher.walk, children, tokens, bits_NW)))
                mask_NV = made.mask(parents, tokens)
                times["apply"].append(timed(lambda s=scores_NV, m=mask_NV: s.masked_fill_(~m, -torch.inf)))
        result[str(count)] = {
            name: dict(zip(("median", "p95"), quantiles(values, 0.5, 0.95, digits=1), strict=True))
            for name, values in times.items()
        }
    return result


def main() -> None:
    args = parser(__doc__, nodes="1,8,16,32,60", vocab=128_000, places=20, repeats=20).parse_args()
    torch.set_num_threads(1)
    vocabularies = {"embedded": tiny.tokenizer(), str(args.vocab): joined_tokenizer(args.vocab)}
    results = {
        name: {
            library: measure(library, tokenizer, len(tokenizer), numbers(args.nodes), args.places, args.repeats)
            for library in LIBRARIES
        }
        for name, tokenizer in vocabularies.items()
    }
    write(args.output, {"schema": SCHEMA, "microseconds": results})


if __name__ == "__main__":
    run(main)

"""Compares the logits of passes with those of plain decoding, bit by bit.

    plain decoding      one row, one token a pass, one thread, from an empty cache: `Referee`
    other passes        prompts in chunks, trees, levels of trees, batches, kept prefixes: PASSES
    ids                 the engine with trees, batches and kept prefixes, greedy and sampled: `compare_ids`

Each of PASSES lets a target read texts in its own way and yields (the ids up to a token, the logits behind it).
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

import zoo
from eyas import drafters, kernels
from eyas.core.engine import Decoder, Request
from eyas.core.options import build_options
from eyas.core.target import Target, TargetSession
from eyas.core.tree import Tree
from eyas.drafters import Drafter
from eyas.formats import WeightFormat
from eyas.runners._threads import Threads
from eyas.runners.cpu import CpuRunner
from reference import SAMPLINGS, Oracle, run

__all__ = [
    "MODELS", "MODES", "PASSES", "Counts", "Referee", "by_kernels", "compare", "compare_ids", "model", "name_of", "runnable",
]  # fmt: skip

T = TypeVar("T")
Ids = tuple[int, ...]
Found = Iterator[tuple[Ids, Tensor]]
Read = Callable[[Target, random.Random, float], Found]
CONTEXT = 1024
TREE = {"tree.nodes": 14, "tree.depth": 4, "tree.branch": 3}
NEW = 20  # tokens of an answer

# What the kernels treat differently: norms of heads, biases, windows (all layers, or every other one), head sizes, heads
# that share keys (26: more than are read together), inputs after which rows are copied (512), or pass in blocks (2816),
# sinks and experts; heads of two sizes, shared keys, numbers of tokens for layers (Gemma 4).
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 16, "intermediate_size": 96},
    "mistral": {"head_dim": 32, "intermediate_size": 512, "sliding_window": zoo.WINDOW},
    "qwen2": {
        "head_dim": 64, "num_attention_heads": 6, "num_key_value_heads": 1, "intermediate_size": 160,
        "use_sliding_window": True, "sliding_window": zoo.WINDOW, "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen3": {"head_dim": 128, "num_attention_heads": 26, "num_key_value_heads": 1, "intermediate_size": 2816},
    "gemma4_text": {
        "num_hidden_layers": 4, "head_dim": 256, "global_head_dim": 512, "intermediate_size": 96, **zoo.MIXED,
        "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": zoo.VOCAB,
        "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32,
    },
    "gpt_oss": {
        "eager": True, "head_dim": 64, "num_attention_heads": 8, "intermediate_size": 96, "sliding_window": zoo.WINDOW,
        "layer_types": ["sliding_attention", "full_attention"], **zoo.EXPERTS,
    },
}  # fmt: skip
ROUNDED = {"bfloat16": ("exact", "bfloat16"), "int8": ("exact", "int16", "int8"), "int4": ("exact", "int16", "int8")}
MODES = (
    WeightFormat(),
    *(WeightFormat(w, a) for w, activations in ROUNDED.items() for a in activations),
    WeightFormat(kv="bfloat16"),
    WeightFormat(kv="int8"),
    WeightFormat("int8", "int8", "bfloat16"),
)


@cache
def model(family: str) -> Target:
    """Return a model of two layers in which every token has a twin, whose logit is the same up to rounding.

    The largest number of its row of the LM head is the next one of float32, which moves the scale of int8 by its last
    bit, and a number that is zero otherwise is 2^-22, which bfloat16 keeps. So the last bits of a logit say which of the
    two is emitted."""
    sizes: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "max_position_embeddings": CONTEXT}
    made = zoo.tiny(family, **sizes | MODELS[family])
    with torch.no_grad():
        head = made.lm_head.weight
        half = len(head) // 2
        head[:, 0] = 0
        head[half:] = head[:half]
        largest = head[half:].abs().argmax(1, keepdim=True)
        value = head[half:].gather(1, largest)
        head[half:].scatter_(1, largest, torch.nextafter(value, 2 * value))
        head[half:, 0] = 2.0**-22
    return Target(made)


def name_of(mode: WeightFormat) -> str:
    """Return what tests call a mode."""
    return "-".join((mode.weights, mode.activations, *([f"{mode.kv}_kv"] if mode.kv != "exact" else [])))


def runnable(mode: WeightFormat) -> bool:
    """Return whether these kernels have the instructions for a mode."""
    if mode.activations == "bfloat16":
        return kernels.has_avx512_bf16()
    return kernels.has_dots() or (mode.weights != "int4" and mode.activations == "exact")


def by_kernels(target: Target, mode: WeightFormat, threads: int = 1) -> Target:
    """Return the target with a runner of its own: weights packed anew, this number of threads."""
    runner = CpuRunner(target, mode)
    runner.thread_chooser = Threads(threads)
    return target.run_with(runner)


class Referee:
    """Plain decoding: one token after the other, in one row. Keeps the logits behind every prefix."""

    def __init__(self, target: Target) -> None:
        self.session = target.open(1)
        self.ids: Ids = ()  # what the row holds
        self.known: dict[Ids, Tensor] = {}

    def logits(self, ids: Ids) -> Tensor:
        """Return the logits [V] behind these ids."""
        if ids not in self.known:
            same = 0
            while same < min(len(self.ids), len(ids) - 1) and self.ids[same] == ids[same]:
                same += 1
            self.session.truncate(0, same)
            for end in range(self.session.lengths[0], len(ids)):
                output = self.session.forward(torch.tensor([[ids[end]]]), Tree.chain(1, 1))
                self.session.advance(torch.ones(1, dtype=torch.long), [end + 1])
                self.session.set_host_lengths([end + 1])
                self.known[ids[: end + 1]] = output.logits_BNV[0, 0].clone()
            self.ids = ids
        return self.known[ids]


@dataclass
class Counts:
    """How many things were compared, and how many differ from plain decoding."""

    compared: int = 0
    different: int = 0

    def add(self, equal: bool) -> None:
        self.compared += 1
        self.different += not equal

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(self.compared + other.compared, self.different + other.different)


@torch.inference_mode()
def compare(referee: Referee, found: Found) -> Counts:
    """Count the rows of logits, and those of them that have other bits than plain decoding's."""
    counts = Counts()
    for ids, logits_V in found:
        counts.add(torch.equal(referee.logits(ids).view(torch.int32), logits_V.contiguous().view(torch.int32)))
    return counts


# effort: the share of the cases that are tried, chosen by the random numbers; 1: all of them.


def some(cases: Sequence[T], rng: random.Random, effort: float) -> list[T]:
    """Return this share of the cases, at least two, in their order."""
    count = max(2, round(effort * len(cases)))
    return [cases[i] for i in sorted(rng.sample(range(len(cases)), min(count, len(cases))))]


def text(length: int, seed: int) -> Ids:
    """Return random ids; texts of one seed begin alike."""
    return tuple(random.Random(seed).choices(range(3, zoo.VOCAB), k=length))


def read(session: TargetSession, row: int, ids: Ids, begin: int, chunk: int) -> Found:
    """Read a text from `begin` on, in chunks."""
    pieces = list[tuple[Tensor, int]]()
    for start in range(begin, len(ids), chunk):
        session.prefill(row, ids[start : start + chunk], on_logits=lambda *piece: pieces.append(piece))
    for logits_TV, at in pieces:
        yield from ((ids[: at + t + 1], logits_V) for t, logits_V in enumerate(logits_TV))


def random_tree(rng: random.Random, nodes: int, shape: str) -> list[int]:
    """Return the parents of a tree: a chain, a star, or any."""
    if shape == "any":
        return [-1, *(rng.randrange(node) for node in range(1, nodes))]
    return [-1, *(node - 1 if shape == "chain" else 0 for node in range(1, nodes))]


def tree_pass(
    session: TargetSession, rng: random.Random, texts: Sequence[Ids], sizes: Sequence[int], shape: str
) -> Found:
    """Run one pass over a tree in each row that has a text; () stands for an empty row."""
    nodes, counts = max(sizes), tuple(sizes)
    parents = [[*random_tree(rng, size, shape), *[0] * (nodes - size)] for size in sizes]
    tree = Tree.build(torch.tensor(parents), max(nodes - 1, 1), counts=counts if min(counts) < nodes else ())
    tokens_BN = torch.tensor([rng.choices(range(3, zoo.VOCAB), k=nodes) for _ in sizes])
    live = [row for row, ids in enumerate(texts) if ids]
    logits_BNV = session.forward(tokens_BN, tree, live).logits_BNV
    for row in live:
        for node in range(sizes[row]):
            path = tree.mask_BNN[row, node].nonzero()[:, 0]
            yield (*texts[row], *tokens_BN[row, path].tolist()), logits_BNV[row, node]


def chunks(target: Target, rng: random.Random, effort: float) -> Found:
    """A prompt in chunks of every kind of size, and its end by the pass that computes the last logits alone."""
    ids = text(530, seed=1)
    for chunk in some((2, 3, 5, 6, 7, 12, 16, 17, 33, 64, 100, 129, 512), rng, effort):
        yield from read(target.open(1), 0, ids[: 12 * chunk], 0, chunk)
    for length in some((1, 40, 130, 530), rng, effort):
        yield ids[:length], target.open(1).prefill(0, ids[:length])


def trees(target: Target, rng: random.Random, effort: float) -> Found:
    """One row: trees of every shape, around every size of a tile, behind texts of several lengths."""
    sizes = (1, 2, 3, 4, 5, 6, 7, 9, 13, 16, 25, 33, 60, 130)
    cases = [(nodes, shape) for nodes in sizes for shape in ("chain", "star", "any")]
    for length in some((1, 15, 17, 70, 255), rng, effort):
        session, ids = target.open(1), text(length, seed=1)
        session.prefill(0, ids)
        for nodes, shape in some(cases, rng, effort):
            yield from tree_pass(session, rng, [ids], [nodes], shape)


def batches(target: Target, rng: random.Random, effort: float) -> Found:
    """1 to 16 rows of unequal lengths with trees of unequal sizes, some rows empty."""
    for rows in some(range(1, 17), rng, effort):
        session = target.open(rows)
        lengths = [rng.choice((0, 1, 7, 16, 40, 77)) for _ in range(rows)]
        lengths[rng.randrange(rows)] = 33
        texts = [text(length, seed=1) for length in lengths]
        for row, ids in enumerate(texts):
            if ids:
                session.prefill(row, ids)
        for most in some((1, 4, 20), rng, effort):
            sizes = [rng.randint(1, most) for _ in range(rows)]
            yield from tree_pass(session, rng, texts, sizes, "any")


def levels(target: Target, rng: random.Random, effort: float) -> Found:
    """A tree level by level, as a target that drafts reads it."""
    for length, width, depth in ((5, 3, 4), (60, 10, 6)):
        session, ids = target.open(1), text(length, seed=1)
        session.prefill(0, ids)
        paths, sees_NN = [ids], torch.zeros(0, 0, dtype=torch.bool)
        above = [-1]  # the nodes of the level before; -1: none
        for level in range(depth):
            old, count = len(sees_NN), width if level else 1
            sees_NN = torch.nn.functional.pad(sees_NN, (0, count, 0, count))
            tokens = rng.choices(range(3, zoo.VOCAB), k=count)
            for node, token in enumerate(tokens, old):
                parent = rng.choice(above)
                if parent >= 0:
                    sees_NN[node] = sees_NN[parent]
                sees_NN[node, node] = True
                paths.append((*paths[parent + 1], token))
            above = list(range(old, old + count))
            output = session.extend(torch.tensor([tokens]), sees_NN.sum(1)[None] - 1, sees_NN[None, old:])
            yield from zip(paths[old + 1 :], output.logits_BNV[0], strict=True)


def prefixes(target: Target, rng: random.Random, effort: float) -> Found:
    """Texts that go on from kept keys: of their own row cut back, and of another row's copy."""
    session, ids, other = target.open(3), text(290, seed=1), text(60, seed=2)
    for length in some((1, 16, 129, 257), rng, effort):
        session.truncate(0, 0)
        session.prefill(0, ids)
        session.truncate(0, length)
        session.copy(0, 1, length)
        first, second = (*ids[:length], *other[:30]), (*ids[:length], *other)
        yield from read(session, 0, first, length, 17)
        yield from read(session, 1, second, length, 60)
        session.copy(1, 2, length + 1)
        yield from tree_pass(session, rng, [first, second, second[: length + 1]], [9, 1, 14], "any")


PASSES: dict[str, Read] = {"prompts in chunks": chunks, "trees": trees, "batches": batches, "levels of a tree": levels}
PASSES["kept prefixes"] = prefixes


def compare_ids(target: Target, again: Target, effort: float) -> Counts:
    """Count the answers, greedy and sampled, and those whose ids differ from plain decoding's.

    Args:
        target: decodes plainly, one request at a time.
        again: the same model; decodes with trees of an oracle and of EAGLE-2, in batches of several sizes, with prompts
            that are read a few tokens a step and behind kept prefixes.
    """
    lengths, rng, counts = (5, 23, 40, 3, 17, 31, 1, 120), random.Random(0), Counts()
    requests = [
        Request(text(length, seed=length % 2), NEW, replace(SAMPLINGS[i // 2 if i % 2 else 0], seed=i))
        for i, length in enumerate(lengths)
    ]
    vanilla, eagle2 = drafters.find("vanilla"), drafters.find("eagle2")
    plain = [run(Decoder(target, vanilla.load(None, target), 1), [request])[0][0] for request in requests]
    answers = {request.prompt: ids for request, ids in zip(requests, plain, strict=True)}
    ways = [(rows, budget, reuse) for rows in (1, 2, 3, 5, 8, 16) for budget, reuse in ((None, False), (7, True))]
    for number, (rows, budget, reuse) in enumerate(some(ways, rng, effort)):
        drafter: Drafter = Oracle(again, answers, 12, 5, seed=number)
        if number % 2:
            drafter = eagle2.random(again, build_options(eagle2.Options, TREE), seed=1)
        found = run(Decoder(again, drafter, rows, reuse, prefill_budget=budget), requests)[0]
        for ids, expected in zip(found, plain, strict=True):
            counts.add(ids == expected)
    return counts

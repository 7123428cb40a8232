"""Speculative decoding in numpy: a tree is drafted, the target reads it in one pass, a path is accepted. No cleverness.

    greedy      the path descends as long as a child is the target's best token; the first that is not is the bonus token
    draw        the token after a text of n tokens is argmax(log p + g(n)), for every text: the path descends as long as a child is the
                token that was drawn at its parent, so a right engine emits plain sampling's tokens whatever it drafts
    rejection   children were sampled from q without replacement: each is accepted with probability p / q, else p becomes
                norm(max(0, p - q)) and q loses the child (EAGLE-1, section 4.3); the bonus token is drawn from what is left, with g(n)

Letters: N nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from draft_vectors.arrays import Doubles, Floats, log_softmax
from draft_vectors.heads import HEADS, Node, Target, parents_of

__all__ = ["ACCEPT", "DRAFT", "TARGET", "Case", "Cycle", "Decoder", "Noise", "head_folder"]

TARGET, ACCEPT, DRAFT = range(3)  # streams of random numbers
GOLDEN, MIX_1, MIX_2 = (np.uint64(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


@dataclass(frozen=True)
class Case:
    """One setting: a head, a tree and a rule."""

    name: str
    method: str
    rule: str  # greedy, draw or rejection
    tree: str  # chain, dynamic or static
    nodes: int = 4  # of the tree, the root included
    depth: int = 3
    branch: int = 1
    choices: tuple[tuple[int, ...], ...] = ()  # of a static tree: the path of ranks of each node
    window: tuple[int, int] | None = None  # first and last pairs that SEAGLE's cache keeps
    seed: int = 0
    new_tokens: int = 32


def head_folder(data: Path, case: Case) -> Path:
    """Return the folder of a case's head: EAGLE-2 has EAGLE-1's, SEAGLE has EAGLE-3's."""
    return data / {"eagle2": "eagle1", "seagle": "eagle3"}.get(case.method, case.method)


class Noise:
    """Random numbers in (0, 1) that are functions of (seed, stream, position, index) (SplitMix64, Steele et al. 2014)."""

    def __init__(self, seed: int) -> None:
        self.seed = np.uint64(seed)

    @staticmethod
    def mix(x: NDArray[np.uint64] | np.uint64) -> NDArray[np.uint64]:
        """Mix the bits of numbers (the finaliser of splitmix64)."""
        x = (x ^ (x >> np.uint64(30))) * MIX_1
        x = (x ^ (x >> np.uint64(27))) * MIX_2
        return np.asarray(x ^ (x >> np.uint64(31)))

    def uniform(self, stream: int, position: int, count: int) -> Doubles:
        """Return the numbers of the indices 0 to count - 1, float64."""
        with np.errstate(over="ignore"):
            key = self.mix(self.mix(self.seed + GOLDEN) + np.uint64(stream))
            key = self.mix(key + np.uint64(position + 1) * GOLDEN)
            bits = self.mix(key + (np.arange(count, dtype=np.uint64) + np.uint64(1)) * GOLDEN) >> np.uint64(12)
        return np.asarray((bits.astype(np.float64) + 0.5) * 2.0**-52)

    def gumbel(self, stream: int, position: int, count: int) -> Floats:
        """Return Gumbel variables, -log(-log u)."""
        return np.asarray(-np.log(-np.log(self.uniform(stream, position, count))), np.float32)

    # Numbers for the rules of acceptance. `length`: the tokens before the root. `depth`: of a node.

    def of_target(self, length: int, depth: int, vocab: int) -> Floats:
        """Return the noise with which the target draws the token after a node."""
        return self.gumbel(TARGET, length + depth + 1, vocab)

    def of_tests(self, length: int, depth: int, siblings: int) -> Doubles:
        """Return the numbers of the tests of a node's children."""
        return self.uniform(ACCEPT, length + depth + 1, siblings)

    def of_drafts(self, length: int, nodes: int, node: int, vocab: int) -> Floats:
        """Return the noise with which the draft samples the children of a node of a static tree."""
        return self.gumbel(DRAFT, length * nodes + node, vocab)


@dataclass
class Cycle:
    """One cycle: the tree, the target's numbers and the accepted path."""

    length: int  # tokens before the root
    nodes: list[Node]
    logits_NV: Floats  # the target's, at every node
    path: list[int]  # accepted nodes, the root first
    bonus: int
    draw: list[int] = field(default_factory=list)  # the target's token after each node, unless the rule is rejection

    @property
    def tokens(self) -> list[int]:
        """The token of each node."""
        return [node.token for node in self.nodes]

    @property
    def parents(self) -> list[int]:
        """The number of each node's parent; -1 for the root."""
        return parents_of(self.nodes)


class Decoder:
    """Decodes one text of a case.

    Attributes:
        lenient: accept a child among so many best tokens of the target; 1 but for a planted fault.
        stale: whether the target's caches keep rejected nodes; False but for a planted fault.
        unmoved: whether they keep the tree's first nodes in place of the accepted ones; False but for a planted fault.
        offset: added to the positions of nodes below the root; 0 but for a planted fault.
    """

    def __init__(self, data: Path, case: Case, target: Target | None = None) -> None:
        self.case, self.target = case, target or Target(data / "target")
        self.head = HEADS[case.method](head_folder(data, case), self.target, case.window)
        self.noise, self.caches = Noise(case.seed), self.target.new_caches()
        self.lenient, self.stale, self.unmoved, self.offset = 1, False, False, 0
        self.text: list[int] = []

    # --- one text

    def read(self, tokens: Sequence[int]) -> Floats:
        """Read a prompt; return the logits [V] of the token that follows."""
        new = np.tril(np.ones((len(tokens), len(tokens)), bool))
        self.states = self.target(tokens, np.arange(len(tokens)), new, self.caches)
        self.text = list(tokens)
        return self.target.head(self.states[-2][-1])

    def begin(self, root: int) -> None:
        """Give the head the prompt, and append the root to the text."""
        self.head.commit(self.states, self.text, [*self.text[1:], root])
        self.text.append(root)

    def generate(self, prompt: Sequence[int]) -> tuple[list[int], list[Cycle]]:
        """Return the new tokens, and the cycles. The last cycle may be cut by the limit of new tokens."""
        logits, cycles = self.read(prompt), list[Cycle]()
        first = (
            logits
            if self.case.rule == "greedy"
            else log_softmax(logits) + self.noise.gumbel(TARGET, len(prompt), len(logits))
        )
        self.begin(int(first.argmax()))
        while len(self.text) < len(prompt) + self.case.new_tokens:
            cycles.append(self.cycle())
        return self.text[len(prompt) : len(prompt) + self.case.new_tokens], cycles

    def draft(self, text: Sequence[int]) -> list[Node]:
        """Return the tree after a text, whose last token is the root, all of which is read anew."""
        self.read(text[:-1])
        self.begin(text[-1])
        return self.grow()

    def cycle(self) -> Cycle:
        """Draft, verify, and keep the accepted path; return all numbers of the cycle."""
        nodes, length = self.grow(), len(self.text) - 1
        new = np.array([[any(other is step for step in node.path()) for other in nodes] for node in nodes])
        position = np.array([length + node.depth + self.offset * (node.depth > 0) for node in nodes])
        old = len(self.caches[0])
        states = self.target([node.token for node in nodes], position, new, self.caches)
        logits = self.target.head(states[-2])
        path, bonus, draw = self.verify(nodes, logits, length)
        done = Cycle(length, nodes, logits, path, bonus, draw)
        accepted = [nodes[n] for n in path]
        kept = range(len(nodes) if self.stale else len(path)) if self.stale or self.unmoved else path
        for cache in self.caches:
            cache.keep([*range(old), *(old + n for n in kept)])
        self.head.forget(accepted)
        following = [*(node.token for node in accepted[1:]), bonus]
        self.head.commit([state[path] for state in states], [node.token for node in accepted], following)
        self.text += following
        return done

    # --- drafting

    def grow(self) -> list[Node]:
        """Return the nodes of the draft tree, the root first."""
        root = Node(self.text[-1])
        root.hidden, root.logits = self.head.root()
        return self.grow_static(root) if self.case.tree == "static" else self.grow_dynamic(root)

    def children(self, node: Node, order: Sequence[int], log_q: Floats) -> list[Node]:
        """Return children of a node for the draft's tokens of these numbers."""
        ids = self.head.ids
        chosen = [(int(ids[i]), float(log_q[i])) for i in order]
        return [Node(token, node, node.depth + 1, log, node.value + log) for token, log in chosen]

    def grow_dynamic(self, root: Node) -> list[Node]:
        """Grow EAGLE-2's tree: expand the `branch` nodes of the highest values of each level, keep the best of all. A chain is
        one with a single branch."""
        case, level, drafted = self.case, [root], list[Node]()
        for depth in range(case.depth):
            if depth:
                self.head.expand(level)
            born = list[Node]()
            for node in level:
                assert node.logits is not None
                log_q = log_softmax(node.logits)
                born += self.children(node, np.argsort(-log_q, kind="stable")[: case.branch].tolist(), log_q)
            drafted += born
            level = sorted(born, key=lambda node: -node.value)[: case.branch] if depth else born
        best = sorted(range(len(drafted)), key=lambda n: -drafted[n].value)[: case.nodes - 1]
        return [root, *(drafted[n] for n in sorted(best))]

    def grow_static(self, root: Node) -> list[Node]:
        """Grow EAGLE-1's static tree. Under the rule of rejection children are sampled without replacement."""
        case, nodes = self.case, [root]
        of_path: dict[tuple[int, ...], Node] = {(): root}
        for depth in range(1, case.depth + 1):
            paths = [path for path in case.choices if len(path) == depth]
            parents = dict.fromkeys(path[:-1] for path in paths)
            if depth > 1:
                self.head.expand([of_path[path] for path in parents])
            for parent in parents:
                node = of_path[parent]
                assert node.logits is not None
                key = log_q = log_softmax(node.logits)
                if case.rule == "rejection":
                    number = next(n for n, other in enumerate(nodes) if other is node)
                    key = log_q + self.noise.of_drafts(len(self.text) - 1, 1 + len(case.choices), number, len(log_q))
                width = 1 + max(path[-1] for path in paths if path[:-1] == parent)
                born = self.children(node, np.argsort(-key, kind="stable")[:width].tolist(), log_q)
                of_path |= {(*parent, rank): child for rank, child in enumerate(born)}
                nodes += born
        return nodes

    # --- verification

    def drawn(self, logits_NV: Floats, nodes: Sequence[Node], length: int) -> list[int]:
        """Return the target's token after each node."""
        if self.case.rule == "greedy":
            return [int(n) for n in logits_NV.argmax(-1)]
        log_p, V = log_softmax(logits_NV), logits_NV.shape[-1]
        return [
            int((row + self.noise.of_target(length, node.depth, V)).argmax())
            for row, node in zip(log_p, nodes, strict=True)
        ]

    def verify(self, nodes: Sequence[Node], logits_NV: Floats, length: int) -> tuple[list[int], int, list[int]]:
        """Return the accepted nodes, the bonus token, and the tokens drawn."""
        if self.case.rule == "rejection":
            return (*self.reject(nodes, logits_NV, length), [])
        draw, path = self.drawn(logits_NV, nodes, length), [0]
        accepts: Callable[[int, int], bool] = lambda at, token: token == draw[at]  # noqa: E731
        if self.lenient > 1:
            accepts = lambda at, token: token in np.argsort(-logits_NV[at])[: self.lenient]  # noqa: E731
        while True:
            here = nodes[path[-1]]
            fits = [n for n, node in enumerate(nodes) if node.parent is here and accepts(path[-1], node.token)]
            if not fits:
                return path, draw[path[-1]], draw
            path.append(fits[0])

    def reject(self, nodes: Sequence[Node], logits_NV: Floats, length: int) -> tuple[list[int], int]:
        """Verify by recursive rejection; return the accepted nodes and the bonus token."""
        path = [0]
        while True:
            at, here = path[-1], nodes[path[-1]]
            p = np.exp(log_softmax(logits_NV[at]))
            children = [n for n, node in enumerate(nodes) if node.parent is here]
            tests = self.noise.of_tests(length, here.depth, len(children))
            q = np.exp(log_softmax(here.logits)) if here.logits is not None else np.zeros_like(p)
            for sibling, n in enumerate(children):
                token = nodes[n].token
                if tests[sibling] < self.lenient * p[token] / q[token]:
                    path.append(n)
                    break
                rest = np.maximum(p - q, 0)
                p = rest / rest.sum() if rest.sum() > 0 else p
                q = np.where(np.arange(len(q)) == token, 0, q)
                q = q / q.sum() if q.sum() > 0 else q
            if path[-1] == at:
                with np.errstate(divide="ignore"):
                    scores = np.log(p) + self.noise.of_target(length, here.depth, len(p))
                return path, int(scores.argmax())

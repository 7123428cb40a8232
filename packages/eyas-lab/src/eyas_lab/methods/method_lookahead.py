"""lookahead: Lookahead decoding (Fu, Bailis, Stoica, Zhang 2024, arXiv 2402.02057): the target
drafts for itself, by Jacobi iteration.

Every cycle forwards, besides the n-grams to be verified, a window of guesses at the coming
positions: `width` columns by `ngram - 1` levels. Each level is one Jacobi iteration after the level
above it: a column holds the target's own continuation of its own earlier tokens. The window nodes
are forwarded, never accepted. The target's tokens at the lowest level complete one n-gram per
column. They go into the row's pool, the levels move up, and these tokens become the lowest level.
With width 4 and n-grams of 4 tokens:

    level 0      r --- a1 -- a2 -- a3          r: the root; depth = column + level
                 |     |     |     |
    level 1      b0    b1    b2    b3          b1 attends to r, a1 and itself: a column hangs from level 0, which is a chain
                 |     |     |     |
    level 2      c0    c1    c2    c3          the target's token at c1 completes the n-gram a1 b1 c1 _

    branch       r --- g0 -- h0 -- i0          up to `guesses` n-grams of the pool that begin with r, the newest first, as a trie of
                 |      '--- h1 -- i1          children of the same root: acceptable nodes
                  '--- g1 -- h2 -- i2

So window and branch are one tree; node `width * level + column` is a window node. Its token is
drawn like any other, from the row's own sampling with the noise of its position. So it is the token that this
very run draws there if the node's prefix comes true. (With the most probable token instead, which is the same
in greedy rows, a small chat model gave 18 % fewer tokens per cycle at temperature 1.)

See the paper's section 3 and figures 2 to 4. The first guesses are tokens of the prompt. The window
moves by one column per cycle, however many tokens were accepted: moving it by as many made no
measurable difference. This module has no net: the target's logits are all that it reads.

Letters: B rows, N nodes, W columns, V vocabulary, T tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from eyas.core.drafter import CycleInput, DraftSession
from eyas.core.sampling import apply_sampling_rows
from eyas.core.tree import Draft, TargetOutput, Tree, Verdict, build_trie
from eyas.drafters import DraftMethod
from eyas.drafters.tools import check_whole

__all__ = ["Lookahead", "Method", "Pool"]


@dataclass(frozen=True)
class Lookahead:
    """The size of window and branch; the defaults are the paper's for 7B models (table 2: W = G =
    15, N = 5)."""

    width: int = 15
    """Columns of the window (W): new n-grams per cycle."""
    ngram: int = 5
    """Tokens of an n-gram (N); the window has one level less."""
    guesses: int = 15
    """N-grams verified per cycle (G), and kept for each first token."""
    prompt: bool = True
    """The n-grams of the prompt enter the pool too."""

    def __post_init__(self) -> None:
        check_whole("lookahead", 1, width=self.width, guesses=self.guesses)
        check_whole("lookahead", 2, ngram=self.ngram)

    @property
    def window(self) -> int:
        """Nodes of the window, the root among them."""
        return self.width * (self.ngram - 1)

    @property
    def nodes(self) -> int:
        """The nodes of a pass: the window and the guesses."""
        return self.window + self.guesses * (self.ngram - 1)

    @property
    def max_depth(self) -> int:
        """The largest depth of a node."""
        return max(self.width + self.ngram - 3, self.ngram - 1)


@dataclass(frozen=True)
class Options:
    """Options of lookahead."""

    lookahead: Lookahead = field(default_factory=Lookahead)


class Pool:
    """n-grams by their first token, the newest first, at most `max_ngrams` for each."""

    def __init__(self, max_ngrams: int) -> None:
        self.max_ngrams = max_ngrams
        self._after: dict[int, dict[tuple[int, ...], None]] = {}  # a dict keeps the order in which its keys came

    def add(self, ngram: Sequence[int]) -> None:
        """Keep an n-gram, and forget the oldest with its first token beyond the limit."""
        known = self._after.setdefault(ngram[0], {})
        rest = tuple(ngram[1:])
        known.pop(rest, None)
        known[rest] = None
        if len(known) > self.max_ngrams:
            del known[next(iter(known))]

    def after(self, token: int) -> list[tuple[int, ...]]:
        """Return the rests of the n-grams that begin with the token, the newest first."""
        return list(reversed(self._after.get(token, {})))


@dataclass
class _Row:
    """The state of a row."""

    pool: Pool
    tokens: list[int] = field(default_factory=list)  # committed
    levels: list[list[int]] = field(default_factory=list)  # the window; level 0's first token is replaced by the root


class Session(DraftSession):
    """Windows and pools of B rows, on the host."""

    def __init__(self, shape: Lookahead, rows: int) -> None:
        self.shape = shape
        self.states = [_Row(Pool(shape.guesses)) for _ in range(rows)]
        self.cycle: CycleInput | None = None
        self._active: list[bool] = []
        W = shape.width
        self._window_parents = [*range(-1, W - 1), *range(shape.window - W)]  # a chain; below it, the node one level up

    def truncate(self, row: int, length: int) -> int:
        del self.states[row].tokens[length:]
        return len(self.states[row].tokens)

    def copy(self, source: int, row: int, length: int) -> int:
        self.states[row] = _Row(Pool(self.shape.guesses))
        self._read(row, self.states[source].tokens[:length])
        return len(self.states[row].tokens)

    def begin(self, row: int, cached_tokens: int, total: int) -> None:
        old = self.states[row]
        self.states[row] = _Row(old.pool if cached_tokens else Pool(self.shape.guesses), old.tokens[:cached_tokens])

    def end(self, row: int) -> None:
        self.states[row] = _Row(Pool(self.shape.guesses))

    def prefill(self, row: int, tokens_T: Tensor, features_TF: Tensor, position: int) -> None:
        self._read(row, tokens_T.tolist())

    def _read(self, row: int, tokens: Sequence[int]) -> None:
        known, N = self.states[row], self.shape.ngram
        begin = max(0, len(known.tokens) - N + 1)
        known.tokens += tokens
        if self.shape.prompt:
            for i in range(begin, len(known.tokens) - N + 1):
                known.pool.add(known.tokens[i : i + N])
        known.levels = self._first_window(known.tokens)

    def _first_window(self, tokens: Sequence[int]) -> list[list[int]]:
        """Return a window of tokens of the prompt, drawn at random: Jacobi iteration may begin anywhere."""
        rng = random.Random(len(tokens))
        return [rng.choices(tokens, k=self.shape.width) for _ in range(self.shape.ngram - 1)]

    # --- the cycle

    def draft(self, cycle_input: CycleInput) -> Draft:
        self.cycle, self._active = cycle_input, cycle_input.active_B.tolist()
        shape, size, device = self.shape, self.shape.nodes, cycle_input.tokens_B.device
        parents, tokens, acceptable = list[list[int]](), list[list[int]](), list[list[bool]]()
        for row, root, active in zip(self.states, cycle_input.tokens_B.tolist(), self._active, strict=True):
            branch = build_trie(row.pool.after(root) if active else [])
            if active:
                row.levels[0][0] = root
            window = [token for level in row.levels for token in level] if active else [root] * shape.window
            spare = size - shape.window - len(branch[0])
            below = [shape.window + parent if parent >= 0 else 0 for parent in branch[0]]
            parents.append([*self._window_parents, *below, *[0] * spare])
            tokens.append([*window, *branch[1], *[0] * spare])
            acceptable.append([n == 0 or shape.window <= n < size - spare for n in range(size)])
        tree = Tree.build(
            torch.tensor(parents, device=device), shape.max_depth, torch.tensor(acceptable, device=device)
        )
        return Draft(tree, torch.tensor(tokens, device=device))

    def commit(self, draft: Draft, verdict: Verdict, output: TargetOutput) -> None:
        """Let the target's tokens at the lowest level complete n-grams and become the new lowest level."""
        drawn_BW = self._drawn_tokens(draft, output)
        host = torch.cat([verdict.length_B[:, None], drawn_BW, verdict.tokens_BP], 1).tolist()
        W = self.shape.width
        for row, active, (length, *rest) in zip(self.states, self._active, host, strict=True):
            if not active:
                continue
            levels = [*row.levels, rest[:W]]
            for ngram in reversed(list(zip(*levels, strict=True))):
                row.pool.add(ngram)
            row.levels = levels[1:]
            row.tokens += rest[W : W + length]

    def _drawn_tokens(self, draft: Draft, output: TargetOutput) -> Tensor:
        """Return the target's draw at every window node of the lowest level, int64 [B, W]."""
        cycle_input, shape = self.cycle, self.shape
        assert cycle_input is not None
        lowest = slice(shape.window - shape.width, shape.window)
        adjustments = cycle_input.adjustments
        nodes = None if adjustments is None else adjustments.for_tree(draft.tree, draft.tokens_BN)[:, lowest]
        scores_BWV = apply_sampling_rows(output.logits_BNV[:, lowest], cycle_input.sampling, nodes)
        if cycle_input.noise.all_greedy:
            return scores_BWV.argmax(-1)
        position_BW = cycle_input.position_B[:, None] + draft.tree.depth_BN[:, lowest] + 1
        return (scores_BWV.log_softmax(-1) + cycle_input.noise.gumbel(position_BW, scores_BWV.shape[-1])).argmax(-1)


class Method(DraftMethod):
    """Lookahead decoding."""

    Options: ClassVar[type] = Options
    summary = "Lookahead: n-grams from the target's own Jacobi iterations, no draft model"
    model_free = True

    def open(self, rows: int) -> DraftSession:
        return Session(self.options.lookahead, rows)

    def describe(self) -> dict[str, Any]:
        shape = self.options.lookahead
        return {
            "kind": "lookahead",
            "nodes": shape.nodes,
            "depth": shape.ngram - 1,
            "scouts": shape.window - 1,  # the key in records: window nodes below the root
            **asdict(shape),
        }

"""Trees against a naive recursion: what `parents` say, prefixes of nodes, merges of two, refused static trees."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.core.sampling import GumbelNoise
from eyas.core.tree import Draft, Tree, chain_choices, check_choices, matching_nodes, merge
from eyas.core.verify import verify
from eyas.errors import OptionError


def ancestors(parents: list[int], node: int) -> list[int]:
    """The node and everything above it, by recursion."""
    return [node] if parents[node] < 0 else [node, *ancestors(parents, parents[node])]


@st.composite
def forests(draw: st.DrawFn) -> list[list[int]]:
    """Parents of up to 3 trees with one number of nodes; children may come in any order after their parent."""
    nodes = draw(st.integers(1, 12))
    return [[-1, *(draw(st.integers(0, n - 1)) for n in range(1, nodes))] for _ in range(draw(st.integers(1, 3)))]


def test_a_chain() -> None:
    """Guards the tree of chain drafters, and of vanilla: one node, no depth."""
    for nodes in (1, 4):
        chain, built = Tree.chain(2, nodes), Tree.build(torch.tensor([[*range(-1, nodes - 1)]] * 2), nodes - 1)
        assert chain.max_depth == nodes - 1
        for name in ("parents_BN", "depth_BN", "mask_BNN", "acceptable_BN"):
            assert torch.equal(getattr(chain, name), getattr(built, name)), name
    assert check_choices(chain_choices(3)) == chain_choices(3) == ((0,), (0, 0), (0, 0, 0))


@pytest.mark.slow
@settings(max_examples=120, deadline=None, derandomize=True)
@given(forests(), st.integers(0, 3))
def test_depth_and_mask_are_those_of_a_recursion(forest: list[list[int]], slack: int) -> None:
    """Guards depth and ancestors in rows that differ, children far from parents, a bound that is not tight."""
    lines = [[ancestors(parents, n) for n in range(len(parents))] for parents in forest]
    deepest = max(len(line) - 1 for row in lines for line in row)
    tree = Tree.build(torch.tensor(forest), deepest + slack)
    assert tree.max_depth == deepest + slack
    assert tree.depth_BN.tolist() == [[len(line) - 1 for line in row] for row in lines]
    assert tree.mask_BNN.tolist() == [[[m in line for m in range(len(row))] for line in row] for row in lines]


@pytest.mark.slow
@settings(max_examples=80, deadline=None, derandomize=True)
@given(forests(), st.integers(0, 2**32 - 1))
def test_seen_is_history_ancestors_and_the_node_itself(forest: list[list[int]], seed: int) -> None:
    """Guards the prefix of a repetition penalty: no sibling's token, none of another row, history untouched."""
    choose, vocab = random.Random(seed), 9
    tokens = [[choose.randrange(vocab) for _ in row] for row in forest]
    history = [[choose.random() < 0.3 for _ in range(vocab)] for _ in forest]
    history_BV = torch.tensor(history)
    seen_BNV = Tree.build(torch.tensor(forest), len(forest[0]) - 1).tokens_seen(torch.tensor(tokens), history_BV)
    for b, parents in enumerate(forest):
        for n in range(len(parents)):
            prefix = {tokens[b][m] for m in ancestors(parents, n)}
            assert seen_BNV[b, n].tolist() == [history[b][v] or v in prefix for v in range(vocab)]
    assert history_BV.tolist() == history


@st.composite
def drafts(draw: st.DrawFn, rows: int) -> Draft:
    """Trees over 4 tokens, which often share paths; twins, some others, and what hangs below, are no candidates."""
    nodes, parents, tokens, candidates = draw(st.integers(1, 9)), [], [], []
    for _ in range(rows):
        parent, token, candidate = [-1], [0], [True]
        for n in range(1, nodes):
            parent.append(draw(st.integers(0, n - 1)))
            token.append(draw(st.integers(0, 3)))
            twin = any(candidate[m] and (parent[m], token[m]) == (parent[n], token[n]) for m in range(1, n))
            candidate.append(not twin and candidate[parent[n]] and draw(st.integers(0, 5)) > 0)
        parents, tokens, candidates = [*parents, parent], [*tokens, token], [*candidates, candidate]
    tree = Tree.build(torch.tensor(parents), max(1, nodes - 1), torch.tensor(candidates))
    log_q_BN = -torch.arange(rows * nodes).reshape(rows, nodes).float() - draw(st.integers(0, 9))
    return Draft(tree, torch.tensor(tokens), log_q_BN)


pairs = st.integers(1, 3).flatmap(lambda rows: st.tuples(drafts(rows), drafts(rows)))


def prefix(draft: Draft, row: int, node: int) -> tuple[int, ...]:
    """The tokens from the root to the node."""
    return tuple(int(draft.tokens_BN[row, n]) for n in reversed(ancestors(draft.tree.parents_BN[row].tolist(), node)))


def offered(draft: Draft, row: int) -> list[tuple[int, ...]]:
    """Returns the token sequences that the candidates of a row stand for."""
    return sorted(prefix(draft, row, n) for n in range(draft.tree.nodes) if draft.tree.acceptable_BN[row, n])


@pytest.mark.slow
@settings(max_examples=150, deadline=None, derandomize=True)
@given(pairs)
def test_a_merge_offers_what_either_offers_once(pair: tuple[Draft, Draft]) -> None:
    """Guards the union: nothing lost or twice; nodes keep number, prefix and score; parents come before children."""
    first, second = pair
    both, N = merge(first, second), first.tree.nodes
    assert both.tree.nodes == N + second.tree.nodes - 1
    assert both.q_BNV is None
    match_BM = matching_nodes(first, second)
    for row in range(both.tree.rows):
        assert offered(both, row) == sorted({*offered(first, row), *offered(second, row)})
        assert all(parent < n for n, parent in enumerate(both.tree.parents_BN[row].tolist()))
        assert match_BM[row, 0] == 0
        for n in range(1, N):
            assert prefix(both, row, n) == prefix(first, row, n)
        for m in range(1, second.tree.nodes):
            assert prefix(both, row, N + m - 1) == prefix(second, row, m)
            open_N = first.tree.acceptable_BN[row]
            same = [n for n in range(1, N) if open_N[n] and prefix(first, row, n) == prefix(second, row, m)]
            assert [int(match_BM[row, m])] == (same if same and second.tree.acceptable_BN[row, m] else [-1])
    assert first.log_q_BN is not None
    assert both.log_q_BN is not None
    assert torch.equal(both.log_q_BN, torch.cat([first.log_q_BN, second.log_q_BN[:, 1:]], 1))
    assert merge(first, Draft(second.tree, second.tokens_BN)).log_q_BN is None


@pytest.mark.slow
@settings(max_examples=80, deadline=None, derandomize=True)
@given(pairs, st.integers(0, 2**32 - 1))
def test_a_merge_accepts_what_the_better_of_both_would(pair: tuple[Draft, Draft], seed: int) -> None:
    """Guards merged trees: for draws that depend on the prefix alone, the longer path is accepted."""
    first, second = pair
    rows, greedy = first.tree.rows, GumbelNoise.from_sampling([None] * first.tree.rows)

    def accepted(draft: Draft) -> list[list[int]]:
        says = [
            [random.Random(f"{seed}{prefix(draft, b, n)}").randrange(4) for n in range(draft.tree.nodes)]
            for b in range(rows)
        ]
        verdict = verify(draft, torch.eye(4)[torch.tensor(says)], torch.zeros(rows, dtype=torch.long), greedy)
        return [verdict.tokens_BP[b, : verdict.length_B[b]].tolist() for b in range(rows)]

    better = [max(paths, key=len) for paths in zip(accepted(first), accepted(second), strict=True)]
    assert accepted(merge(first, second)) == better


@pytest.mark.slow
@settings(max_examples=80, deadline=None, derandomize=True)
@given(forests(), st.randoms(use_true_random=False))
def test_choices_in_any_order_are_one_tree(forest: list[list[int]], order: random.Random) -> None:
    """Guards files that list nodes in any order and twice: sorted by depth, then rank, each once."""
    parents = forest[0]
    paths: list[tuple[int, ...]] = [()]
    for n in range(1, len(parents)):
        paths.append((*paths[parents[n]], sum(p == parents[n] for p in parents[1:n])))
    given_paths = [list(p) for p in paths[1:]] * 2
    order.shuffle(given_paths)
    if not given_paths:
        given_paths, paths = [[0]], [(), (0,)]
    choices = check_choices(given_paths)
    assert list(choices) == sorted(paths[1:], key=lambda p: (len(p), p))
    assert check_choices(choices) == choices


@pytest.mark.parametrize(("choices", "words"), [
    ([], "empty"),
    ([[]], "not a list of ranks"),
    ([[0], [-1]], "not a list of ranks"),
    ([[0], [True]], "not a list of ranks"),
    ([[0], [0, False]], "not a list of ranks"),
    ([[0], [1.0]], "not a list of ranks"),
    (["ab"], "not a list of ranks"),
    ([[0], [1, 0]], r"\[1, 0\] has no parent; add \[1\]"),
    ([[0, 0]], r"\[0, 0\] has no parent; add \[0\]"),
    ([[0], [2]], r"\[2\] has no elder sibling; add \[1\]"),
    ([[1]], r"\[1\] has no elder sibling; add \[0\]"),
    ([[0], [0, 1]], r"\[0, 1\] has no elder sibling; add \[0, 0\]"),
])  # fmt: skip
def test_what_is_no_tree_is_refused(choices: list[list[object]], words: str) -> None:
    """Guards the user's own tree files: each mistake is named, with what would mend it."""
    with pytest.raises(OptionError, match=words):
        check_choices(choices)  # type: ignore[arg-type]

"""Mistakes that somebody could make, each with the check that must find it; and the program that
tries them.

    python tests/mutations.py     one JSON line per trial: {"trial": name, "outcome": "passed" | "assertion" | "error", "words": ...}

A trial runs one check of the test files in a process of its own, into which the package is imported
with the mistake (rewriting.py). The processes are forked from one that has already imported torch
and transformers but nothing of eyas. The trials of ORIGINAL change nothing and must pass.
"""

import copy
import gc
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rewriting import Change, install, patch, rewrite

TESTS = Path(__file__).resolve().parent
SOURCE = TESTS.parent / "src"
ORIGINAL = "original: "
CPU_SECONDS = 120  # of one trial; most take one

Check = tuple[str, str, tuple[Any, ...]]  # module of the tests, function, arguments


@dataclass(frozen=True)
class Mutation:
    """One mistake."""

    name: str
    check: Check
    changes: tuple[Change, ...]
    words: str = ""  # what the failed assertion says, where it says something


def mutation(name: str, check: Check, *changes: Change, words: str = "") -> Mutation:
    return Mutation(name, check, changes, words)


# --- checks ----------------------------------------------------------------------------------------------------------------------------


def chosen(tree: str) -> Check:
    return "core.test_verify", "test_chosen_trees_are_exact", (tree, "T=1", True)


def drawn(tree: str, q: str = "near") -> Check:
    return "core.test_verify", "test_drawn_trees_are_exact", (tree, q)


def grown(tree: str, sampling: str, vocab: int = 4, lengths: int = 2) -> Check:
    return "core.test_verify", "test_static_trees_as_grown_are_exact", (tree, sampling, vocab, lengths)


def ids(method: str) -> Check:
    return "test_exact_pipeline", "check_ids", (method, TESTS)


def verified_alone(drawn_tree: bool) -> Check:
    return "core.test_verify", "test_a_row_is_verified_alone", (drawn_tree,)


def on_two_devices(method: str, family: str = "llama", rows: int = 3) -> Check:
    return "core.test_several_devices", "check", (method, family, rows)


SLOW_DRAWN: Check = ("core.test_verify", "test_random_trees_against_a_slow_verification", (True,))
PROCESSORS: Check = (
    "core.test_sampling",
    "test_scores_are_those_of_transformers",
    ({"temperature": 0.7, "top_p": 0.9},),
)
BLOCK: Check = ("core.test_verify", "test_blocks_are_exact", ("near",))
ORDER: Check = ("core.test_verify", "test_drawn_siblings_come_in_draw_order_from_the_processed_q", ("T=0.6",))
LAW = "the law of the first"
OTHER_IDS = "other ids than plain decoding"
TWO_DEVICES = "Expected all tensors to be on the same device"
OTHER_POSITION = "position that is not the tree's"
ACCEPTS = "NOISE.accepts(CHANCE, POSITION, SIBLING)"
ACCEPTS_BLOCK = "NOISE.accepts(CHANCE, POSITION, DEPTH, GumbelNoise.BLOCK)"
GUMBEL = "NOISE.gumbel(POSITION[:, None], VOCAB)"


def block(name: str, pattern: str, replacement: str, *known: str, check: Check = BLOCK, words: str = LAW) -> Mutation:
    """A mistake in the verification of blocks."""
    return mutation(name, check, rewrite("core.verify:_verify_block", pattern, replacement, *known), words=words)


def rejection(name: str, check: Check, pattern: str, replacement: str, *known: str) -> Mutation:
    """A mistake in recursive rejection."""
    return mutation(name, check, rewrite("core.verify:_verify_by_rejection", pattern, replacement, *known), words=LAW)


def apart(
    name: str, where: str, pattern: str, replacement: str, *known: str, method: str = "suffix", family: str = "llama",
    words: str = TWO_DEVICES,
) -> Mutation:  # fmt: skip
    """A mistake with tensors on several devices."""
    return mutation(name, on_two_devices(method, family), rewrite(where, pattern, replacement, *known), words=words)


# --- functions in the place of the shipped ones ----------------------------------------------------------------------------------------

Wrap = Callable[[Any], Any]


def on_other_arguments(change: Callable[..., tuple[Any, ...]]) -> Wrap:
    """The function is called with what `change` makes of its arguments."""
    return lambda original: lambda *arguments: original(*change(*arguments))


def draws(change: Callable[[Any, Any], tuple[Any, Any]]) -> Change:
    """The target draws at other positions, or with other noise."""
    return patch("core.verify:Rule.draw", on_other_arguments(lambda *given: (*given[:3], *change(*given[3:]))))


def with_other_tree(fields: Callable[..., dict[str, Any]]) -> Wrap:
    """The first argument is a tree: these fields of it are others, worked out from all arguments."""
    return on_other_arguments(lambda tree, *rest: (replace(tree, **fields(tree, *rest)), *rest))


def of_the_row_before(noise: Any) -> Any:
    """Each row has the seed of the row before it."""
    other = copy.copy(noise)
    other.seed_B = noise.seed_B.roll(1)
    return other


def rolled(accepts: Any) -> Any:
    """Each row's accept tests are made with the noise of the row before it."""

    def mutant(noise: Any, *arguments: Any) -> Any:
        return accepts(noise, *(a.roll(1, 0) if isinstance(a, torch.Tensor) else a for a in arguments)).roll(-1, 0)

    return mutant


def residual(renormalised: bool, guarded: bool) -> Wrap:
    """max(0, p - q), with or without its norm; p where it has no mass, or nothing of the kind."""

    def mutant(p_BV: Any, q_BV: Any) -> Any:
        rest_BV = (p_BV - q_BV).clamp(min=0)
        mass_B1 = rest_BV.sum(-1, keepdim=True)
        result_BV = rest_BV / mass_B1 if renormalised else rest_BV
        return torch.where(mass_B1 > 0, result_BV, p_BV) if guarded else result_BV

    return lambda original: mutant


def bonus_of_the_node_before(follow: Any) -> Any:
    """The bonus is what was drawn at the parent of the last accepted node."""

    def mutant(tree: Any, tokens_BN: Any, draw_BN: Any) -> Any:
        accepted_BN, _ = follow(tree, tokens_BN, draw_BN)
        last_B1 = (accepted_BN * (tree.depth_BN + 1)).argmax(-1, keepdim=True)
        return accepted_BN, draw_BN.gather(1, tree.parents_BN.gather(1, last_B1).clamp(min=0))[:, 0]

    return mutant


def from_the_last(children: Any) -> Any:
    """Siblings are tried in reverse order."""
    return lambda *arguments: [(k, *rest) for k, (_, *rest) in enumerate(reversed(children(*arguments)))]


def temperature_squared(apply_sampling: Any) -> Any:
    def mutant(logits: Any, sampling: Any, *rest: Any) -> Any:
        return apply_sampling(logits, replace(sampling, temperature=sampling.temperature**2), *rest)

    return mutant


def temperature_before_sampling(node_scores: Any) -> Any:
    """The cycle divides by the temperature, and sampling does again."""

    def mutant(logits_BNV: Any, draft: Any, cycle_input: Any, *ops: Any) -> Any:
        temperature_B = torch.tensor([s.temperature or 1.0 for s in cycle_input.sampling])
        return node_scores(logits_BNV / temperature_B[:, None, None], draft, cycle_input, *ops)

    return mutant


def only_the_history(seen: Any) -> Any:
    return lambda tree, tokens_BN, history_BV: history_BV[:, None].expand(-1, tree.nodes, -1)


RAW: list[Any] = []


def remembered(node_scores: Any) -> Any:
    """Keeps raw logits."""

    def mutant(logits_BNV: Any, *rest: Any) -> Any:
        RAW.append(logits_BNV)
        return node_scores(logits_BNV, *rest)

    return mutant


def bonus_from_raw_logits(verify: Any) -> Any:
    """The bonus is drawn from logits to which no sampling was applied."""

    def mutant(draft: Any, scores_BNV: Any, position_B: Any, noise: Any, ops: Any) -> Any:
        from eyas.core.tree import Draft, Tree

        verdict = verify(draft, scores_BNV, position_B, noise, ops)
        raw_BNV = RAW[-1].float()
        last_B1 = verdict.path_BP.gather(1, verdict.length_B[:, None] - 1)
        raw_B1V = raw_BNV.gather(1, last_B1[..., None].expand(-1, -1, raw_BNV.shape[-1]))
        root = Draft(Tree.chain(len(last_B1), 1), last_B1)
        return replace(verdict, bonus_B=verify(root, raw_B1V, position_B + verdict.length_B - 1, noise, ops).bonus_B)

    return mutant


def siblings_by_q(grow: Any) -> Any:
    """Siblings without children are sorted by q, not left in the order in which they were drawn."""

    def mutant(*arguments: Any, **options: Any) -> Any:
        draft = grow(*arguments, **options)
        parents, tokens_BN = draft.tree.parents_BN[0].tolist(), draft.tokens_BN.clone()
        for parent in set(parents) - {-1}:
            siblings = [n for n, p in enumerate(parents) if p == parent and n not in parents]
            token_BK = draft.tokens_BN[:, siblings]
            order_BK = draft.q_BNV[:, parent].gather(1, token_BK).argsort(-1, descending=True)
            tokens_BN[:, siblings] = token_BK.gather(1, order_BK)
        return replace(draft, tokens_BN=tokens_BN)

    return mutant


def q_without_temperature(grow: Any) -> Any:
    """The draft says q as it was before the row's temperature was applied to it."""

    def mutant(growth: Any, roots: Any, *rest: Any) -> Any:
        draft = grow(growth, roots, *rest)
        temperature_B = torch.tensor([s.temperature for s in roots.sampling])
        return replace(draft, q_BNV=(draft.q_BNV.log() * temperature_B[:, None, None]).softmax(-1))

    return mutant


# --- the list --------------------------------------------------------------------------------------------------------------------------

MUTATIONS = (
    # raw instead of processed logits
    mutation("raw logits for the bonus", ids("eagle2"), patch("core.cycle:node_scores", remembered),
        patch("core.verify:verify", bonus_from_raw_logits), words=OTHER_IDS),
    mutation("raw logits for the first token", ids("vanilla"),
        rewrite(
            "core.rows:first_token_cycle",
            "RowSettings.from_rows([ROW], TARGET)",
            "__import__('dataclasses').replace(RowSettings.from_rows([ROW], TARGET), sampling=(Sampling(1.0),))",
        ),
        words=OTHER_IDS),
    # the text of a node, and the node of a token
    mutation("the root counts twice", ("core.test_laws", "test_nodes_count_their_own_ancestors", ()),
        rewrite("core.adjustments:Adjustments.for_tree", "BELOW[..., 0] = 0", "BELOW[..., 0] = 1")),
    mutation("the length does not grow along a path", ("core.test_laws", "test_deep_paths_keep_the_laws", ()),
        rewrite("core.adjustments:Adjustments.for_tree", "WAIT[:, None] - TREE.depth_BN", "WAIT[:, None] - 0 * TREE.depth_BN")),
    mutation("log-probabilities of the token before", ("features.test_logprobs", "test_on_long_paths", ()),
        rewrite("core.logprobs:path_logprobs", "VERDICT.tokens_BP.roll(...)", "VERDICT.tokens_BP")),
    # what rejection leaves of p and q
    rejection("the bonus from p, not from what rejection left of it", drawn("pair"),
        "torch.where(NEWLY[:, None], REST, FINAL)",
        "torch.where(NEWLY[:, None], SCORES[ROWS, NODE].softmax(-1), FINAL)", "SCORES[ROWS, NODE].softmax(-1)"),
    mutation("no renormalisation of p", drawn("three", "far"), patch("core.verify:_residual", residual(False, True)),
        words=LAW),
    mutation("no renormalisation of q", drawn("pair"),
        patch("core.verify:_without", lambda without: lambda q_BV, token_B: q_BV.scatter(1, token_B[:, None], 0.0)),
        words=LAW),
    mutation("0 / 0 where rounding leaves no residual", ("core.test_verify", "test_no_residual_mass", ()),
        patch("core.verify:_residual", residual(True, False))),
    mutation("q not restricted after a sibling", drawn("pair"),
        patch("core.verify:_without", lambda without: lambda q_BV, token_B: q_BV), words=LAW),
    rejection("a sibling that q cannot have drawn is tried", drawn("three", "two"), "TESTED & (Q > 0)", "TESTED"),
    # positions of the noise
    mutation("bonus position off by one", SLOW_DRAWN,
        rewrite("core.verify:draw_bonus", GUMBEL, "NOISE.gumbel(POSITION[:, None] - 1, VOCAB)")),
    rejection("bonus position stays at the root's", drawn("chain", "far"),
        "torch.where(ENDED, POSITION, POSITION + 1)", "POSITION"),
    mutation("target positions off by one", ids("vanilla"),
        draws(lambda position_B, noise: (position_B - 1, noise)), words=OTHER_IDS),
    mutation("noise of the next depth", chosen("chain"),
        draws(lambda position_B, noise: (position_B + 1, noise)), words=OTHER_POSITION),
    mutation("the bonus of the node before the last", chosen("chain"),
        patch("core.verify:accepted_nodes", bonus_of_the_node_before), words=LAW),
    # which nodes are tried and accepted
    mutation("children under the wrong parent, chosen", chosen("binary"),
        patch(
            "core.verify:accepted_nodes",
            with_other_tree(lambda tree, *_: {"parents_BN": tree.parents_BN - (tree.depth_BN > 1).long()}),
        ),
        words=LAW),
    mutation("children under the wrong parent, drawn", drawn("mixed"),
        patch(
            "core.verify:_children",
            with_other_tree(
                lambda tree, node_B: {
                    "parents_BN": torch.where(
                        tree.depth_BN == tree.depth_BN.gather(1, node_B[:, None]) + 1, node_B[:, None], tree.parents_BN
                    )
                }
            ),
        ),
        words=LAW),
    mutation("scouts are accepted", chosen("scouts"),
        patch(
            "core.verify:accepted_nodes",
            with_other_tree(lambda tree, *_: {"acceptable_BN": torch.ones_like(tree.acceptable_BN)}),
        ),
        words=LAW),
    mutation("duplicate siblings followed to the longest", ("core.test_verify", "test_siblings_must_differ", (False,)),
        patch("core.verify:check_siblings", lambda check: lambda *arguments: None),
        words="two siblings with one token were verified"),
    # sampling
    mutation("temperature twice, in apply_sampling", PROCESSORS,
        patch("core.sampling:apply_sampling", temperature_squared)),
    mutation("temperature twice, in the loop", ids("eagle2"),
        patch("core.cycle:node_scores", temperature_before_sampling), words=OTHER_IDS),
    mutation("a penalty that does not see the drafted tokens", ("test_exact_pipeline", "check_penalty", ()),
        patch("core.tree:Tree.tokens_seen", only_the_history), words=OTHER_IDS),
    # the order of drawn siblings
    mutation("drawn siblings sorted by q", grown("pair", "T=1"), patch("drafters._grow:grow_static", siblings_by_q),
        words=LAW),
    mutation("drawn siblings tried from the last", drawn("pair"), patch("core.verify:_children", from_the_last),
        words=LAW),
    # another row's noise
    mutation("another row's noise for the draws", ids("eagle2"),
        draws(lambda position_B, noise: (position_B, of_the_row_before(noise))), words=OTHER_IDS),
    mutation("another row's noise for the bonus", verified_alone(True),
        rewrite("core.verify:draw_bonus", GUMBEL, f"{GUMBEL}.roll(1, 0)")),
    mutation("another row's noise for the accept tests", verified_alone(True),
        patch("core.sampling:GumbelNoise.accepts", rolled)),
    mutation("another row's seed", ("core.test_sampling", "test_noise_depends_on_nothing_else", ()),
        rewrite("core.sampling:GumbelNoise._uniform", "self.seed_B", "self.seed_B.roll(1)")),
    rejection("one uniform number for all siblings", drawn("binary"), ACCEPTS, "NOISE.accepts(CHANCE, POSITION, 0)"),
    # blocks
    block("a block's weight above one", "WEIGHT.clamp(max=1)", "WEIGHT"),
    block("a block's weight of the last token alone", "WEIGHT * P / Q", "P / Q"),
    block("a block's residual without its weight", "(WEIGHT[:, None] * P - Q).clamp(min=0)", "(P - Q).clamp(min=0)"),
    block("a block's test without what was lost", "MASS / (MASS + 1 - WEIGHT)", "MASS / MASS.clamp(min=1)"),
    block("the shortest prefix of a block",
        "torch.where(PASSED, DEPTH, END)", "torch.where(PASSED & (END == 0), DEPTH, END)", ACCEPTS_BLOCK),
    block("a block's bonus from p", "torch.where(MASS[:, None] > 0, LEFT, P)", "P"),
    block("a block's bonus with the noise of the root",
        "draw_bonus(LEFT, POSITION + END + 1, NOISE)", "draw_bonus(LEFT, POSITION + 1, NOISE)",
        check=("core.test_verify", "test_a_block_against_a_slow_one", ()), words=""),
    block("a block's uniform numbers by absolute position", ACCEPTS_BLOCK, "NOISE.accepts(CHANCE, POSITION + DEPTH, 0)",
        check=("core.test_joint_law", "test_the_joint_law_is_the_targets", ("block",)), words=""),
    block("a block goes on behind what is no candidate",
        "HERE & TREE.acceptable_BN[:, NEXT] & POSSIBLE", "HERE & POSSIBLE",
        check=("core.test_verify", "test_a_block_ends_at_what_is_no_candidate", ()), words=""),
    block("one uniform number for a whole block", ACCEPTS_BLOCK, "NOISE.accepts(CHANCE, POSITION, 1, 3)"),
    mutation("greedy rows are verified as drawn", ("core.test_verify", "test_greedy_rows_in_a_drawn_batch", ()),
        rewrite("core.verify:verify", "NOISE.greedy_B", "~(NOISE.greedy_B | True)")),
    # q without the row's temperature
    mutation("q stated without the row's temperature", grown("pair", "T=0.6"),
        patch("drafters._grow:grow_static", q_without_temperature), words=LAW),
    mutation("q drawn and stated without the row's temperature", ORDER,
        rewrite(
            "drafters._grow:grow_static",
            "apply_sampling_rows(LOGITS, SAMPLING, SEEN)",
            "apply_sampling_rows(LOGITS * (SAMPLING[0].temperature or 1), SAMPLING, SEEN)",
        ),
        words="tokens are not those drawn from q, in order"),
    # memory
    mutation("the bytes of one row for all of them", ("core.test_target", "test_bytes_are_those_that_are_reserved", ()),
        rewrite("core.cache:KVCache.bytes_by_device", "self.rows", "1")),
    # several devices
    apart("paths stay on the main device", "core.cache:KVCache.commit",
        "PATH.to(DEVICE)", "PATH", "COMMIT(STORE, LENGTH.to(DEVICE), PATH.to(DEVICE))"),
    apart("slots stay on the main device", "core.cache:KVCache._rows_and_slots",
        "return self._indices_by_device[DEVICE]", "return self._indices_by_device[self.device]"),
    apart("all stores on the main device", "core.cache:KVCache.reserve",
        "_zeros(SHAPE, DTYPE, DEVICE)", "_zeros(SHAPE, DTYPE, self.device)"),
    apart("the stores of one device are not committed", "core.cache:KVCache.commit",
        "self._stores.items()", "list(self._stores.items())[:1]", method="oracle", words=OTHER_IDS),
    apart("the stores of one device are not copied", "core.cache:KVCache.copy",
        "self._stores.values()", "list(self._stores.values())[:1]", words=OTHER_IDS),
    apart("features stay where their layers are", "core.target:Target.tap",
        "CAUGHT[K].to(self.device)", "CAUGHT[K]", method="eagle3"),
    apart("logits of a draft stay where the LM head is", "core.families:head", "X.to(Y)", "X", method="eagle2"),
    apart("states of nodes are read with numbers of the main device", "targets.recurrent:RowStates.commit",
        "LAST.to(ONE.device)", "LAST", "HERE, NODE = ROWS.to(ONE.device), LAST.to(ONE.device)", family="lfm2"),
)  # fmt: skip


# --- trials ----------------------------------------------------------------------------------------------------------------------------


def trials() -> Iterator[tuple[str, tuple[Change, ...], Check]]:
    """Every distinct check on the code as it is, then every mutation."""
    for check in {repr(m.check): m.check for m in MUTATIONS}.values():
        yield ORIGINAL + f"{check[1]}{check[2]}", (), check
    for m in MUTATIONS:
        yield m.name, m.changes, m.check


def attempt(changes: tuple[Change, ...], check: Check) -> dict[str, str]:
    """Run one check with these changes. An assertion of a test, or of what a test called to compare, counts."""
    module, function, arguments = check
    try:
        install(changes)
        import eyas

        assert Path(eyas.__file__).is_relative_to(SOURCE), "another eyas was imported"
        getattr(importlib.import_module(module), function)(*arguments)
    except AssertionError as error:
        raised = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        ours = raised.is_relative_to(SOURCE) or raised == Path(__file__)
        return {"outcome": "error" if ours else "assertion", "words": str(error)[:300]}
    except BaseException as error:
        return {
            "outcome": "error",
            "words": f"{type(error).__name__}: {error}"[:300],
            "where": traceback.format_exc()[-600:],
        }
    return {"outcome": "passed", "words": ""}


def forked(changes: tuple[Change, ...], check: Check) -> dict[str, str]:
    """The same in a process of its own, which ends itself when it computes for too long."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        os.write(write, json.dumps(attempt(changes, check)).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        result = pipe.read()
    status = os.waitpid(child, 0)[1]
    return json.loads(result) if result else {"outcome": "error", "words": f"the process ended with status {status}"}


def main() -> None:
    sys.path[:0] = [str(TESTS), str(SOURCE)]
    import pytest
    import transformers.generation.logits_process
    from scipy import stats

    from zoo import tiny

    torch.set_num_threads(1)
    tiny("llama", num_hidden_layers=1)  # whatever all checks need is in memory before the forks
    del pytest, stats, transformers
    assert "eyas" not in sys.modules
    gc.freeze()  # a collection in a child would copy every page that it looks at
    for name, changes, check in trials():
        print(json.dumps({"trial": name, **forked(changes, check)}), flush=True)
    gc.unfreeze()  # or Triton's bindings report leaks


if __name__ == "__main__":
    main()

"""Mutations of the shipped source, each with the check that must find it; and the program that tries them.

    python tests/mutations.py FOLDER     one JSON line per trial: {"trial": name, "outcome": "passed" | "assertion" | "error", "words": ...}

A trial copies src/eyas into FOLDER, edits one snippet, and runs one check of the test files against that copy in a process of its own,
forked from one that has already imported torch and transformers but nothing of eyas. The trials of ORIGINAL edit nothing and must pass.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent
SOURCE = TESTS.parent / "src" / "eyas"
ORIGINAL = "original: "
LIMIT_SECONDS = 60

Check = tuple[str, str, tuple[Any, ...]]  # module of the tests, function, arguments


@dataclass(frozen=True)
class Mutation:
    """One mistake that somebody could make."""

    name: str
    file: str  # below src/eyas
    old: str  # occurs exactly once
    new: str
    check: Check
    words: str = ""  # what the failed assertion says, where it says something


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


SLOW_DRAWN: Check = ("core.test_verify", "test_random_trees_against_a_slow_verification", (True,))
PROCESSORS: Check = ("core.test_sampling", "test_scores_are_those_of_transformers", ({"temperature": 0.7, "top_p": 0.9},))
BLOCK: Check = ("core.test_verify", "test_blocks_are_exact", ("near",))
ORDER: Check = ("core.test_verify", "test_drawn_siblings_come_in_draw_order_from_the_processed_q", ("T=0.6",))
LAW = "the law of the first"
OTHER_IDS = "other ids than plain decoding"
OTHER_POSITION = "position that is not the tree's"

MUTATIONS = (
    # raw instead of processed logits for the bonus
    Mutation(
        "raw logits for the bonus",
        "core/engine.py",
        "            verdict = self.verify(draft, scores_BNV, roots.position_B, roots.noise)\n",
        """            verdict = self.verify(draft, scores_BNV, roots.position_B, roots.noise)
            last_B1 = verdict.path_BP.gather(1, verdict.length_B[:, None] - 1)
            raw_B1V = seen.logits_BNV.gather(1, last_B1[..., None].expand(-1, -1, seen.logits_BNV.shape[-1])).float()
            end = verify(Draft(Tree.chain(len(last_B1), 1), last_B1), raw_B1V, roots.position_B + verdict.length_B - 1, roots.noise)
            verdict = Verdict(verdict.path_BP, verdict.tokens_BP, verdict.length_B, end.bonus_B)
""",
        ids("eagle2"),
        OTHER_IDS,
    ),
    Mutation(
        "raw logits for the first token",
        "core/engine.py",
        "process(self._prefill(b, request.prompt)[None], request.sampling, *self._first_context(request))",
        "self._prefill(b, request.prompt)[None].float()",
        ids("vanilla"),
        OTHER_IDS,
    ),
    Mutation(
        "the bonus from p, not from what rejection left of it",
        "core/verify.py",
        "torch.where(newly_B[:, None], p_BV, final_BV)",
        "torch.where(newly_B[:, None], scores_BNV[rows, node_B].softmax(-1), final_BV)",
        drawn("pair"),
        LAW,
    ),
    # no renormalisation after a rejected sibling
    Mutation(
        "no renormalisation of p",
        "core/verify.py",
        "mass_B1 > 0, rest_BV / mass_B1, p_BV",
        "mass_B1 > 0, rest_BV, p_BV",
        drawn("three", "far"),
        LAW,
    ),
    Mutation(
        "no renormalisation of q", "core/verify.py", "mass_B1 > 0, rest_BV / mass_B1, 0.0", "mass_B1 > 0, rest_BV, 0.0", drawn("pair"), LAW
    ),
    Mutation(
        "0 / 0 where rounding leaves no residual",
        "core/verify.py",
        "torch.where(mass_B1 > 0, rest_BV / mass_B1, p_BV)",
        "rest_BV / mass_B1",
        ("core.test_verify", "test_no_residual_mass", ()),
    ),
    # q not restricted after a sibling
    Mutation(
        "q not restricted after a sibling",
        "core/verify.py",
        "q_BV = torch.where(refused_B, _without(q_BV, token_B), q_BV)",
        "pass",
        drawn("pair"),
        LAW,
    ),
    Mutation(
        "a sibling that q cannot have drawn is tried", "core/verify.py", " & (q_BV[rows, token_B] > 0)", "", drawn("three", "two"), LAW
    ),
    # off-by-one bonus position
    Mutation(
        "bonus position off by one", "core/verify.py", "bonus_position_B = position_B + 1\n", "bonus_position_B = position_B\n", SLOW_DRAWN
    ),
    Mutation(
        "bonus position stays at the root's",
        "core/verify.py",
        "torch.where(ended_B, bonus_position_B, bonus_position_B + 1)",
        "bonus_position_B",
        drawn("chain", "far"),
        LAW,
    ),
    Mutation(
        "target positions off by one",
        "core/verify.py",
        "torch.arange(1, tree.max_depth + 2,",
        "torch.arange(tree.max_depth + 1,",
        ids("vanilla"),
        OTHER_IDS,
    ),
    Mutation(
        "noise of the next depth",
        "core/verify.py",
        "torch.arange(1, tree.max_depth + 2,",
        "torch.arange(2, tree.max_depth + 3,",
        chosen("chain"),
        OTHER_POSITION,
    ),
    Mutation(
        "the bonus of the node before the last",
        "core/verify.py",
        "draw_BN.gather(1, last_B1)[:, 0]",
        "draw_BN.gather(1, tree.parents_BN.gather(1, last_B1).clamp(min=0))[:, 0]",
        chosen("chain"),
        LAW,
    ),
    # children tried under the wrong parent
    Mutation(
        "children under the wrong parent, chosen",
        "core/verify.py",
        "tokens_BN == draw_BN.gather(1, tree.parents_BN.clamp(min=0))",
        "tokens_BN == draw_BN.gather(1, (tree.parents_BN - (tree.depth_BN > 1).long()).clamp(min=0))",
        chosen("binary"),
        LAW,
    ),
    Mutation(
        "children under the wrong parent, drawn",
        "core/verify.py",
        "(tree.parents_BN == node_B[:, None])",
        "(tree.depth_BN == tree.depth_BN.gather(1, node_B[:, None]) + 1)",
        drawn("mixed"),
        LAW,
    ),
    Mutation("scouts are accepted", "core/verify.py", "clamp(min=0))) & tree.candidate_BN", "clamp(min=0)))", chosen("scouts"), LAW),
    # temperature applied twice
    Mutation(
        "temperature twice, in process",
        "core/sampling.py",
        "scores_NV / sampling.temperature",
        "scores_NV / sampling.temperature**2",
        PROCESSORS,
    ),
    Mutation(
        "temperature twice, in the loop",
        "core/engine.py",
        "process(logits_BNV[b], roots.sampling[b],",
        "process(logits_BNV[b] / (roots.sampling[b].temperature or 1), roots.sampling[b],",
        ids("eagle2"),
        OTHER_IDS,
    ),
    Mutation(
        "a penalty that does not see the drafted tokens",
        "core/engine.py",
        "draft.tree.seen(draft.tokens_BN, roots.history_BV)",
        "roots.history_BV[:, None].expand(-1, draft.tree.nodes, -1)",
        ("test_exact_pipeline", "check_penalty", ()),
        OTHER_IDS,
    ),
    # duplicate siblings followed to the longest
    Mutation(
        "duplicate siblings followed to the longest",
        "core/verify.py",
        'torch._assert_async(~_twins(tree, draft.tokens_BN).any(), "siblings with the same token; unite them before verification")',
        "pass",
        ("core.test_verify", "test_siblings_must_differ", (False,)),
        "two siblings with one token were verified",
    ),
    # drawn siblings re-sorted by q
    Mutation(
        "drawn siblings sorted by q",
        "drafters/_grow.py",
        "        key_BQK, token_BQK = key_BQV.topk(level.width)\n",
        """        key_BQK, token_BQK = key_BQV.topk(level.width)
        order_BQK = scores_BQV.gather(-1, token_BQK).argsort(-1, descending=True)
        key_BQK, token_BQK = key_BQK.gather(-1, order_BQK), token_BQK.gather(-1, order_BQK)
""",
        grown("pair", "T=1"),
        LAW,
    ),
    Mutation(
        "drawn siblings tried from the last",
        "core/verify.py",
        "rank_BN = child_BN.cumsum(-1)\n    most = int(rank_BN[:, -1].max())",
        "rank_BN = child_BN.flip(-1).cumsum(-1).flip(-1)\n    most = int(rank_BN[:, 0].max())",
        drawn("pair"),
        LAW,
    ),
    # another row's noise
    Mutation(
        "another row's noise for the draws",
        "core/verify.py",
        "noise.gumbel(position_BP, scores_BNV.shape[-1])",
        "noise.gumbel(position_BP, scores_BNV.shape[-1]).roll(1, 0)",
        ids("eagle2"),
        OTHER_IDS,
    ),
    Mutation(
        "another row's noise for the bonus",
        "core/verify.py",
        "gumbel(bonus_position_B[:, None], final_BV.shape[-1])[:, 0]",
        "gumbel(bonus_position_B[:, None], final_BV.shape[-1])[:, 0].roll(1, 0)",
        verified_alone(True),
    ),
    Mutation(
        "another row's noise for the accept tests",
        "core/verify.py",
        "noise.accepts(chance_B, bonus_position_B, sibling)",
        "noise.accepts(chance_B.roll(1), bonus_position_B.roll(1), sibling).roll(-1)",
        verified_alone(True),
    ),
    Mutation(
        "another row's seed",
        "core/sampling.py",
        "_mix(_mix(self.seed_B + _GOLDEN) + stream)",
        "_mix(_mix(self.seed_B.roll(1) + _GOLDEN) + stream)",
        ("core.test_sampling", "test_noise_depends_on_nothing_else", ()),
    ),
    Mutation(
        "one uniform number for all siblings",
        "core/verify.py",
        "noise.accepts(chance_B, bonus_position_B, sibling)",
        "noise.accepts(chance_B, bonus_position_B, 0)",
        drawn("binary"),
        LAW,
    ),
    # blocks
    Mutation("a block's weight above one", "core/verify.py", ".clamp(max=1), weight_B)", ", weight_B)", BLOCK, LAW),
    Mutation(
        "a block's weight of the last token alone",
        "core/verify.py",
        "(weight_B * p_next_B / q_next_B)",
        "(p_next_B / q_next_B)",
        BLOCK,
        LAW,
    ),
    Mutation("a block's residual without its weight", "core/verify.py", "(weight_B[:, None] * p_BV - torch", "(p_BV - torch", BLOCK, LAW),
    Mutation("a block's test without what was lost", "core/verify.py", "(mass_B + 1 - weight_B)", "mass_B.clamp(min=1)", BLOCK, LAW),
    Mutation(
        "the shortest prefix of a block",
        "core/verify.py",
        "torch.where(passed_B, n, end_B)",
        "torch.where(passed_B & (end_B == 0), n, end_B)",
        BLOCK,
        LAW,
    ),
    Mutation("a block's bonus from p", "core/verify.py", "torch.where(mass_B[:, None] > 0, left_BV, p_BV)", "p_BV", BLOCK, LAW),
    Mutation(
        "a block's bonus with the noise of the root",
        "core/verify.py",
        "(position_B + end_B + 1)[:, None]",
        "(position_B + 1)[:, None]",
        ("core.test_verify", "test_a_block_against_a_slow_one", ()),
    ),
    Mutation(
        "a block goes on behind what is no candidate",
        "core/verify.py",
        "here_B & tree.candidate_BN[:, n + 1] & (q_next_B > 0)",
        "here_B & (q_next_B > 0)",
        ("core.test_verify", "test_a_block_ends_at_what_is_no_candidate", ()),
    ),
    Mutation(
        "one uniform number for a whole block",
        "core/verify.py",
        "position_B + n, 0)",
        "position_B + 1, 0)",
        BLOCK,
        LAW,
    ),
    Mutation(
        "greedy rows are verified as drawn",
        "core/verify.py",
        "torch.where(noise.greedy_B, bonus_B, drawn_bonus_B)",
        "drawn_bonus_B",
        ("core.test_verify", "test_greedy_rows_in_a_drawn_batch", ()),
    ),
    # q without the row's temperature
    Mutation(
        "q stated without the row's temperature",
        "drafters/_grow.py",
        "    return Draft(tree, tokens_BN, score_BN, q_BNV, block and q_BNV is not None)",
        """    if q_BNV is not None:
        q_BNV = torch.stack([(q_NV.log() * s.temperature).softmax(-1) for q_NV, s in zip(q_BNV, roots.sampling, strict=True)])
    return Draft(tree, tokens_BN, score_BN, q_BNV)""",
        grown("pair", "T=0.6"),
        LAW,
    ),
    Mutation(
        "q drawn and stated without the row's temperature",
        "drafters/_grow.py",
        "[process(logits_BQv[b], s,",
        "[process(logits_BQv[b] * (s.temperature or 1), s,",
        ORDER,
        "tokens are not those drawn from q, in order",
    ),
)


def trials() -> Iterator[tuple[str, Mutation | None, Check]]:
    """Every distinct check on the original, then every mutation."""
    for check in dict.fromkeys(json.dumps([m.check[0], m.check[1], repr(m.check[2])]) for m in MUTATIONS):
        own = next(m.check for m in MUTATIONS if json.dumps([m.check[0], m.check[1], repr(m.check[2])]) == check)
        yield ORIGINAL + f"{own[1]}{own[2]}", None, own
    for mutation in MUTATIONS:
        yield mutation.name, mutation, mutation.check


@contextmanager
def copied(folder: Path, mutation: Mutation | None) -> Iterator[Path]:
    """src/eyas, without weights, below `folder`; edited."""
    root = folder / "copy"
    shutil.copytree(
        SOURCE, root / "eyas", ignore=lambda where, names: [n for n in names if (Path(where) / n).is_file() and not n.endswith(".py")]
    )
    try:
        if mutation is not None:
            file = root / "eyas" / mutation.file
            text = file.read_text(encoding="utf-8")
            assert text.count(mutation.old) == 1, f"{mutation.name}: the snippet occurs {text.count(mutation.old)} times in {mutation.file}"
            file.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
        yield root
    finally:
        shutil.rmtree(root)


def attempt(root: Path, check: Check) -> dict[str, str]:
    """Run one check against the copy. An assertion counts when a test, or what a test called to compare, raised it."""
    sys.path.insert(0, str(root))
    module, function, arguments = check
    try:
        import eyas

        assert str(eyas.__file__).startswith(str(root)), "another eyas was imported"
        getattr(importlib.import_module(module), function)(*arguments)
    except AssertionError as error:
        inner = traceback.extract_tb(error.__traceback__)[-1]
        ours = inner.filename.startswith(str(root)) or inner.filename == __file__
        return {"outcome": "error" if ours else "assertion", "words": str(error)[:300], "where": f"{inner.name}:{inner.lineno}"}
    except BaseException as error:
        return {"outcome": "error", "words": f"{type(error).__name__}: {error}"[:300], "where": traceback.format_exc()[-600:]}
    return {"outcome": "passed", "words": "", "where": ""}


def forked(root: Path, check: Check) -> dict[str, str]:
    """The same in a process of its own, which ends itself when it takes too long."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        import signal

        signal.alarm(LIMIT_SECONDS)
        os.write(write, json.dumps(attempt(root, check)).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read()
    status = os.waitpid(child, 0)[1]
    return json.loads(said) if said else {"outcome": "error", "words": f"the process ended with status {status}", "where": ""}


def main(folder: Path) -> None:
    sys.path.insert(0, str(TESTS))
    sys.dont_write_bytecode = True
    import torch
    import transformers.generation.logits_process
    from scipy import stats

    from zoo import tiny

    torch.set_num_threads(1)
    tiny("llama", num_hidden_layers=1)  # whatever all checks need is in memory before the forks
    del stats, transformers
    assert "eyas" not in sys.modules
    for name, mutation, check in trials():
        with copied(folder, mutation) as root:
            print(json.dumps({"trial": name, **forked(root, check)}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Mistakes that somebody could make, each with the test that must find it: (file of eyas, old text, new text, test, what its
failure says). A test runs in a copy of eyas with one mistake. If the source has changed, mend the old text."""

import sys
from pathlib import Path

import pytest

import processes
from test_architecture import EYAS

VERIFY, GROW, CACHE, CYCLE = "core/verify.py", "drafters/_grow.py", "core/cache.py", "core/cycle.py"
ADJUSTMENTS, SAMPLING = "core/adjustments.py", "core/sampling.py"
LAW, OTHER_IDS, DEVICES = "the law of the first", "other ids than plain decoding", "same device"
IDS = "test_exact_pipeline.py::test_chosen_trees_return_the_ids_of_a_plain_loop"
PENALTY = "test_exact_pipeline.py::test_a_penalty_sees_what_was_drafted"
CHOSEN, DRAWN = "core/test_verify.py::test_chosen_trees_are_exact", "core/test_verify.py::test_drawn_trees_are_exact"
GROWN, BLOCK = (
    "core/test_verify.py::test_static_trees_as_grown_are_exact",
    "core/test_verify.py::test_blocks_are_exact[torch-near]",
)
SLOW = "core/test_verify.py::test_random_trees_against_a_slow_verification[torch-drawn]"
JOINT = "core/test_joint_law.py::test_the_joint_law_is_the_targets[block]"
ORDER = "core/test_verify.py::test_drawn_siblings_come_in_draw_order_from_the_processed_q[torch-T=0.6]"
APART, LONG = "core/test_several_devices.py::test_every_method", "core/test_several_devices.py::test_long_paths"
REST = "return torch.where(mass_B1 > 0, rest_BV / mass_B1, p_BV)"
SAMPLED = "apply_sampling_rows(logits_BQV, cycle_input.sampling, adjustments)\n        vocab"
MUTATIONS = [
    # raw instead of processed logits
    (CYCLE, "return scores(logits_BNV, cycle_input.sampling, nodes), {}", "return logits_BNV.float(), {}", f"{IDS}[eagle2]", OTHER_IDS),
    ("core/rows.py", "RowSettings.from_rows([row], target), token_1",
     "__import__('dataclasses').replace(RowSettings.from_rows([row], target), sampling=(Sampling(1.0),)), token_1",
     f"{IDS}[vanilla]", OTHER_IDS),
    # the text of a node, and the node of a token
    (ADJUSTMENTS, "below_root_BNN[..., 0] = 0", "below_root_BNN[..., 0] = 1", "core/test_laws.py::test_nodes_count_their_own_ancestors"),
    (ADJUSTMENTS, "wait_B[:, None] - tree.depth_BN", "wait_B[:, None] - 0 * tree.depth_BN",
     "core/test_laws.py::test_deep_paths_keep_the_laws"),
    ("core/logprobs.py", "verdict.tokens_BP.roll(-1, dims=1)", "verdict.tokens_BP", "features/test_logprobs.py::test_on_long_paths"),
    ("core/tree.py", "seen_BNV[b, n, tokens_BN[b, ancestor]] = True", "pass", PENALTY, OTHER_IDS),
    # what rejection leaves of p and q
    (VERIFY, "torch.where(ends_here_B[:, None], p_BV, bonus_BV)",
     "torch.where(ends_here_B[:, None], scores_BNV[rows, node_B].softmax(-1), bonus_BV)", f"{DRAWN}[torch-pair-near]", LAW),
    (VERIFY, REST, "return rest_BV", f"{DRAWN}[torch-three-far]", LAW),
    (VERIFY, REST, "return rest_BV / mass_B1", "core/test_verify.py::test_no_residual_mass[torch]"),
    (VERIFY, "return torch.where(mass_B1 > 0, rest_BV / mass_B1, 0.0)", "return rest_BV", f"{DRAWN}[torch-pair-near]", LAW),
    (VERIFY, "rest_BV = q_BV.scatter(1, token_B[:, None], 0.0)", "return q_BV", f"{DRAWN}[torch-pair-near]", LAW),
    (VERIFY, "~descended_B & (q_token_B > 0)", "~descended_B", f"{DRAWN}[torch-three-two]", LAW),
    # positions of the noise
    (VERIFY, "noise.gumbel(position_B[:, None], ", "noise.gumbel(position_B[:, None] - 1, ", SLOW),
    (VERIFY, "bonus_position_B = torch.where(ended_B, bonus_position_B, bonus_position_B + 1)", "", f"{DRAWN}[torch-chain-far]", LAW),
    (VERIFY, "torch.arange(1, tree.max_depth + 2", "torch.arange(tree.max_depth + 1", f"{IDS}[vanilla]", OTHER_IDS),
    (VERIFY, "torch.arange(1, tree.max_depth + 2", "torch.arange(2, tree.max_depth + 3", f"{CHOSEN}[torch-chain-T=1-tight]",
     "position that is not the tree's"),
    (VERIFY, "draw_BN.gather(1, last_B1)[:, 0]", "draw_BN.gather(1, tree.parents_BN.gather(1, last_B1).clamp(min=0))[:, 0]",
     f"{CHOSEN}[torch-chain-T=1-tight]", LAW),
    # which nodes are tried and accepted
    (VERIFY, "draw_BN.gather(1, tree.parents_BN.clamp(min=0))",
     "draw_BN.gather(1, (tree.parents_BN - (tree.depth_BN > 1).long()).clamp(min=0))", f"{CHOSEN}[torch-binary-T=1-tight]", LAW),
    (VERIFY, "(tree.parents_BN == node_B[:, None]) & tree",
     "(tree.depth_BN == tree.depth_BN.gather(1, node_B[:, None]) + 1) & tree", f"{DRAWN}[torch-mixed-near]", LAW),
    (VERIFY, "((tokens_BN == at_parent_BN) & tree.acceptable_BN)", "(tokens_BN == at_parent_BN)", f"{CHOSEN}[torch-scouts-T=1-tight]", LAW),
    (VERIFY, "_assert_async(~duplicate", "_assert_async(~duplicate | True", "core/test_verify.py::test_siblings_must_differ[torch-chosen]",
     "two siblings with one token were verified"),
    (VERIFY, "    return children", "    return [(k, *rest) for k, (_, *rest) in enumerate(reversed(children))]",
     f"{DRAWN}[torch-pair-near]", LAW),
    (VERIFY, "deterministic_B = noise.greedy_B", "deterministic_B = torch.zeros_like(noise.greedy_B)",
     "core/test_verify.py::test_greedy_rows_in_a_drawn_batch[torch]"),
    # temperature
    (SAMPLING, "scores_NV / sampling.temperature", "scores_NV / sampling.temperature**2",
     "core/test_sampling.py::test_scores_are_those_of_transformers"),
    (CYCLE, "node_scores(output.logits_BNV,",
     "node_scores(output.logits_BNV / torch.tensor([s.temperature or 1.0 for s in cycle_input.sampling])[:, None, None],",
     f"{IDS}[eagle2]", OTHER_IDS),
    (GROW, "q_BNV[:, inner_Q] = q_BQV", "q_BNV[:, inner_Q] = (q_BQV.log() * (cycle_input.sampling[0].temperature or 1)).softmax(-1)",
     f"{GROWN}[torch-chain-T=0.6-4-1]", LAW),
    (GROW, SAMPLED, SAMPLED.replace("logits_BQV", "logits_BQV * (cycle_input.sampling[0].temperature or 1)", 1), ORDER, "in order"),
    (GROW, "key_BQK, token_BQK = key_BQV.topk(level.width)",
     "key_BQK, token_BQK = key_BQV.topk(level.width)\n"
     "        token_BQK = token_BQK.gather(-1, scores_BQV.gather(-1, token_BQK).argsort(-1, descending=True))",
     f"{GROWN}[torch-binary-T=1-3-2]", LAW),
    # another row's noise
    (VERIFY, "noise.gumbel(position_BP, scores_BNV.shape[-1])", "noise.gumbel(position_BP, scores_BNV.shape[-1]).roll(1, 0)",
     f"{IDS}[eagle2]", OTHER_IDS),
    (VERIFY, "weights_BV.shape[-1])[:, 0]", "weights_BV.shape[-1]).roll(1, 0)[:, 0]", SLOW),
    (SAMPLING, "position_B[:, None], index_K)[:, 0]", "position_B[:, None], index_K).roll(1, 0)[:, 0]", SLOW),
    (SAMPLING, "self.seed_B + _GOLDEN", "self.seed_B.roll(1) + _GOLDEN", "core/test_sampling.py::test_noise_depends_on_nothing_else"),
    (VERIFY, "bonus_position_B, sibling)", "bonus_position_B, 0)", f"{DRAWN}[torch-binary-near]", LAW),
    # blocks
    (VERIFY, "(w_B * p_next_B / q_next_B).clamp(max=1)", "w_B * p_next_B / q_next_B", BLOCK, LAW),
    (VERIFY, "(w_B * p_next_B / q_next_B)", "(p_next_B / q_next_B)", BLOCK, LAW),
    (VERIFY, "(w_B[:, None] * p_BV - q_BV)", "(p_BV - q_BV)", BLOCK, LAW),
    (VERIFY, "mass_B / (mass_B + 1 - w_B)", "mass_B / mass_B.clamp(min=1)", BLOCK, LAW),
    (VERIFY, "torch.where(passes_B, n, length_B)", "torch.where(passes_B & (length_B == 0), n, length_B)", BLOCK, LAW),
    (VERIFY, "torch.where(mass_B[:, None] > 0, left_BV, p_BV)", "p_BV", BLOCK, LAW),
    (VERIFY, "position_B, n, GumbelNoise.BLOCK)", "position_B, 1, GumbelNoise.BLOCK)", BLOCK, LAW),
    (VERIFY, "position_B + length_B + 1, noise)", "position_B + 1, noise)",
     "core/test_verify.py::test_a_block_against_a_slow_one[torch]"),
    (VERIFY, "noise.accepts(chance_B, position_B, n, GumbelNoise.BLOCK)", "noise.accepts(chance_B, position_B + n, 0)", JOINT),
    (VERIFY, "exists_B & tree.acceptable_BN[:, n + 1] & (", "exists_B & (",
     "core/test_verify.py::test_a_block_ends_at_what_is_no_candidate[torch]"),
    # memory, and several devices
    (CACHE, "n * self.rows * heads", "n * heads", "core/test_target.py::test_bytes_are_those_that_are_reserved"),
    (CACHE, "path_BP.to(device))", "path_BP)", f"{APART}[suffix]", DEVICES),
    (CACHE, "return self._indices_by_device[device]", "return self._indices_by_device[self.device]", f"{APART}[suffix]", DEVICES),
    (CACHE, "h + self._extra), self.dtype, device)", "h + self._extra), self.dtype, self.device)", f"{APART}[suffix]", DEVICES),
    (CACHE, "in self._stores.items():\n            self._commit", "in list(self._stores.items())[:1]:\n            self._commit",
     f"{LONG}[llama]", OTHER_IDS),
    (CACHE, "in self._stores.values():\n            store[:, row, :", "in list(self._stores.values())[:1]:\n            store[:, row, :",
     f"{APART}[suffix]", OTHER_IDS),
    ("core/target.py", "caught[k].to(self.device)", "caught[k]", f"{APART}[eagle3]", DEVICES),
    ("core/families.py", "family.head(hidden).to(hidden.device)", "family.head(hidden)", f"{APART}[eagle2]", DEVICES),
    ("targets/recurrent.py", "last_R.to(module.device)", "last_R", f"{LONG}[lfm2]", DEVICES),
]  # fmt: skip


@pytest.mark.parametrize("place", range(len(MUTATIONS)))
def test_the_old_text_is_there(place: int) -> None:
    """Guards the list against changes of the source, before any mistake is tried."""
    file, old, new, *_ = MUTATIONS[place]
    assert (EYAS / file).read_text(encoding="utf-8").count(old) == 1
    assert old != new


@pytest.mark.exhaustive
@pytest.mark.parametrize("place", range(len(MUTATIONS)))
def test_a_mistake_is_found(place: int, tmp_path: Path) -> None:
    """Guards that the other tests would notice."""
    file, old, new, test, *says = MUTATIONS[place]
    folder, _, name = file.partition("/")
    (tmp_path / "eyas" / folder).mkdir(parents=True)
    for entry in (*EYAS.iterdir(), *(EYAS / folder).iterdir()):
        if entry.name not in (folder, name):
            (tmp_path / entry.relative_to(EYAS.parent)).symlink_to(entry)
    (tmp_path / "eyas" / file).write_text((EYAS / file).read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    tests = Path(__file__).parent
    # what is mutated is Python
    environment = processes.environment(PYTHONPATH=f"{tmp_path}:{tests}", EYAS_KERNELS="off")
    options = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # a warm child has imported plugins of other tests
    command = [sys.executable, "-m", "pytest", "-n0", "-p", "no:cacheprovider", *options, tests / test]
    done = processes.run(command, warm=True, env=environment, cwd=tests.parent)
    assert " failed" in done.stdout, done.stdout[-2000:] + done.stderr[-500:]
    assert "".join(says) in done.stdout, done.stdout[-2000:]

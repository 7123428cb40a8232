"""Make the vectors from the weights of the package, by eyas and by the package's own reference, which must agree.

    python packages/draft-vectors/runs/make_vectors.py             some minutes on one core

Prompts are places in the licence at which no decision is near a tie: the same trees and texts come out when every weight is
changed by 1e-5 of its size, which moves logits more than any order of sums in float32 does, and the target's best token leads
by a logit or more, which is more than bfloat16's error.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file

from draft_vectors.decode import TARGET, Case, Cycle, Decoder, Noise
from draft_vectors.engines.eyas import Eyas
from draft_vectors.heads import Target
from draft_vectors.runner import DATA

PROMPTS, PROMPT, LEAD, CHANGE = 3, 12, 1.0, 1e-5
CYCLES = 2  # cycles of the first prompt whose arrays are kept
AGREE = 1e-4  # largest difference of the two implementations
TREE = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (1, 0, 0))
WINDOW = (4, 12)


def cases() -> Iterator[Case]:
    """Yield the cases."""
    chain = tuple((0,) * depth for depth in (1, 2, 3))
    static: dict[str, Any] = {"tree": "static", "nodes": 10, "branch": 3, "choices": TREE}
    for method in ("eagle1", "eagle2", "eagle3", "seagle", "mtp", "dflash", "dspark", "peagle", "medusa"):
        steps = method in ("eagle2", "eagle3", "seagle", "mtp")
        tree: dict[str, Any] = {"tree": "dynamic", "nodes": 10, "branch": 3, "depth": 4 if steps else 3}
        more: dict[str, Any] = {"window": WINDOW} if method == "seagle" else {}
        if method in ("eagle1", "medusa"):
            tree = static
        if method != "eagle2":
            deep = {"nodes": 5, "depth": 4} if method == "dflash" else {}  # its engines draft whole blocks
            yield Case(f"{method}-chain-greedy", method, "greedy", "chain", **more, **deep)
        if method == "mtp":  # engines that run each module once
            yield Case("mtp-one-greedy", method, "greedy", "chain", nodes=2, depth=1)
        yield Case(f"{method}-tree-greedy", method, "greedy", **tree, **more)
        if method == "eagle1":
            yield Case("eagle1-chain-rejection", method, "rejection", "static", choices=chain, seed=7)
            yield Case("eagle1-tree-rejection", method, "rejection", **tree, seed=7)
        else:
            yield Case(f"{method}-tree-draw", method, "draw", **tree, **more, seed=7)


def trees(cycles: Sequence[Cycle]) -> list[Any]:
    """Return all decisions of a text."""
    return [(cycle.tokens, cycle.parents, cycle.path, cycle.bonus) for cycle in cycles]


def changed(target: Target, seed: int) -> Target:
    """Return the target with weights that are changed a little."""
    other, random = Target(DATA / "target"), np.random.default_rng(seed)
    for name, weight in target.tensors.items():
        other.tensors[name] = (weight * (1 + CHANGE * random.standard_normal(weight.shape))).astype(np.float32)
    return other


def lead(target: Target, text: Sequence[int], begin: int) -> float:
    """Return the smallest lead of the target's best token over the second, from this place on."""
    T = len(text)
    states = target(text, np.arange(T), np.tril(np.ones((T, T), bool)), target.new_caches())
    ordered = np.sort(target.head(states[-2]), -1)[begin - 1 : -1]
    return float((ordered[:, -1] - ordered[:, -2]).min())


def is_sound(prompt: Sequence[int], target: Target, others: Sequence[Target]) -> bool:
    """Return whether no decision after a prompt is near a tie."""
    for number, case in enumerate(cases()):
        ids, cycles = Decoder(DATA, case, target).generate(prompt)
        if not number and lead(target, [*prompt, *ids], len(prompt)) < LEAD:
            return False
        if any(trees(Decoder(DATA, case, other).generate(prompt)[1]) != trees(cycles) for other in others):
            return False
    return True


def find_prompts(target: Target) -> Iterator[list[int]]:
    """Yield sound prompts, from places all over the licence."""
    licence = re.sub(r"\s+", " ", (DATA.parents[2] / "LICENSE").read_text())
    others = [changed(target, seed) for seed in (1, 2)]
    for place in range(400, len(licence) - 200, 397):
        begin = licence.index(" ", place) + 1
        prompt = list(licence[begin : begin + PROMPT].encode())
        if is_sound(prompt, target, others):
            print(repr(bytes(prompt)), flush=True)
            yield prompt


def record(
    case: Case, number: int, prompt: list[int], target: Target, eyas: Eyas
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Decode a case by both; return what JSON keeps, and arrays."""
    ids, cycles = Decoder(DATA, case, target).generate(prompt)
    seen: list[Any] = []
    watch = lambda cycle_input, draft, scores, verdict: seen.append((draft, scores, verdict))  # noqa: E731
    theirs, accepted = eyas.run(case, prompt, case.new_tokens, watch=watch)
    assert (theirs, accepted) == (ids, [len(cycle.path) - 1 for cycle in cycles]), case.name
    kept, arrays = list[dict[str, Any]](), dict[str, np.ndarray]()
    for c, (cycle, (draft, scores, verdict)) in enumerate(zip(cycles, seen, strict=True)):
        log_q = np.array([node.log_q for node in cycle.nodes])
        assert draft.tokens_BN[0].tolist() == cycle.tokens, case.name
        assert draft.tree.parents_BN[0].tolist() == cycle.parents, case.name
        assert verdict.path_BP[0, : len(cycle.path)].tolist() == cycle.path, case.name
        assert np.abs(draft.log_q_BN[0].numpy() - log_q).max() < AGREE, case.name
        assert np.abs(scores[0].numpy() - cycle.logits_NV).max() < AGREE, case.name
        one = {name: getattr(cycle, name) for name in ("length", "tokens", "parents", "path", "bonus")}
        kept.append({**one, "log_q": [round(float(x), 5) for x in log_q]})
        if number == 0 and c < CYCLES:
            expanded = [n for n, node in enumerate(cycle.nodes) if node.logits is not None]
            name = f"{case.name}.{c}."
            arrays[f"{name}target_logits"] = cycle.logits_NV
            arrays[f"{name}expanded"] = np.array(expanded)
            arrays[f"{name}draft_logits"] = np.stack([cycle.nodes[n].logits for n in expanded])  # type: ignore[misc]
            if cycle.nodes[0].hidden is not None:
                arrays[f"{name}draft_hidden"] = np.stack([cycle.nodes[n].hidden for n in expanded])  # type: ignore[misc]
    return {"ids": ids, "cycles": kept}, arrays


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    target, eyas = Target(DATA / "target"), Eyas(DATA)
    prompts = [prompt for prompt, _ in zip(find_prompts(target), range(PROMPTS), strict=False)]
    assert len(prompts) == PROMPTS, "too few prompts are far from ties: train other weights"
    arrays, answers = dict[str, np.ndarray](), dict[str, Any]()
    for case in cases():
        made = [record(case, number, prompt, target, eyas) for number, prompt in enumerate(prompts)]
        answers[case.name] = {"case": asdict(case), "answers": [kept for kept, _ in made]}
        arrays |= made[0][1]
        lengths = [len(cycle["path"]) - 1 for kept, _ in made for cycle in kept["cycles"]]
        print(f"{case.name:24} {sum(lengths) / len(lengths):.2f} accepted of a cycle", flush=True)
    greedy = answers["eagle3-chain-greedy"]["answers"]
    for number, prompt in enumerate(prompts):
        text = [*prompt, *greedy[number]["ids"]]
        arrays[f"text.{number}.logits"] = eyas.target_logits(text)
    noise = Noise(7)
    positions = range(PROMPT, PROMPT + 40)
    arrays["noise.7.target"] = np.stack([noise.gumbel(TARGET, n, target.config["vocab_size"]) for n in positions])
    save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, DATA / "vectors.safetensors")
    whole = {"prompts": prompts, "first_noise": PROMPT, "cases": answers}
    (DATA / "vectors.json").write_text(json.dumps(whole, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()

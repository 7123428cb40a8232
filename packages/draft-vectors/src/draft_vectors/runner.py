"""Runs an engine over the vectors, compares, and names the probable fault.

    python -m draft_vectors my_module:MyEngine                       all cases that the engine runs
    python -m draft_vectors my_module:MyEngine --only eagle3-chain   those whose names begin so
    python -m draft_vectors my_module:MyEngine --dtype bfloat16      with the wider tolerances of bfloat16

A case that fails is decoded again by the reference with each planted fault (`faults.py`): the faults that leave the engine's
numbers are named.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from draft_vectors.arrays import Floats
from draft_vectors.decode import Case, Decoder, head_folder
from draft_vectors.faults import FAULTS
from draft_vectors.heads import Target, parents_of

__all__ = [
    "DATA", "Answer", "Drafted", "Engine", "Observed", "Reference", "Result", "Vectors", "check", "differences",
    "fitting_faults", "head_folder", "main", "observe",
]  # fmt: skip

DATA = Path(__file__).parent / "data"
DRAFTS = 3  # cycles of the first prompt whose trees are asked for


@dataclass(frozen=True)
class Tolerance:
    """How far an engine's numbers may be from the vectors. The README argues the values."""

    logits: float  # of logits and log-probabilities
    accepted: int  # by how many accepted tokens a text may differ; 0: each cycle accepts as many
    trees: bool  # whether trees have the same tokens and parents, not only the same best child of the root


TOLERANCES = {"float32": Tolerance(5e-4, 0, True), "bfloat16": Tolerance(0.5, 6, False)}


@dataclass
class Answer:
    """The text that an engine generated."""

    ids: list[int]
    accepted: list[int] | None = None  # drafted tokens that each cycle accepted; None: the engine does not tell


@dataclass
class Drafted:
    """A tree that an engine drafted."""

    tokens: list[int]  # of the nodes, the root first
    parents: list[int]  # -1 for the root
    log_q: Sequence[float] | Floats | None = None  # log of each node's probability after its parent


class Engine:
    """The class that an author writes: `generate`, and as much of the rest as the engine shows."""

    name = "an engine"

    def __init__(self, data: Path, dtype: str = "float32") -> None:
        self.data, self.dtype = data, dtype

    def generate(self, case: Case, prompt: Sequence[int]) -> Answer | None:
        """Return `case.new_tokens` new tokens, which no end-of-text token cuts; None: the engine does not run this case."""
        raise NotImplementedError

    def draft(self, case: Case, text: Sequence[int]) -> Drafted | None:
        """Return the tree that is drafted after a text, whose last token is the root. All of the text is read anew. None: the
        engine does not show trees."""
        return None

    def target_logits(self, text: Sequence[int]) -> Floats | None:
        """Return the target's logits [T, V] after each token of a text, without drafts. None: the engine does not show them."""
        return None


class Reference(Engine):
    """The reference of this package, with a fault or without."""

    name = "reference"

    def __init__(self, data: Path, dtype: str = "float32", fault: str | None = None) -> None:
        super().__init__(data, dtype)
        self.target, self.fault = Target(data / "target"), fault

    def decoder(self, case: Case) -> Decoder | None:
        """Return a new decoder; None if its head cannot have the fault."""
        decoder = Decoder(self.data, case, self.target)
        return decoder if self.fault is None or FAULTS[self.fault].plant(decoder) else None

    def generate(self, case: Case, prompt: Sequence[int]) -> Answer | None:
        if (decoder := self.decoder(case)) is None:
            return None
        ids, cycles = decoder.generate(prompt)
        return Answer(ids, [len(cycle.path) - 1 for cycle in cycles])

    def draft(self, case: Case, text: Sequence[int]) -> Drafted | None:
        if (decoder := self.decoder(case)) is None:
            return None
        nodes = decoder.draft(text)
        return Drafted([node.token for node in nodes], parents_of(nodes), [node.log_q for node in nodes])


@dataclass
class Observed:
    """The numbers of an engine in one case."""

    answers: list[Answer | None]
    drafts: dict[int, Drafted] = field(default_factory=dict)  # by the number of the cycle, of the first prompt


class Vectors:
    """The recorded numbers."""

    def __init__(self, data: Path = DATA) -> None:
        self.data, self.arrays = data, load_file(data / "vectors.safetensors")
        record: dict[str, Any] = json.loads((data / "vectors.json").read_text(encoding="utf-8"))
        self.prompts: list[list[int]] = record["prompts"]
        self.answers = {name: entry["answers"] for name, entry in record["cases"].items()}
        self.cases = {name: case_of(entry["case"]) for name, entry in record["cases"].items()}

    def text(self, case: Case, cycle: int) -> list[int]:
        """Return the first prompt's text before a cycle, its root included."""
        answer = self.answers[case.name][0]
        return [*self.prompts[0], *answer["ids"]][: answer["cycles"][cycle]["length"] + 1]

    def drafts(self, case: Case) -> list[int]:
        """Return the cycles whose trees are asked for: a cache with a window that has moved cannot be read anew."""
        cycles = range(min(DRAFTS, len(self.answers[case.name][0]["cycles"]) - 1))
        return [c for c in cycles if case.window is None or len(self.text(case, c)) <= sum(case.window)]

    def right(self, case: Case) -> Observed:
        """Return the numbers of a right engine."""
        answers = self.answers[case.name]
        shown = [Answer(a["ids"], [len(cycle["path"]) - 1 for cycle in a["cycles"]]) for a in answers]
        cycles = answers[0]["cycles"]
        trees = {c: Drafted(cycles[c]["tokens"], cycles[c]["parents"], cycles[c]["log_q"]) for c in self.drafts(case)}
        return Observed([*shown], trees)


def case_of(entry: dict[str, Any]) -> Case:
    """Return a case from its entry in vectors.json."""
    window = tuple(entry["window"]) if entry["window"] else None
    return Case(**{**entry, "choices": tuple(map(tuple, entry["choices"])), "window": window})


def observe(engine: Engine, case: Case, vectors: Vectors) -> Observed | None:
    """Return an engine's numbers in a case; None if it does not run it."""
    answers = [engine.generate(case, prompt) for prompt in vectors.prompts]
    if all(answer is None for answer in answers):
        return None
    shown = {c: engine.draft(case, vectors.text(case, c)) for c in vectors.drafts(case)}
    return Observed(answers, {c: tree for c, tree in shown.items() if tree is not None})


def differences(seen: Observed, right: Observed, tolerance: Tolerance) -> list[str]:
    """Return how the numbers of an engine differ, as far as it shows them."""
    found = list[str]()
    for c, tree in seen.drafts.items():
        found += [f"tree {c} of prompt 0: {line}" for line in _tree_differences(tree, right.drafts[c], tolerance)]
    for number, (answer, expected) in enumerate(zip(seen.answers, right.answers, strict=True)):
        found += [f"prompt {number}: {line}" for line in _answer_differences(answer, expected, tolerance)]
    return found


def _answer_differences(answer: Answer | None, right: Answer | None, tolerance: Tolerance) -> list[str]:
    if answer is None or right is None:
        return []
    found = list[str]()
    if answer.ids != right.ids:
        pairs = enumerate(zip(answer.ids, right.ids, strict=False))
        at = next((i for i, (one, other) in pairs if one != other), len(answer.ids))
        found.append(f"new token {at} and those after it are {answer.ids[at : at + 4]}, not {right.ids[at : at + 4]}")
    if answer.accepted is not None and right.accepted is not None:
        # the last cycle may be cut by the limit of new tokens, and engines count it differently
        accepted, expected = answer.accepted[: len(right.accepted) - 1], right.accepted[:-1]
        apart = abs(sum(accepted) - sum(expected))
        if apart > tolerance.accepted or (not tolerance.accepted and accepted != expected):
            found.append(f"the cycles accept {accepted}, not {expected}")
    return found


def _tree_differences(tree: Drafted, right: Drafted, tolerance: Tolerance) -> list[str]:
    if tree.tokens[0] != right.tokens[0]:
        return [f"the root is {tree.tokens[0]}, not {right.tokens[0]}"]
    if tolerance.trees and (tree.tokens, tree.parents) != (right.tokens, right.parents):
        return [f"tokens {tree.tokens} below {tree.parents}, not {right.tokens} below {right.parents}"]
    if tree.log_q is None or right.log_q is None:
        return []
    places = range(1, len(right.tokens)) if tolerance.trees else [1] * (tree.tokens[1:2] == right.tokens[1:2])
    apart = max((abs(float(tree.log_q[n]) - float(right.log_q[n])) for n in places), default=0.0)
    return [f"log q is {apart:.3g} apart"] if apart > tolerance.logits else []


def fitting_faults(seen: Observed, case: Case, vectors: Vectors, tolerance: Tolerance) -> list[str]:
    """Return the planted faults that leave these numbers."""
    return [name for name in FAULTS if _fits(Reference(vectors.data, fault=name), seen, case, vectors, tolerance)]


def _fits(engine: Reference, seen: Observed, case: Case, vectors: Vectors, tolerance: Tolerance) -> bool:
    """Return whether an engine has the numbers that were seen. Stop at the first that it does not have."""
    for c, tree in seen.drafts.items():
        other = engine.draft(case, vectors.text(case, c))
        if other is None or _tree_differences(tree, other, tolerance):
            return False
    for prompt, answer in zip(vectors.prompts, seen.answers, strict=True):
        theirs = engine.generate(case, prompt)
        if theirs is None or _answer_differences(answer, theirs, tolerance):
            return False
    return True


@dataclass
class Result:
    """The outcome of one case."""

    case: str
    differences: list[str]
    faults: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Return lines to print."""
        if not self.differences:
            return [f"ok    {self.case}"]
        says = [f"      fits: {name}: {FAULTS[name].says}" for name in self.faults]
        none = ["      no planted fault leaves these numbers"]
        return [f"FAIL  {self.case}", *(f"      {line}" for line in self.differences[:4]), *(says or none)]


def check(engine: Engine, vectors: Vectors, only: str = "", show: Callable[[str], Any] = print) -> list[Result]:
    """Run all cases whose names begin with `only`, show the results, and return them."""
    tolerance, results = TOLERANCES[engine.dtype], list[Result]()

    def add(result: Result) -> None:
        results.append(result)
        show("\n".join(result.lines()))

    for number, prompt in enumerate(vectors.prompts):
        text = [*prompt, *vectors.answers["eagle3-chain-greedy"][number]["ids"]]
        logits = engine.target_logits(text)
        if logits is not None:
            apart = float(np.abs(logits - vectors.arrays[f"text.{number}.logits"]).max())
            bad = [f"the target's logits are {apart:.3g} apart: mend this first"] if apart > tolerance.logits else []
            add(Result(f"target, text {number}", bad))
    for name, case in vectors.cases.items():
        if name.startswith(only) and (seen := observe(engine, case, vectors)) is not None:
            found = differences(seen, vectors.right(case), tolerance)
            add(Result(name, found, fitting_faults(seen, case, vectors, tolerance) if found else []))
    failed = sum(bool(result.differences) for result in results)
    show(f"{engine.name}, {engine.dtype}: {len(results) - failed} of {len(results)} as the vectors")
    return results


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", help="the class of an engine, as module:Class")
    parser.add_argument("--only", default="", help="run cases whose names begin with this")
    parser.add_argument(
        "--dtype", choices=sorted(TOLERANCES), default="float32", help="the engine's arithmetic (default: float32)"
    )
    options = parser.parse_args()
    module, _, name = options.engine.partition(":")
    engine: Engine = getattr(importlib.import_module(module), name)(DATA, options.dtype)
    return int(any(result.differences for result in check(engine, Vectors(), options.only)))

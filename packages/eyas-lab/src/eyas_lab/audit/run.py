"""An audit from the first request to the verdict.

    greedy      plain, deployment, deployment, plain, each prompt alone; then the deployment with several at a time
    pilot       some plain answers, from which the power of what follows is computed and shown, before it runs
    sampled     answers of the deployment for each sampling, several at a time; the tests
    sequences   many short answers to one prompt with a small top-k, against the exact law of whole answers

A part that is done is kept in a file of the folder, which is written whole or not at all; the same audit goes on
from there. This module knows no command line and prints nothing.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eyas.core.params import Sampling
from eyas.errors import OptionError
from eyas.files import parse_json, write_text
from eyas_lab.audit.arms import ARMS, Recorded, power, sequence_power
from eyas_lab.audit.deployments import Answer, Ask, Deployment, answer_all
from eyas_lab.audit.referee import Referee
from eyas_lab.audit.statistics import Evidence, Finding, holm, run_tests, sequence_test
from eyas_lab.metrics import first_difference

__all__ = ["Plan", "Records", "audit"]

Fields = dict[str, Any]

OnProgress = Callable[[int, int, str], None]  # (done, total, what)
ENOUGH = 0.9  # power with which each bias must be found, or there is not enough data
SEQUENCE = Sampling(temperature=1.0, top_k=3)
SEQUENCE_LENGTH = 4
SEQUENCE_PROMPTS = 4  # prompts of which one is chosen
PILOT_TOKENS = 1000
TESTS = 14  # for one sampling, at most, so that the threshold is known beforehand


@dataclass(frozen=True)
class Plan:
    """Settings of an audit.

    Attributes:
        prompts: token ids.
        samplings: settings that are audited; their seeds are replaced.
        tokens: sampled tokens for each of them; 0: greedy decoding only.
        max_new_tokens: of an answer.
        error: probability that a lossless deployment fails (family-wise).
        seed: of the requests' seeds and of the audit's own random numbers.
    """

    prompts: tuple[tuple[int, ...], ...]
    samplings: tuple[Sampling, ...] = (Sampling(1.0), Sampling(0.7, top_p=0.9), Sampling(1.0, top_k=20))
    tokens: int = 20_000
    max_new_tokens: int = 64
    error: float = 0.001
    seed: int = 0

    @property
    def short_answers(self) -> int:
        """How many short answers are asked for."""
        return max(100, self.tokens // 8)

    @property
    def threshold(self) -> float:
        """The p-value below which a test fails regardless of the others."""
        return self.error / (TESTS * len(self.samplings) + 1)


class Records:
    """Parts of an audit that are done, in files of a folder; without a folder, nowhere.

    Raises:
        OptionError: the folder holds an audit with other settings.
    """

    def __init__(self, folder: Path | None, settings: Mapping[str, Any]) -> None:
        self.folder = folder
        if folder is None:
            return
        now, file = json.loads(json.dumps(settings)), folder / "settings.json"
        there = parse_json(file.read_bytes()) if file.exists() else None
        if there is not None and there != now:
            other = sorted(name for name in {*there, *now} if there.get(name) != now.get(name))
            raise OptionError(f"{folder} holds an audit with other settings ({', '.join(other)}): use another --output")
        write_text(file, json.dumps(now) + "\n")

    def answers(self, part: str, make: Callable[[], list[Answer]]) -> list[Answer]:
        """Return the answers of a part, kept or made now."""
        if self.folder is None:
            return make()
        file = self.folder / f"{part}.json"
        if file.exists():
            return [Answer.from_json(record) for record in parse_json(file.read_bytes())]
        made = make()
        write_text(file, json.dumps([asdict(answer) for answer in made]) + "\n")
        return made


@dataclass
class _Run:
    deployment: Deployment
    plain: Deployment
    referee: Referee
    plan: Plan
    records: Records
    on_progress: OnProgress

    # --- greedy ---

    def greedy(self) -> Fields:
        plan, texts = self.plan, dict[str, list[Answer]]()
        asks = [Ask(prompt, plan.max_new_tokens, Sampling()) for prompt in plan.prompts]
        order = {"plain 1": self.plain, "alone 1": self.deployment, "alone 2": self.deployment, "plain 2": self.plain}
        order["together"] = self.deployment
        for done, (name, asked) in enumerate(order.items()):
            self.on_progress(done, len(order), f"greedy, {name}")
            part = f"greedy-{name.replace(' ', '-')}"
            texts[name] = self.records.answers(part, partial(answer_all, asked, asks, name == "together"))
        departures = list(self._departures("alone", texts["alone 1"])) + list(
            self._departures("together", texts["together"])
        )
        is_error = [not found["margin"] <= found["tolerance"] for found in departures]
        return {
            "prompts": len(asks),
            "tokens": sum(len(answer.ids) for mode in ("alone 1", "together") for answer in texts[mode]),
            "plain_equals_itself": _equal(texts["plain 1"], texts["plain 2"]),
            "equals_itself": _equal(texts["alone 1"], texts["alone 2"]),
            "equals_plain": _equal(texts["plain 1"], texts["alone 1"]),
            "together_equals_alone": _equal(texts["alone 1"], texts["together"]),
            "together_at_once": hasattr(self.deployment, "generate_together"),
            "first_differences": _first_differences(texts["plain 1"], texts["alone 1"]),
            "tokens_per_cycle": _tokens_per_cycle(texts["alone 1"]),
            "flips": [found for found, error in zip(departures, is_error, strict=True) if not error],
            "errors": [found for found, error in zip(departures, is_error, strict=True) if error],
            "logprobs": self._logprobs(texts["alone 1"]),
        }

    def _departures(self, mode: str, answers: Sequence[Answer]) -> Iterator[Fields]:
        """Yield the tokens of greedy answers that are not the most probable ones, given the text before them."""
        for number, answer in enumerate(answers):
            if not answer.ids:
                continue
            judged = self.referee.judge_greedy(self.plan.prompts[number], answer)
            for n in np.flatnonzero(judged.margin > 0):
                place = {"mode": mode, "prompt": number, "place": int(n), "token": answer.ids[n]}
                margin = {"margin": float(judged.margin[n]), "tolerance": float(judged.tolerance[n])}
                yield {**place, "best": int(judged.best[n]), **margin}

    def _logprobs(self, answers: Sequence[Answer]) -> Fields | None:
        """Compare log-probabilities with the referee's, over greedy tokens."""
        differences, allowed = [], []
        for prompt, answer in zip(self.plan.prompts, answers, strict=True):
            if answer.logprobs and answer.ids:
                judged = self.referee.judge_greedy(prompt, answer)
                count = min(len(answer.logprobs), len(answer.ids))
                differences += np.abs(np.array(answer.logprobs[:count]) - judged.logprob[:count]).tolist()
                allowed += judged.tolerance[:count].tolist()
        if not differences:
            return None
        over = [d for d, limit in zip(differences, allowed, strict=True) if not d <= limit]
        return {"tokens": len(differences), "largest": max(differences), "tolerance": max(allowed), "wrong": len(over)}

    # --- sampled ---

    def pilot(self) -> list[Fields]:
        """Return the power of the sampled part for each sampling, from plain answers."""
        found = []
        for i, sampling in enumerate(self.plan.samplings):
            self.on_progress(i, len(self.plan.samplings), "pilot")
            tokens = min(PILOT_TOKENS, self.plan.tokens)
            answers = self._collect(f"pilot-{i}", self.plain, sampling, tokens, 10**7 * (i + 1) + 5 * 10**6)
            p_NV = torch.cat([self._p(self.plan.prompts[prompt], answer, sampling) for prompt, answer in answers])
            lengths = [len(answer.ids) for _, answer in answers]
            places = np.concatenate([np.arange(length) for length in lengths])
            recorded = Recorded(p_NV, np.repeat(np.arange(len(lengths)), lengths), places)
            chances = {arm: power(recorded, arm, self.plan.tokens, self.plan.threshold) for arm in ARMS}
            found.append({"sampling": describe(sampling), **chances})
        self.on_progress(len(self.plan.samplings), len(self.plan.samplings), "pilot")
        _, law = self.law
        chances = {arm: sequence_power(law, arm, self.plan.short_answers, self.plan.threshold) for arm in ARMS}
        return [*found, {"sampling": "short answers", **chances}]

    def _p(self, prompt: Sequence[int], answer: Answer, sampling: Sampling) -> torch.Tensor:
        return self.referee.probabilities(self.referee.logits(prompt, answer.ids)[:-1], sampling)[0]

    @cached_property
    def law(self) -> tuple[int, dict[tuple[int, ...], float]]:
        """The prompt whose short answers differ most, by its number, and their probabilities."""
        laws = [self.referee.law(prompt, SEQUENCE, SEQUENCE_LENGTH) for prompt in self.plan.prompts[:SEQUENCE_PROMPTS]]
        entropies = [-sum(p * math.log(p) for p in law.values() if p > 0) for law in laws]
        chosen = int(np.argmax(entropies))
        return chosen, laws[chosen]

    def sample(self) -> list[Fields]:
        """Return the tests of each sampling."""
        plan, found = self.plan, []
        for i, sampling in enumerate(plan.samplings):
            answers = self._collect(f"sampled-{i}", self.deployment, sampling, plan.tokens, 10**7 * (i + 1))
            evidence, outside, edge = [], [], 0
            for number, (prompt, answer) in enumerate(answers):
                self.on_progress(number, len(answers), "the referee reads")
                judged = self.referee.judge_sampled(
                    plan.prompts[prompt], answer, sampling, 10**6 * (i + 1) + number, prompt
                )
                evidence.append(judged.evidence)
                outside += [{"answer": number, "place": place, "token": answer.ids[place]} for place in judged.outside]
                edge += judged.at_the_edge
            whole = Evidence.join(evidence)
            found.append(
                {
                    "sampling": describe(sampling),
                    "answers": len(answers),
                    "tokens": len(whole) + len(outside) + edge,
                    "tokens_per_cycle": _tokens_per_cycle([answer for _, answer in answers]),
                    "outside": outside,
                    "at_the_edge": edge,
                    "tests": run_tests(whole),
                }
            )
        return found

    def sequences(self) -> Finding | None:
        """Return the test of whole short answers to one prompt."""
        number, law = self.law
        count, size, seen = self.plan.short_answers, 200, Counter[tuple[int, ...]]()
        for first in range(0, count, size):
            self.on_progress(first, count, "short answers")
            seeds = range(self.plan.seed + first, self.plan.seed + min(first + size, count))
            asks = [
                Ask(self.plan.prompts[number], SEQUENCE_LENGTH, replace(SEQUENCE, seed=10**5 + seed)) for seed in seeds
            ]
            answers = self.records.answers(f"sequences-{first}", partial(answer_all, self.deployment, asks, True))
            seen.update(answer.ids for answer in answers if answer.ids)
        return sequence_test(dict(seen), law)

    def _collect(
        self, part: str, asked: Deployment, sampling: Sampling, tokens: int, first_seed: int
    ) -> list[tuple[int, Answer]]:
        """Return (number of the prompt, answer), until so many tokens are there; prompts by turns."""
        plan, found, have, size = self.plan, list[tuple[int, Answer]](), 0, 16
        for number in range(0, tokens, size):
            self.on_progress(have, tokens, f"{part.partition('-')[0]}, {describe(sampling)}")
            prompts = [(number + k) % len(plan.prompts) for k in range(size)]
            seeds = [plan.seed * 10**9 + first_seed + number + k for k in range(size)]
            asks = [
                Ask(plan.prompts[p], plan.max_new_tokens, replace(sampling, seed=seed))
                for p, seed in zip(prompts, seeds, strict=True)
            ]
            answers = self.records.answers(f"{part}-{number}", partial(answer_all, asked, asks, True))
            found += [(p, answer) for p, answer in zip(prompts, answers, strict=True) if answer.ids]
            have = sum(len(answer.ids) for _, answer in found)
            if have >= tokens:
                break
        return found


def audit(
    deployment: Deployment,
    plain: Deployment,
    referee: Referee,
    plan: Plan,
    *,
    folder: Path | None = None,
    settings: Mapping[str, Any] | None = None,
    on_progress: OnProgress = lambda done, total, what: None,
    on_power: Callable[[list[Fields]], None] = lambda table: None,
) -> Fields:
    """Return the report of an audit, as `audit.report` reads it; its "verdict" is "passed", "failed" or
    "not enough data".

    Args:
        plain: plain decoding of the same target, which greedy texts are compared with.
        folder: where parts that are done are kept.
        settings: settings that must be equal for an audit to go on, beyond the plan.
        on_power: called with the power of the sampled part before it runs, for each sampling.
    """
    kept = {**(settings or {}), "plan": {**asdict(plan), "samplings": [describe(s) for s in plan.samplings]}}
    run = _Run(deployment, plain, referee, plan, Records(folder, kept), on_progress)
    report: Fields = {"deployment": deployment.name, "plain": plain.name, "dtype": referee.dtype}
    report |= {"plan": {**asdict(plan), "prompts": len(plan.prompts)}, "greedy": run.greedy(), "sampled": []}
    if plan.tokens and plan.samplings:
        report["power"] = run.pilot()
        on_power(report["power"])
        report["sampled"], report["sequences"] = run.sample(), run.sequences()
    report["greedy"]["draft_tokens"] = getattr(deployment, "draft_tokens", lambda: None)()
    return judge(report, plan.error)


def judge(report: Fields, error: float) -> Fields:
    """Return the report with its verdict and the reasons."""
    tests: list[tuple[str, Finding]] = [(one["sampling"], test) for one in report["sampled"] for test in one["tests"]]
    if (sequences := report.get("sequences")) is not None:
        tests.append((describe(SEQUENCE), sequences))
    rejected = holm([test.p_value for _, test in tests], error)
    greedy, reasons = report["greedy"], list[str]()
    if greedy["errors"]:
        reasons.append(f"{len(greedy['errors'])} greedy tokens are not the target's, and no near ties either")
    if greedy["logprobs"] and greedy["logprobs"]["wrong"]:
        reasons.append(f"{greedy['logprobs']['wrong']} log-probabilities are not the target's")
    for one in report["sampled"]:
        if one["outside"]:
            reasons.append(f"{one['sampling']}: {len(one['outside'])} tokens cannot be drawn with these settings")
    for (sampling, test), is_rejected in zip(tests, rejected, strict=True):
        if is_rejected:
            reasons.append(f"{sampling}: {test.meaning} ({test.name}, p = {test.p_value:.1e})")
    missing = missing_power(report)
    verdict = "failed" if reasons else "not enough data" if missing else "passed"
    report["tests"] = [
        {"sampling": sampling, **asdict(test), "rejected": no}
        for (sampling, test), no in zip(tests, rejected, strict=True)
    ]
    for one in report["sampled"]:
        del one["tests"]
    report.pop("sequences", None)
    return {"verdict": verdict, "reasons": reasons or missing, **report}


def missing_power(report: Mapping[str, Any]) -> list[str]:
    """Return the faults that a deployment could have unnoticed, for want of data."""
    if report["greedy"]["tokens"] == 0:
        return ["the deployment has answered with no tokens"]
    table = report.get("power")
    if not table:
        return []
    best = {arm: max(one[arm] for one in table) for arm in ARMS if arm != "plain"}
    weak = [f"{ARMS[arm]}: found with probability {chance:.2f}" for arm, chance in best.items() if chance < ENOUGH]
    short = [
        f"{one['sampling']}: {one['tokens']} of {report['plan']['tokens']} tokens"
        for one in report["sampled"]
        if one["tokens"] < 0.95 * report["plan"]["tokens"]
    ]
    return weak + short


def describe(sampling: Sampling) -> str:
    """Return a sampling in words."""
    parts = [f"T = {sampling.temperature:g}"]
    parts += [f"top-k {sampling.top_k}"] if sampling.top_k else []
    parts += [f"top-p {sampling.top_p:g}"] if sampling.top_p < 1 else []
    return ", ".join(parts)


def _first_differences(plain: Sequence[Answer], other: Sequence[Answer]) -> list[dict[str, int]]:
    places = (first_difference(a.ids, b.ids) for a, b in zip(plain, other, strict=True))
    return [{"prompt": i, "place": place} for i, place in enumerate(places) if place is not None]


def _equal(one: Sequence[Answer], other: Sequence[Answer]) -> int:
    return sum(a.ids == b.ids for a, b in zip(one, other, strict=True))


def _tokens_per_cycle(answers: Sequence[Answer]) -> float | None:
    known = [answer.cycles[1:] for answer in answers if answer.cycles]
    cycles = sum(map(len, known))
    return sum(map(sum, known)) / cycles if cycles else None

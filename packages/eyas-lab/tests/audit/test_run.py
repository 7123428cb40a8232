"""Audits from end to end on small models: eyas passes, biases in its own loop are found, and a run goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import eyas
import zoo
from eyas.core.params import Sampling
from eyas.errors import InputError, OptionError
from eyas_lab.audit import Answer, EyasDeployment, Plan, Referee, audit
from eyas_lab.audit.arms import ARMS, rule
from eyas_lab.audit.referee import tolerance
from eyas_lab.audit.report import markdown, sampled_rows, write_report
from eyas_lab.audit.run import describe, judge
from eyas_lab.audit.statistics import Finding

PROMPTS = ((1, 5, 3, 6, 9, 40), (1, 7, 90, 33), (1, 100, 41, 41, 8))
DRAFTS: dict[str, Any] = {"method": "self_speculative", "tree": "fixed", "skip": "2", "depth": 3}


@pytest.fixture(scope="module")
def plain() -> eyas.LLM:
    return eyas.load(zoo.FAMILIES["llama"](), method="vanilla", tokenizer=False, kernels="off")


@pytest.fixture(scope="module")
def drafting(plain: eyas.LLM) -> eyas.LLM:
    return eyas.load(plain.target.model, tokenizer=False, kernels="off", **DRAFTS)


@pytest.fixture
def referee(plain: eyas.LLM) -> Referee:
    return Referee(plain.target.model, plain.eos)


def greedy_plan(**options: Any) -> Plan:
    return Plan(PROMPTS, **{"tokens": 0, "max_new_tokens": 12, **options})


class Wrong:
    """Plain decoding whose answers are changed."""

    name = "wrong"

    def __init__(self, llm: eyas.LLM, change: Callable[[Answer], Answer]) -> None:
        self.right, self.change = EyasDeployment(llm), change

    def generate(self, prompt_ids: Any, **keywords: Any) -> Answer:
        return self.change(self.right.generate(prompt_ids, **keywords))


@pytest.mark.slow
def test_eyas_passes_greedily(plain: eyas.LLM, drafting: eyas.LLM, referee: Referee) -> None:
    """Guards the null arm of the greedy part: equal texts, also beside others, with log-probabilities and cycles."""
    report = audit(EyasDeployment(drafting, rows=3), EyasDeployment(plain), referee, greedy_plan())
    assert report["verdict"] == "passed", report["reasons"]
    greedy = report["greedy"]
    equal = ("plain_equals_itself", "equals_itself", "equals_plain", "together_equals_alone")
    assert [greedy[name] for name in equal] == [3, 3, 3, 3]
    assert (greedy["errors"], greedy["first_differences"]) == ([], [])
    assert greedy["tokens"] == 2 * greedy["logprobs"]["tokens"] == 72
    assert greedy["tokens_per_cycle"] > 1
    assert "Sampled decoding was not audited" in markdown(report)


@pytest.mark.slow
def test_wrong_answers(plain: eyas.LLM, referee: Referee) -> None:
    """Guards the comparison of log-probabilities, NaN among them, and against a pass for nothing."""
    for by in (0.01, float("nan")):
        shifted = lambda a, by=by: Answer(a.ids, a.cycles, tuple(x + by for x in a.logprobs or ()))  # noqa: E731
        report = audit(Wrong(plain, shifted), EyasDeployment(plain), referee, greedy_plan())
        assert (report["verdict"], report["reasons"]) == ("failed", ["36 log-probabilities are not the target's"]), by
    empty = audit(Wrong(plain, lambda a: Answer(())), EyasDeployment(plain), referee, greedy_plan())
    assert empty["verdict"] == "not enough data"


def test_an_error_and_a_flip_at_a_near_tie(plain: eyas.LLM, referee: Referee, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the judgement of a difference: another token is an error, but not where rounding explains its margin."""

    def second_best(answer: Answer) -> Answer:
        return Answer((*answer.ids[:4], (answer.ids[4] + 1) % zoo.VOCAB, *answer.ids[5:]))

    report = audit(Wrong(plain, second_best), EyasDeployment(plain), referee, greedy_plan())
    assert report["verdict"] == "failed"
    assert {error["place"] for error in report["greedy"]["errors"]} >= {4}
    assert [found["place"] for found in report["greedy"]["first_differences"]] == [4, 4, 4]
    assert report["greedy"]["together_at_once"] is False
    assert "### Errors" in markdown(report)
    monkeypatch.setattr("eyas_lab.audit.referee.tolerance", lambda dtype, layers, width, spread: 1e3 * spread)
    lenient = audit(Wrong(plain, second_best), EyasDeployment(plain), referee, greedy_plan())
    assert lenient["verdict"] == "passed"
    assert lenient["greedy"]["flips"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_has_the_size_that_is_argued(dtype: torch.dtype) -> None:
    """Guards the argument of the tolerance by a model that is really rounded: root mean squares, within a factor of 4
    (random weights as large as these double every error; the embedded model's are a sixth of the argued ones)."""
    ids = torch.randint(0, zoo.VOCAB, (1, 100), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        exact_NV = zoo.tiny("llama").double()(ids).logits[0]
        rounded_NV = zoo.tiny("llama").to(dtype)(ids).logits[0].double()
    error = float((exact_NV - rounded_NV).pow(2).mean().sqrt())
    name = str(dtype).removeprefix("torch.")
    argued = tolerance(name, zoo.LAYERS, zoo.HIDDEN, float(exact_NV.std(-1).mean())) / 8
    assert 0.25 < error / argued < 4


def test_evidence_of_a_token_by_hand(referee: Referee) -> None:
    """Guards u and its company against a slow computation, with top-k and top-p."""
    sampling, ids = Sampling(0.8, top_k=7, top_p=0.9), (5, 60, 61)
    p_NV, _ = referee.probabilities(referee.logits(PROMPTS[0], ids)[:-1], sampling)
    chosen = tuple(int(p_V.topk(2).indices[1]) if (p_V > 0).sum() > 1 else int(p_V.argmax()) for p_V in p_NV[:1])
    answer = Answer(chosen, cycles=(1,))
    e = referee.judge_sampled(PROMPTS[0], answer, sampling, 3, 0).evidence
    p_V, x = p_NV[0].numpy(), chosen[0]
    ranked = p_V[p_V > p_V[x]].sum()
    assert ranked <= e.rank[0] <= ranked + p_V[x]
    assert p_V[:x].sum() - 1e-12 <= e.id[0] <= p_V[: x + 1].sum() + 1e-12
    inside = p_V[p_V > 0]
    assert e.level[0] == pytest.approx(np.log(p_V[x]) - (inside * np.log(inside)).sum(), rel=1e-3)
    assert (e.cycle[0], e.place[0], np.isnan(e.repeat[0]).all()) == (0, 0, True)


def test_tokens_outside_the_support(referee: Referee) -> None:
    """Guards the errors that need no statistics: a token that top-k excludes, unless rounding could include it."""
    logits_V = referee.logits(PROMPTS[0], ())[0]
    order = logits_V.argsort(descending=True).tolist()
    sampling = Sampling(1.0, top_k=5)
    assert referee.judge_sampled(PROMPTS[0], Answer((order[4],)), sampling, 0, 0).outside == ()
    assert referee.judge_sampled(PROMPTS[0], Answer((order[9],)), sampling, 0, 0).outside == (0,)
    rough = Referee(referee.model, (), "int8")
    judged_ = rough.judge_sampled(PROMPTS[0], Answer((order[5],)), sampling, 0, 0)
    assert (judged_.outside, judged_.at_the_edge, len(judged_.evidence)) == ((), 1, 0)
    nucleus = Sampling(1.0, top_p=0.3)
    assert referee.judge_sampled(PROMPTS[0], Answer((order[-1],)), nucleus, 0, 0).outside == (0,)
    with pytest.raises(InputError, match="another model"):
        referee.logits(PROMPTS[0], (zoo.VOCAB,))


def test_the_law_of_short_answers(referee: Referee) -> None:
    """Guards the enumeration: it sums to 1, ends at end tokens, and equals products of probabilities."""
    sampling = Sampling(1.0, top_k=3)
    law = referee.law(PROMPTS[1], sampling, 3)
    assert sum(law.values()) == pytest.approx(1.0)
    assert len(law) == 27
    answer = max(law, key=lambda a: law[a])
    p_NV, _ = referee.probabilities(referee.logits(PROMPTS[1], answer)[:-1], sampling)
    assert law[answer] == pytest.approx(float(p_NV[range(3), list(answer)].prod()), rel=1e-4)
    ending = Referee(referee.model, {answer[0]}).law(PROMPTS[1], sampling, 3)
    assert (answer[0],) in ending
    assert sum(ending.values()) == pytest.approx(1.0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("arm", [arm for arm in ARMS if arm != "temperature"])
def test_each_arm_in_the_real_loop(
    plain: eyas.LLM, drafting: eyas.LLM, referee: Referee, arm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the audit as a whole: with a bias put into eyas' verification it fails, without one it passes. False
    alarm: 1e-3 for the plain arm, seeded. Power: above 0.95 for each of the others. The arm that is left out is that of
    temperature_10 with 5 %, which needs four times the tokens."""
    monkeypatch.setattr("eyas_lab.audit.run.power", lambda *arguments: 1.0)  # its simulation has tests of its own
    monkeypatch.setattr("eyas_lab.audit.run.PILOT_TOKENS", 100)  # which only that simulation reads
    monkeypatch.setattr(Plan, "short_answers", 100)  # the long ones find each of these biases
    tokens = 6000 if arm == "relaxed" else 3000  # its p-value is 4e-7 with half of them, the others' are far smaller
    plan = Plan(PROMPTS, (Sampling(0.5),), tokens=tokens, max_new_tokens=40)
    rows = 50  # a forward of this model costs the same for 50 rows as for one; seeds belong to answers, not to rows
    report = audit(EyasDeployment(drafting, arm, rows, rule(arm)), EyasDeployment(plain, rows=rows), referee, plan)
    assert report["verdict"] == ("passed" if arm == "plain" else "failed"), report["reasons"]
    assert sampled_rows(report)[0][0] == "T = 0.5"
    assert report["greedy"]["errors"] == []  # these biases change nothing in greedy decoding


class Interrupting:
    """A deployment that answers anything, at no cost, and is interrupted after so many answers."""

    name = "interrupting"

    def __init__(self, limit: int) -> None:
        self.left, self.answered = limit, 0

    def generate(self, prompt_ids: Any, *, max_new_tokens: int, seed: int, **sampling: Any) -> Answer:
        if not self.left:
            raise KeyboardInterrupt
        self.left, self.answered = self.left - 1, self.answered + 1
        return Answer(tuple(np.random.default_rng(seed).integers(zoo.VOCAB, size=max_new_tokens).tolist()))


@pytest.mark.slow
def test_an_interrupted_audit_goes_on(referee: Referee, tmp_path: Path) -> None:
    """Guards the records: nothing that is done is asked again, the report is the same, and other settings are refused."""
    plan = Plan(PROMPTS, (Sampling(1.0),), tokens=200, max_new_tokens=6, error=0.01)
    whole, uninterrupted = Interrupting(10**6), Interrupting(10**6)
    expected = audit(whole, uninterrupted, referee, plan)
    first = Interrupting(whole.answered - 20)
    with pytest.raises(KeyboardInterrupt):
        audit(first, Interrupting(10**6), referee, plan, folder=tmp_path)
    second = Interrupting(10**6)
    report = audit(second, Interrupting(0), referee, plan, folder=tmp_path)
    assert json.dumps(report) == json.dumps(expected)
    assert 0 < second.answered < first.answered
    assert audit(Interrupting(0), Interrupting(0), referee, plan, folder=tmp_path) == report
    assert report["verdict"] == "failed"
    write_report(tmp_path, report)
    page = (tmp_path / "report.md").read_text()
    assert "Errors that this audit would have found" in page
    assert "http" not in page
    with pytest.raises(OptionError, match=r"other settings \(plan\)"):
        audit(Interrupting(0), Interrupting(0), referee, greedy_plan(), folder=tmp_path)


def test_verdicts() -> None:
    """Guards the order of the verdicts: a failure counts whatever the power, and a pass needs power."""
    greedy = {"tokens": 5, "errors": [], "logprobs": None}
    sampled = {"sampling": "T = 1", "tokens": 100, "outside": []}

    def verdict(p_value: float, power: float) -> dict[str, Any]:
        tests = [Finding("level", p_value, 100, "too rare"), Finding("lag", 0.5, 100, "")]
        plan = {"tokens": 100}
        report = {"greedy": greedy, "sampled": [{**sampled, "tests": tests}], "plan": plan}
        return judge({**report, "power": [{"sampling": "T = 1", **dict.fromkeys(ARMS, power)}]}, 0.01)

    assert verdict(0.004, 1.0)["verdict"] == verdict(0.004, 0.1)["verdict"] == "failed"
    assert verdict(0.006, 1.0)["verdict"] == "passed"  # 0.01 / 2 by Holm
    missing = verdict(0.006, 0.85)
    assert missing["verdict"] == "not enough data"
    assert missing["reasons"][0] == "a temperature 5 % too high: found with probability 0.85"
    assert describe(Sampling(0.7, top_k=20, top_p=0.9)) == "T = 0.7, top-k 20, top-p 0.9"

"""A bench on a tiny model: asking, comparing, going on; simulated acceptance; probes; reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import zoo
from eyas import drafters
from eyas.bench import report
from eyas.bench.contestants import Contestant, Drafting, Question, Transformers
from eyas.bench.machine import snapshot
from eyas.bench.probe import Probe, probe
from eyas.bench.record import Answer
from eyas.bench.run import ANSWERS, Bench, locked
from eyas.bench.simulate import expected_tau, parse_rates, simulated
from eyas.bench.summary import summarise, write
from eyas.bench.tasks import Prompt
from eyas.decode import Decoder, Request
from eyas.drafters._base import options_from
from eyas.errors import InputError, OptionError
from eyas.llm import LLM
from eyas.sampling import Sampling
from eyas.target import Target

TREE = {"tree.nodes": 6, "tree.depth": 3, "tree.branch": 2}
PROMPTS = tuple(Prompt(f"own/{i}", f"task{i % 2}", (), prompt_ids=tuple(range(3 + i, 9 + 2 * i))) for i in range(4))


@pytest.fixture(scope="module")
def llm() -> LLM:
    target = Target(zoo.FAMILIES["llama"](), "toy")
    return LLM(target, drafters.find("vanilla")(target), None)


def eagle2(llm: LLM) -> Drafting:
    kind = drafters.find("eagle2")
    return Drafting("eagle2", kind.random(llm.target, options_from(kind.Options, TREE), seed=1))


def bench(llm: LLM, *others: Contestant, **given: object) -> Bench:
    everybody = [Drafting("vanilla", llm.drafter), Transformers(llm.target), *others]
    return Bench(llm, everybody, **{"prompts": PROMPTS, "max_new_tokens": 6, **given})


def test_all_answer_alike(llm: LLM, tmp_path: Path) -> None:
    """Guards the comparison itself: plain decoding, transformers and a method say the same; sampled, transformers draws its own numbers."""
    run = bench(llm, eagle2(llm), temperatures=(0.0, 0.8))
    answers = run.run(tmp_path)
    assert len(answers) == 2 * 4 * 3
    assert all(a.differs is None for a in answers)
    assert [a.comparable for a in answers if a.method == "transformers"] == [True] * 4 + [False] * 4
    assert all(len(a.token_ids) == 1 + a.decoded for a in answers)
    assert {a.task for a in answers} == {"task0", "task1"}


class Stops(Contestant):
    """Answers as plain decoding until its number is up."""

    name = "stops"

    def __init__(self, llm: LLM, after: int) -> None:
        self.inner, self.left = Drafting("stops", llm.drafter), after

    def answer(self, question: Question) -> Answer:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return self.inner.answer(question)


def test_an_interrupted_bench_goes_on(llm: LLM, tmp_path: Path) -> None:
    """Guards resumption: what is whole is kept to the byte, half a line is dropped, and the whole has every prompt once."""
    with pytest.raises(KeyboardInterrupt):
        bench(llm, Stops(llm, after=3)).run(tmp_path)  # one answer warms up, two prompts are done
    kept = (tmp_path / ANSWERS).read_text()
    assert kept.count("\n") == 2 * 3
    third = kept.splitlines()[3].replace("own/1", "own/2")  # a prompt of which one answer was written
    (tmp_path / ANSWERS).write_text(f'{kept}{third}\n{{"method": "van')
    answers = bench(llm, Stops(llm, after=99)).run(tmp_path)
    assert (tmp_path / ANSWERS).read_text().startswith(kept)
    assert [(a.method, a.prompt) for a in answers] == [(m, p.id) for p in PROMPTS for m in ("vanilla", "transformers", "stops")]


def test_another_bench_in_the_folder_is_refused(llm: LLM, tmp_path: Path) -> None:
    """Guards answers against being mixed: other settings, another run at the same time, another version."""
    bench(llm, prompts=PROMPTS[:1]).run(tmp_path)
    with pytest.raises(InputError, match="max_new_tokens differ"):
        bench(llm, prompts=PROMPTS[:1], max_new_tokens=7).run(tmp_path)
    with locked(tmp_path), pytest.raises(InputError, match="another bench"), locked(tmp_path):
        pass
    (tmp_path / ANSWERS).write_text('{"method": "vanilla"}\n')
    with pytest.raises(InputError, match="another version"):
        bench(llm, prompts=PROMPTS[:1]).run(tmp_path)


class Liar(Contestant):
    """Plain decoding but for one token."""

    name = "liar"

    def __init__(self, llm: LLM) -> None:
        self.inner = Drafting("liar", llm.drafter)

    def answer(self, question: Question) -> Answer:
        true = self.inner.answer(question)
        changed = (*true.token_ids[:2], (true.token_ids[2] + 1) % 32, *true.token_ids[3:])
        return Answer.from_json({**true.to_json(), "token_ids": changed})


def test_a_text_that_differs_is_found(llm: LLM, tmp_path: Path) -> None:
    """Guards the check of texts: the place, and the margin of the two best scores there."""
    run = bench(llm, Liar(llm))
    lies = [a for a in run.run(tmp_path) if a.method == "liar"]
    assert all(a.differs is not None and a.differs.at == 2 for a in lies)
    first = next(a for a in run.run(tmp_path) if a.method == "vanilla")
    ids = torch.tensor([[*PROMPTS[0].prompt_ids, *first.token_ids[:2]]])
    best, second = llm.target.model(ids).logits[0, -1].float().topk(2).values.tolist()
    assert lies[0].differs.margin == pytest.approx(best - second, rel=1e-3)


def test_simulated_acceptance(llm: LLM) -> None:
    """Guards the lot: with rates 1 every cycle emits a whole path, with 0 one token, between them what was asked. Seeded; the share of a
    500-cycle run lies within 5 standard errors: one false alarm in a million."""
    drafter = eagle2(llm).drafter

    def tau(rates: tuple[float, ...], new: int) -> float:
        decoder, steps = Decoder(llm.target, drafter, verify=simulated(rates)), []
        decoder.add(Request((1, 2, 3), new, Sampling()))
        while not decoder.finished:
            steps += decoder.step()
        cycles = [s for s in steps if not s.prefill]
        return sum(len(s.tokens) for s in cycles[:-1]) / (len(cycles) - 1)

    assert tau((0.0,), 5) == 1.0
    whole = tau((1.0,), 40)
    assert 2 <= whole <= 4
    assert expected_tau((0.5, 0.25), 2) == 1 + 0.5 + 0.125
    assert 1 < tau((0.7,), 60) < whole
    assert parse_rates("0.8,0.5") == (0.8, 0.5)
    for bad in ("x", "1.5", ""):
        with pytest.raises(OptionError):
            parse_rates(bad)


def test_probe_counts_nodes_whose_parent_was_accepted(llm: LLM) -> None:
    """Guards the looking: the root's children are always looked at, hits are what was accepted, alpha lies between 0 and 1."""
    found, contestant = Probe(), eagle2(llm)
    question = Question("a", "t", 0, Request((5, 6, 7, 8), 12, Sampling()))
    answer = contestant.answer(question, found.watch)
    roots = sum(n for (depth, _), (n, *_) in found.positions.items() if depth == 1)
    assert roots == 2 * len(answer.cycles)
    hits = sum(h for _, h, *_ in found.positions.values())
    assert hits == sum(c.accepted for c in answer.cycles) or answer.cycles[-1].emitted <= answer.cycles[-1].accepted
    assert all(0 <= a <= n for n, _, a, _ in found.positions.values())
    named = dict(probe(bench(llm, contestant), 2))
    assert list(named) == ["eagle2"]
    assert len(named["eagle2"]["n_alpha"]) == 5


def test_reports(llm: LLM, tmp_path: Path) -> None:
    """Guards what people read: every method in the table, a page that loads nothing, simulation is said, other formats refused."""
    run = bench(llm, eagle2(llm))
    summary = summarise(run, run.run(tmp_path), snapshot(), "eyas bench <x>", probe_prompts=1)
    write(tmp_path, summary)
    page = (tmp_path / "report.html").read_text()
    assert "<x>" not in page
    assert "&lt;x&gt;" in page
    assert page.count("<svg") == sum(1 for p in tmp_path.glob("*.svg"))
    assert not any(loads in page for loads in ("<script", "<link", "src=", "@import", "url(h"))
    text = (tmp_path / "report.md").read_text()
    assert all(name in text for name in ("vanilla", "transformers", "eagle2", "all tasks", "task1"))
    again = report.read_summary(tmp_path)
    assert "eagle2" in report.comparison(again, again, ("a", "b"))
    (tmp_path / "summary.json").write_text(json.dumps({**again, "format": 0}))
    with pytest.raises(InputError, match="format 0"):
        report.read_summary(tmp_path)
    told = summarise(run, run.run(tmp_path), snapshot(), "x", simulated="0.5")
    assert "SIMULATED" in told["title"]
    assert "simulated" in told["warnings"][0]

"""A bench on a tiny model: asking, comparing, going on; simulated acceptance; reports."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from chat_data import CHATML, tokenizer_with
from eyas import drafters
from eyas.api import LLM
from eyas.core.engine import Decoder, Request, Step
from eyas.core.options import build_options
from eyas.core.sampling import GumbelNoise, Sampling
from eyas.core.target import Target
from eyas.core.tree import Draft, Tree
from eyas.drafters import Drafter
from eyas.errors import InputError, OptionError
from eyas.hardware.machine import Used, cores, snapshot
from eyas_lab.bench import contestants, cost, report
from eyas_lab.bench.contestants import Contestant, Drafting, Question, Transformers
from eyas_lab.bench.record import Answer
from eyas_lab.bench.run import ANSWERS, SETTINGS, Bench
from eyas_lab.bench.simulate import parse_rates, simulated
from eyas_lab.bench.summary import slow_baseline, summarise, write
from eyas_lab.bench.tasks import Prompt

pytestmark = pytest.mark.slow

TREE = {"tree.nodes": 6, "tree.depth": 3, "tree.branch": 2}
PROMPTS = tuple(Prompt(f"own/{i}", f"task{i % 2}", (), prompt_ids=tuple(range(3 + i, 9 + 2 * i))) for i in range(4))


@pytest.fixture(scope="module")
def llm() -> LLM:
    target = Target(zoo.FAMILIES["llama"](), "toy")
    return LLM(target, drafters.find("vanilla")(target), None)


@pytest.fixture(autouse=True)
def _known_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory's speed is measured once, in test_machine.py."""
    monkeypatch.setattr(cost, "bandwidth", lambda device: 1e10)


def eagle2(llm: LLM) -> Drafting:
    kind = drafters.find("eagle2")
    return Drafting("eagle2", kind.random(llm.target, build_options(kind.Options, TREE), seed=1))


def bench(llm: LLM, *others: Contestant, **given: object) -> Bench:
    everybody = [Drafting("vanilla", llm.drafter), Transformers(llm.target), *others]
    return Bench(llm, everybody, **{"prompts": PROMPTS, "max_new_tokens": 6, **given})


def test_all_answer_alike(llm: LLM, tmp_path: Path) -> None:
    """Guards the comparison itself: plain decoding, transformers and a method say the same;
    sampled, transformers draws its own numbers."""
    run = bench(llm, eagle2(llm), temperatures=(0.0, 0.8))
    answers = run.run(tmp_path)
    assert len(answers) == 2 * 4 * 3
    assert all(a.differs is None for a in answers)
    assert [a.comparable for a in answers if a.method == "transformers"] == [True] * 4 + [False] * 4
    assert all(len(a.token_ids) == 1 + a.emitted for a in answers)
    assert {a.task for a in answers} == {"task0", "task1"}


class Like(Contestant):
    """Answers as plain decoding, with a change, until its number is up; then comes the error."""

    def __init__(
        self, llm: LLM, name: str, after: int = 999, error: type[BaseException] = KeyboardInterrupt, change: Any = None
    ) -> None:
        self.name, self.inner = name, Drafting(name, llm.drafter)
        self.left, self.error, self.change = after, error, change

    def answer(self, question: Question) -> Answer:
        self.left -= 1
        if self.left < 0:
            raise self.error("no attribute 'weight'")
        true = self.inner.answer(question)
        return true if self.change is None else self.change(question, true)  # type: ignore[no-any-return]


def test_an_interrupted_bench_goes_on(llm: LLM, tmp_path: Path) -> None:
    """Guards resumption: what is whole is kept to the byte, half a line is dropped, and the whole
    has every prompt once."""
    with pytest.raises(KeyboardInterrupt):
        bench(llm, Like(llm, "stops", after=3)).run(tmp_path)  # one answer warms up, two prompts are done
    kept = (tmp_path / ANSWERS).read_text()
    assert kept.count("\n") == 2 * 3
    third = kept.splitlines()[3].replace("own/1", "own/2")  # a prompt of which one answer was written
    (tmp_path / ANSWERS).write_text(f'{kept}{third}\n{{"method": "van')
    answers = bench(llm, Like(llm, "stops")).run(tmp_path)
    assert (tmp_path / ANSWERS).read_text().startswith(kept)
    names = ("vanilla", "transformers", "stops")
    assert [(a.method, a.prompt) for a in answers] == [(name, p.id) for p in PROMPTS for name in names]


def test_another_bench_in_the_folder_is_refused(llm: LLM, tmp_path: Path) -> None:
    """Bug: a run goes on in the answers of other settings or options, of texts that changed behind the same
    ids, or of a head that was trained anew."""

    def method(seed: int = 1, **options: object) -> Drafting:
        kind = drafters.find("eagle2")
        return Drafting("eagle2", kind.random(llm.target, build_options(kind.Options, {**TREE, **options}), seed=seed))

    def run(contestant: Drafting, prompt: Prompt = PROMPTS[0], **given: Any) -> list[Answer]:
        return bench(llm, contestant, prompts=(prompt,), **given).run(tmp_path)

    run(method())
    other = Prompt(PROMPTS[0].id, PROMPTS[0].task, (), prompt_ids=(9, 9))
    asked: tuple[tuple[tuple[Any, ...], dict[str, int], str], ...] = (
        ((method(2),), {}, "methods"),
        ((method(**{"window.size": 9}),), {}, "methods"),
        ((method(), other), {}, "texts"),
        ((method(),), {"max_new_tokens": 7}, "max_new_tokens"),
    )
    for given, more, differ in asked:
        with pytest.raises(InputError, match=rf"holds another bench \({differ} differ\)"):
            run(*given, **more)
    assert len(run(method())) == 3


def test_files_of_another_version_and_damaged_ones_are_refused(llm: LLM, tmp_path: Path) -> None:
    """Bug: a traceback, or answers of another format that are silently dropped and asked again."""
    run = bench(llm, prompts=PROMPTS[:1])
    run.run(tmp_path)
    settings, answers = ((tmp_path / name).read_text() for name in (SETTINGS, ANSWERS))
    first, *rest = answers.splitlines(keepends=True)
    other = "was written by another version"
    for name, there, says in (
        (ANSWERS, first[: len(first) // 2] + "\n" + "".join(rest), "jsonl:1 is damaged"),
        (ANSWERS, '{"method": "vanilla"}\n', f"jsonl:1 {other}"),
        (ANSWERS, "[1]\n", f"jsonl:1 {other}"),
        (
            SETTINGS,
            settings.replace('"format": ', '"format": 9'),
            r"another version of eyas \(format 9\d, this one writes",
        ),
        (SETTINGS, "{", "settings.json is missing or damaged"),
        (SETTINGS, "[]", "missing or damaged"),
    ):
        (tmp_path / SETTINGS).write_text(settings)
        (tmp_path / ANSWERS).write_text(answers)
        (tmp_path / name).write_text(there)
        with pytest.raises(InputError, match=says):
            run.run(tmp_path)
        assert (tmp_path / name).read_text() == there
    run.forget(tmp_path)
    assert len(run.run(tmp_path)) == 2


def test_a_turn_that_no_longer_fits_is_not_asked(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a long first answer ends the bench at its second turn, and every time it is resumed; or
    such a prompt is never whole."""
    run, length = bench(llm, prompts=PROMPTS[:2], max_new_tokens=3), len(PROMPTS[0].prompt_ids)
    request = run._request

    def two_turns(self: Bench, prompt: Prompt, temperature: float) -> Iterator[Question]:
        for turn, extra in enumerate((0, 600 if prompt is PROMPTS[0] else 4)):
            ids = tuple(range(3, 3 + length)) + (5,) * extra
            yield Question(prompt.id, prompt.task, turn, request(prompt, list(ids), 3, temperature))

    monkeypatch.setattr(Bench, "questions", two_turns)
    answers = run.run(tmp_path)
    asked = [(a.prompt, a.turn, a.turns) for a in answers if a.method == "vanilla"]
    assert asked == [("own/0", 0, 1), ("own/1", 0, 2), ("own/1", 1, 2)]
    assert run.run(tmp_path) == answers, "nothing is asked again"


def test_marks_of_earlier_replies_stay() -> None:
    """Bug: the special tokens of a reply, around reasoning or calls, were left out of the next turn's prompt."""
    tokenizer, target = tokenizer_with(CHATML), Target(zoo.tiny("llama", vocab_size=400), "toy")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|call|>"]})
    asked = LLM(target, drafters.find("vanilla")(target), tokenizer)
    run = Bench(asked, [Drafting("vanilla", asked.drafter)], prompts=[Prompt("own/0", "task", ("One?", "Two?"))])
    questions = run.questions(run.prompts[0], 0.0)
    next(questions)
    reply = tokenizer("<|call|>f<|call|>")["input_ids"]
    prompt = list(questions.send(tuple(reply)).request.prompt)
    assert any(prompt[place : place + len(reply)] == reply for place in range(len(prompt)))


def test_what_others_used_survives_an_interruption(llm: LLM, tmp_path: Path) -> None:
    """Bug: a bench that ran on a busy machine loses its warning when it is resumed, because only
    the last run is looked at."""
    run = bench(llm, prompts=PROMPTS[:2])
    answers = run.run(tmp_path)
    assert all(a.around is not None and a.around.seconds > 0 for a in answers)
    known = [a.replace(around=Used(10.0, 10.0 * len(cores()) * (a.prompt == "own/0"))) for a in answers]
    (tmp_path / ANSWERS).write_text("".join(json.dumps(a.to_json()) + "\n" for a in known))
    (warning,) = summarise(run, run.run(tmp_path), snapshot(), "x")["warnings"]
    assert f"other processes used {len(cores()) / 2:.1f} of {len(cores())} cores" in warning


def test_a_disturbed_baseline_is_said() -> None:
    """Bug: plain decoding that something slowed makes drafts look twice as fast, and no line says so."""
    row = {"method": "eagle3", "task": "own/a", "tokens": 90, "tokens_per_second": 30.0}
    (warning,) = slow_baseline([{**row, "c": 0.8}, {**row, "c": 1.1}, {**row, "c": None}])
    assert "plain decoding was disturbed: eagle3 on own/a (0.80);" in warning
    assert slow_baseline([{**row, "c": 0.97}, {**row, "c": 0.8, "tokens": 20}]) == []


@pytest.mark.cover(after=1)
@pytest.mark.parametrize("after", [0, 3], ids=["at once", "in between"])
def test_a_contestant_that_fails_is_a_row_that_says_why(llm: LLM, tmp_path: Path, after: int) -> None:
    """Bug: one broken method takes the whole bench down. Resumed, it is not asked again, and the
    others' answers stay."""
    run = bench(llm, Like(llm, "breaks", after, AttributeError), eagle2(llm))
    answers = run.run(tmp_path)
    why = "AttributeError: no attribute 'weight'"
    assert run.failed == {"breaks": why}
    assert [a.prompt for a in answers if a.method == "eagle2"] == [p.id for p in PROMPTS]
    assert all(a.differs is None for a in answers)
    again = bench(llm, Like(llm, "breaks", 0, AttributeError), eagle2(llm))
    assert again.run(tmp_path) == answers
    assert again.failed == {"breaks": why}
    summary = summarise(again, answers, snapshot(), "eyas bench")
    assert summary["failed"] == {"breaks": why}
    write(tmp_path, summary)
    assert f"**breaks failed and is in no figure: {why}**" in (tmp_path / "report.md").read_text()
    assert ("breaks", *["–"] * 6, "failed") in [report.cells(row) for row in summary["rows"] if row["task"] == "all"]


def test_a_text_that_differs_is_found(llm: LLM, tmp_path: Path) -> None:
    """Guards the check of texts: the place, and the margin of the two best scores there."""

    def lie(question: Question, true: Answer) -> Answer:
        changed = (*true.token_ids[:2], (true.token_ids[2] + 1) % 32, *true.token_ids[3:])
        return true.replace(token_ids=changed if question.prompt != PROMPTS[3].id else true.token_ids[:2])

    answers = bench(llm, Like(llm, "liar", change=lie)).run(tmp_path)
    lies = [a.differs for a in answers if a.method == "liar"]
    assert all(one is not None and one.at == 2 for one in lies)
    assert lies[3] == (2, None), "an answer that ends too early is no near tie"
    first = next(a for a in answers if a.method == "vanilla")
    ids = torch.tensor([[*PROMPTS[0].prompt_ids, *first.token_ids[:2]]])
    best, second = llm.target.model(ids).logits[0, -1].float().topk(2).values.tolist()
    assert lies[0] is not None
    assert lies[0].margin == pytest.approx(best - second, rel=1e-3)


def test_all_depths_of_simulated_acceptance_are_drawn_in_one_call() -> None:
    """Guards what is timed on a GPU: the lots of all depths are those of one draw by depth after the other."""
    noise = GumbelNoise.from_sampling([Sampling(seed=3)] * 5)
    position_B, chance_D = torch.arange(5) * 7, torch.tensor([0.9, 0.5, 0.1, 0.6], dtype=torch.float64)
    each = [noise.accepts(chance_D[d], position_B, d) for d in range(4)]
    assert torch.equal(noise.accepts(chance_D, position_B, torch.arange(4)), torch.stack(each, 1))


def test_simulated_acceptance(llm: LLM) -> None:
    """Guards the lot: with rates 1 every cycle emits the deepest path, with 0 one token, between
    them what was asked. Of 300 cycles tau lies within 5 standard errors (at most 0.87 / sqrt(300)
    each): one false alarm in a million, were it not seeded."""
    kind = drafters.find("suffix")
    text = (5, 6, 7, 8, 9, 10, 11) * 3

    def cycles(drafter: Drafter, rates: tuple[float, ...], new: int) -> list[Step]:
        decoder, steps = Decoder(llm.target, drafter, verify=simulated(rates)), []
        decoder.add(Request(text, new, Sampling()))
        while not decoder.finished:
            steps += decoder.step()
        return [s for s in steps if not s.prefill][:-1]

    def tau(drafter: Drafter, rates: tuple[float, ...], new: int) -> float:
        made = cycles(drafter, rates, new)
        return sum(len(s.tokens) for s in made) / len(made)

    tree = eagle2(llm).drafter
    chain = tree.chain(3)
    assert tau(tree, (0.0,), 5) == tau(chain, (0.0,), 5) == 1.0
    for made in (cycles(tree, (1.0,), 40), cycles(kind(llm.target), (1.0,), 20)):
        for s in made:
            deepest = int((s.draft.tree.depth_BN * s.draft.tree.acceptable_BN).max())  # type: ignore[union-attr]
            assert len(s.tokens) == 1 + deepest
            assert all(s.draft.tree.parents_BN[0, b] == a for a, b in zip(s.path, s.path[1:], strict=False))  # type: ignore[union-attr]
    expected = 1 + 0.8 + 0.8 * 0.5 + 0.8 * 0.5 * 0.25
    assert abs(tau(chain, (0.8, 0.5, 0.25), 480) - expected) < 5 * 0.87 / 300**0.5 * 1.1
    assert parse_rates("0.8,0.5") == (0.8, 0.5)
    for bad in ("x", "1.5", "", "nan"):
        with pytest.raises(OptionError):
            parse_rates(bad)


def test_transformers_is_trimmed_like_us() -> None:
    """Bug: tokens that an assisted step accepted behind the end of the text count as decoded, and
    raise its tokens per second."""
    request = Request((1,), 6, eos=frozenset({2}))
    assert contestants._cut([5, 6, 2, 7], request) == (5, 6, 2)
    assert contestants._cut([5] * 9, request) == (5,) * 6
    assert contestants._fit([1, 3, 4], 5) == [1, 3, 1]
    assert contestants._fit([2, 2, 2], 2) == [2, 0, 0]


def test_seconds_are_the_clocks(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bugs: making a decoder ready is nobody's time, a cycle's begin is not the end of the one
    before, or the reader's time counts.

    On a simulated clock, making a decoder takes 5, a prompt 10, a cycle 3, and reading the answer 100.
    """
    now = [0.0]
    tree = Draft(Tree.chain(1, 1), torch.zeros(1, 1, dtype=torch.long))

    class Slow:
        cycle_runner = None

        def __init__(self, *given: object, **more: object) -> None:
            now[0] += 5
            self.left = 3

        def add(self, request: Request) -> None: ...

        @property
        def finished(self) -> bool:
            return not self.left

        def step(self) -> list[Step]:
            self.left -= 1
            steps = []
            for prefill in (True, False) if self.left == 2 else (False,):
                now[0] += 10 if prefill else 3
                finish, path = None if self.left else "length", () if prefill else (0,)
                steps.append(Step(1, (5,), finish, path, tree, ended_at=now[0]))
            now[0] += 100
            return steps

    monkeypatch.setattr(contestants, "Decoder", Slow)
    monkeypatch.setattr(contestants, "is_worth_keeping", lambda cycle_runner: False)
    monkeypatch.setattr("eyas_lab.bench.contestants.time.perf_counter", lambda: now[0])
    answer = Drafting("vanilla", llm.drafter).answer(Question("a", "t", 0, Request((5,), 4)))
    assert answer.prefill_seconds == 15
    assert [c.seconds for c in answer.cycles] == [3, 3, 3]


def test_reports(llm: LLM, tmp_path: Path) -> None:
    """Guards what people read: every method in the table, simulation is said, other
    formats refused."""
    run = bench(llm, eagle2(llm))
    answers = run.run(tmp_path)
    summary = summarise(run, answers, snapshot(), "eyas bench <x>", skipped={"medusa": "no <head>"})
    write(tmp_path, summary)
    text = (tmp_path / "report.md").read_text()
    for said in ("vanilla", "transformers", "eagle2", "all tasks", "task1", "peak memory", "GB/s",
                 "Not run: medusa: no <head>"):  # fmt: skip
        assert said in text, said
    written = json.loads((tmp_path / "summary.json").read_text(), parse_constant=pytest.fail)
    assert written == json.loads(json.dumps(summary))
    again = report.read_summary(tmp_path)
    told = report.comparison(again, {**again, "settings": {**again["settings"], "threads": 99}}, ("a", "b"))
    assert all(line.split("|")[6].strip() == "1.00" for line in told.splitlines() if line.startswith("| 0 |"))
    assert "| eagle2 |" in told
    assert f"Different settings: threads ({again['settings']['threads']} / 99)." in told
    with pytest.raises(InputError, match="in common"):
        report.comparison(again, {**again, "rows": []}, ("a", "b"))
    (tmp_path / "summary.json").write_text(json.dumps({**again, "format": 0}))
    with pytest.raises(InputError, match="format 0"):
        report.read_summary(tmp_path)
    told = summarise(replace(run, simulated="0.5"), answers, snapshot(), "x")
    assert "simulated" in told["warnings"][0]
    assert all("SIMULATED" in words for words in (told["title"], report.markdown(told)))


def test_prompts_that_cannot_be_asked_are_found_before_the_first_is(llm: LLM) -> None:
    """Bug: a prompt that is longer than the context ends a bench that has run for hours."""
    long, foreign = (
        Prompt(name, "own", (), prompt_ids=ids) for name, ids in (("long", (5,) * 600), ("foreign", (5, 5000)))
    )
    assert bench(llm, prompts=(long, PROMPTS[0], foreign)).unfit() == {
        "long": "it has 600 tokens, the target's context is 512",
        "foreign": "token id 5000 is outside the target's vocabulary of 160",
    }


def test_without_plain_decoding_there_is_no_bench(llm: LLM, tmp_path: Path) -> None:
    """Bug: a broken target is told as one contestant's failure, and the rest is compared with nothing."""
    broken = Like(llm, "vanilla", 0, AttributeError)
    with pytest.raises(AttributeError, match="weight"):
        Bench(llm, [broken, eagle2(llm)], PROMPTS, max_new_tokens=6).run(tmp_path)


def test_texts_that_differ_are_said_with_their_margin() -> None:
    """Bug: in half precision a near tie and a wrong text look alike in the table."""
    row = {"equal": False, "differ": [["a", 0, 3, 0.002], ["b", 0, 1, 0.01]]}
    assert report._texts(row) == "2 differ, margin up to 0.01"
    assert report._texts({"equal": False, "differ": [["a", 0, 3, None]]}) == "1 differ"
    assert [report._texts({"equal": e}) for e in (True, None)] == ["equal", "not compared"]

"""`eyas bench` from the command line: what it prints, what it refuses, and what a kill leaves."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zoo
from eyas_lab.bench import cost
from eyas_lab.bench.contestants import Drafting, Question
from eyas_lab.bench.entries import HEADS
from eyas_lab.bench.record import Answer
from eyas_lab.folders import locked_folder

pytestmark = pytest.mark.slow

Run = Callable[..., Any]
Refused = Callable[..., str]
QUICK = ("--max-new-tokens", 8)


@pytest.fixture(autouse=True)
def _known_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory's speed is measured once, in bench/test_machine.py."""
    monkeypatch.setattr(cost, "bandwidth", lambda device: 1e10)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps({"prompt_ids": list(range(5 + i, 12 + i))}) + "\n" for i in range(3)))
    return path


@pytest.fixture
def bench(prompts: Path, tmp_path: Path) -> tuple[object, ...]:
    """A bench of plain decoding, transformers and what follows, on three prompts."""
    return ("bench", "--target", "llama", "--prompts", prompts, "--output", tmp_path / "out", *QUICK)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A language model of the target's vocabulary: the target itself, saved as a draft model."""
    zoo.FAMILIES["llama"]().save_pretrained(tmp_path / "small")
    return tmp_path / "small"


def summary_of(result: Any) -> dict[str, Any]:
    assert result.exit_code == 0, (result.output, result.exception)
    return json.loads(result.stdout.strip().splitlines()[-1])  # type: ignore[no-any-return]


def rows_of(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The rows of all tasks, by method."""
    return {row["method"]: row for row in found["rows"] if row["task"] == "all"}


def test_the_object_that_other_programs_read(run: Run, bench: tuple[object, ...], world: Path) -> None:
    """Guards the stable part of --json (DESIGN, section 5), and that plain decoding and
    transformers always take part."""
    given = ("--methods", "eagle2,suffix", "--draft", world / "head", "--tree.nodes", 6)
    found = summary_of(run(*bench, *given, "--json"))
    rows = rows_of(found)
    assert list(rows) == ["vanilla", "transformers", "transformers_prompt_lookup", "eagle2", "suffix"]
    stable = {"method", "task", "temperature", "prompts", "tokens", "tokens_per_second", "speedup", "speedup_low", "speedup_high",
              "speedup_vs_transformers", "tau", "c", "equal"}  # fmt: skip
    for row in rows.values():
        assert stable <= row.keys()
        assert (row["equal"], row["prompts"], row["tokens"]) == (True, 3, rows["vanilla"]["tokens"])
    assert found["machine"]["cpu"]
    head = found["settings"]["methods"]["eagle2"]
    assert (head["tree"]["nodes"], head["head"]) == (6, str(world / "head"))


def test_a_small_model_assists_transformers_too(run: Run, bench: tuple[object, ...], small: Path) -> None:
    """Bug: the row of transformers' assisted generation never appears, because nobody knows where
    the small model is."""
    rows = rows_of(summary_of(run(*bench, "--methods", "small_model", "--draft", f"small_model={small}", "--json")))
    assert list(rows)[2:] == ["transformers_prompt_lookup", "transformers_assisted", "small_model"]
    assert rows["transformers_assisted"]["equal"]
    assert rows["transformers_assisted"]["tau"] > 1.5
    assert rows["small_model"]["tau"] > 3, "a perfect draft model: chains of five"


def left_out(result: Any, method: str, words: str) -> bool:
    """Whether a line says that a method is left out, and why."""
    lines = result.stderr.splitlines()
    return any(line.startswith(f"eyas: {method} is left out: ") and words in line for line in lines)


def test_all_names_who_cannot_run_and_why(run: Run, bench: tuple[object, ...], world: Path) -> None:
    """Bug: a method without its head ends `--methods all`, or is left out without a word."""
    result = run(*bench, "--methods", "all", "--draft", world / "head", "--limit", 1)
    assert result.exit_code == 0, (result.output, result.exception)
    assert left_out(result, "medusa", "eyas train --method medusa --target")
    assert left_out(result, "hydra", "--draft hydra=HEAD")
    assert left_out(result, "rest", "eyas datastore build")


@pytest.mark.exhaustive
@pytest.mark.usefixtures("embedded")
def test_small_trees_of_the_embedded_model(
    run: Run, tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bugs: the embedded model's small static tree goes over a flag of the user's, or falls on a method that grows its
    tree, which is as large as pays there, or, where acceptance is simulated, as ever."""
    monkeypatch.chdir(tmp_path)
    command = ("bench", "--prompts", prompts, "--output", tmp_path / "out", *QUICK, "--limit", 1)

    def trees(*given: object) -> dict[str, Any]:
        found = summary_of(run(*command, "--simulate-acceptance", "0.5", "--json", *given, "--restart"))
        assert found["settings"]["methods"]["eagle2"]["head"] == "embedded eagle1", "not where it lies on this machine"
        return {name: {k: tree.get(k) for k in ("nodes", "depth")} for name, about in found["settings"]["methods"].items()
                if (tree := about.get("tree"))}  # fmt: skip

    alike = {"nodes": 4, "depth": 3}
    assert trees("--methods", "eagle1,eagle2,eagle2:tree.expand=confidence,medusa,small_model") == {
        "eagle1": alike, "eagle2": {"nodes": 60, "depth": 8}, "eagle2:tree.expand=confidence": {"nodes": 60, "depth": 8},
        "medusa": alike, "small_model": alike,
    }  # fmt: skip
    assert trees("--methods", "eagle2,small_model:depth=2", "--tree.nodes", 9, "--tree.depth", 4) == {
        "eagle2": {"nodes": 9, "depth": 4}, "small_model:depth=2": {"nodes": 3, "depth": 2}
    }  # fmt: skip


def test_a_broken_line_is_named_and_the_rest_goes_on(run: Run, bench: tuple[object, ...], prompts: Path) -> None:
    """Bug: one line ends the bench, or is left out in silence; so for a prompt that the context cannot hold."""
    with prompts.open("a") as f:
        f.write('{"prompt_ids": [5,\n{"promt": "x"}\n' + json.dumps({"prompt_ids": [5] * 600}) + "\n")
    result = run(*bench, "--methods", "vanilla", "--json")
    assert {row["prompts"] for row in summary_of(result)["rows"]} == {3}
    said = result.stderr.splitlines()
    assert any(line.startswith(f"eyas: {prompts}:4: not JSON") for line in said)
    assert any(line.startswith(f"eyas: {prompts}:5: ") and "did you mean prompt" in line for line in said)
    assert "eyas: prompt mine/6 is left out: it has 600 tokens, the target's context is 512" in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--methods", "eagle3"), "eagle3 has no head here: `eyas train --method eagle3 --target"),
        (("--methods", "eagle2"), "eagle2 has no head here: `eyas train --method eagle1 --target"),
        (("--methods", "eagl2"), "did you mean eagle2"),
        (("--methods", "suffix:nodes=3"), "suffix:nodes=3: unknown option 'nodes'; did you mean suffix.nodes?"),
        (("--methods", "suffix:suffix.nodes=x"), "suffix.nodes: 'x' is not a value of type int"),
        (("--methods", "suffix", "--tree.nodes", 9), "none of the methods has the option --tree.nodes"),
        (("--methods", "suffix", "--draft", "nobody=/tmp"), "unknown method 'nobody'"),
        (("--methods", "suffix", "--heads", "/nowhere"), "--heads /nowhere is not a folder"),
        (("--temperature", -1), "temperature"),
        (("--simulate-acceptance", "2"), "rates must be between 0 and 1"),
        (("--simulate-acceptance", ""), "takes rates by depth"),
        (("--prompts", "/nowhere.jsonl"), "/nowhere.jsonl does not exist"),
        (("--output", "/proc/nowhere"), "cannot write /proc/nowhere"),
        (("--compare", "/nowhere", "/nowhere"), "--compare only shows two finished benches: leave --prompts out"),
    ],
)
def test_a_mistake_is_one_line(
    refused: Refused, bench: tuple[object, ...], arguments: tuple[object, ...], says: str
) -> None:
    """Bug: a traceback, an hour of work before the refusal, or a line that does not say what to do."""
    assert says in refused(*bench, *arguments)


@pytest.mark.usefixtures("embedded")
def test_the_embedded_models_missing_heads_are_made_by_make(
    refused: Refused, tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: who wants medusa on the embedded model is told how to train from nothing, though one
    command of the repository does it."""
    monkeypatch.chdir(tmp_path)  # without heads of a run before
    said = refused("bench", "--prompts", prompts, "--output", tmp_path / "out", *QUICK, "--methods", "medusa")
    assert f"`make bench-heads` trains it into {HEADS}/medusa" in said


def test_prompts_that_cannot_be_asked(refused: Refused, tmp_path: Path) -> None:
    """Bug: a traceback at the first prompt where text needs a tokenizer; two prompts of one id count as one, whose
    answers are never whole."""
    command = ("bench", "--output", tmp_path / "out", *QUICK)
    assert "no prompt can be asked; the first, bundled/" in refused(
        *command, "--target", "bare", "--methods", "vanilla"
    )
    assert "two prompts are called bundled/" in refused(*command, "--target", "llama", "--tasks", "bundled,bundled")


def test_a_draft_of_another_vocabulary_is_refused(
    run: Run, refused: Refused, bench: tuple[object, ...], tmp_path: Path
) -> None:
    """Bug: a draft model whose tokens mean something else drafts nonsense, slowly and in silence;
    `all` goes on without it."""
    zoo.tiny("llama", vocab_size=90).save_pretrained(tmp_path / "other")
    given = ("--draft", f"small_model={tmp_path / 'other'}")
    assert "vocabulary" in refused(*bench, "--methods", "small_model", *given)
    result = run(*bench, "--methods", "all", *given, "--limit", 1)
    assert result.exit_code == 0, (result.output, result.exception)
    assert left_out(result, "small_model", "vocabulary")


def test_a_folder_in_use_and_folders_of_others_are_refused(
    run: Run, refused: Refused, bench: tuple[object, ...], tmp_path: Path
) -> None:
    """Bug: two runs write into one file; other settings' answers pass for this bench's; --restart does not help."""
    command = (*bench, "--methods", "vanilla")
    with locked_folder(tmp_path / "out"):
        assert f"{tmp_path / 'out'} is being written by process {os.getpid()} on " in refused(*command)
    assert run(*command).exit_code == 0
    assert "holds another bench (sampling differ)" in refused(*command, "--seed", 1)
    assert run(*command, "--seed", 1, "--restart").exit_code == 0


def test_comparing(run: Run, refused: Refused, bench: tuple[object, ...], tmp_path: Path) -> None:
    """Guards --compare: folders or files, and what differs."""
    outs = [tmp_path / "a", tmp_path / "b"]
    for seed, out in enumerate(outs):
        assert run(*bench, "--methods", "suffix", "--seed", seed, "--output", out).exit_code == 0
    shown = run("bench", "--compare", outs[0], outs[1] / "summary.json").stdout
    for said in (f"A: {outs[0]} (eyas bench: ", "| 0 | all | suffix |", "Different settings: sampling ("):
        assert said in shown
    assert "leave --json out" in refused("bench", "--compare", *outs, "--json")
    assert "cannot be read as a summary" in refused("bench", "--compare", outs[0], tmp_path / "nothing")


@pytest.mark.exhaustive
def test_simulated_acceptance_is_said_everywhere(run: Run, bench: tuple[object, ...], tmp_path: Path) -> None:
    """Bug: numbers of a lot pass for a method's. Methods without a head take part with random weights; transformers as
    it is."""
    command = (*bench, "--methods", "eagle2,medusa", "--tree.depth", 3, "--max-new-tokens", 40)
    found = summary_of(run(*command, "--simulate-acceptance", 1, "--json"))
    rows = rows_of(found)
    assert list(rows) == ["vanilla", "transformers", "eagle2", "medusa"]
    assert [row["tokens"] for row in rows.values()] == [3 * 40] * 4, "an accidental end makes texts of other lengths"
    assert [rows[name]["equal"] for name in ("transformers", "eagle2")] == [True, None], "its text is the lot's"
    assert rows["eagle2"]["tau"] > 2
    assert "SIMULATED" in found["title"]
    assert "SIMULATED" in (tmp_path / "out" / "report.md").read_text()


def test_a_text_of_ours_that_differs_fails_the_run(
    run: Run, bench: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a method that is not lossless is a row of the table like others."""
    true = Drafting.answer

    def lie(self: Drafting, question: Question) -> Answer:
        said, lies = true(self, question), self.name != "vanilla" and question.prompt == "mine/2"
        return said.replace(token_ids=(*said.token_ids[:-1], 7)) if lies else said

    monkeypatch.setattr(Drafting, "answer", lie)
    result = run(*bench, "--methods", "suffix")
    assert result.exit_code == 1
    assert "eyas: error: suffix, mine/2, turn 1, T = 0: token 7 is not plain decoding's (margin " in result.stderr
    assert result.stderr.count("a fault of eyas") == 1


def test_a_method_that_fails_takes_no_other_one_down(
    run: Run, bench: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: one method's exception ends the bench with a traceback. Status 1 only when every method failed."""
    true = Drafting.answer

    def fail(self: Drafting, question: Question) -> Answer:
        if self.name == "suffix":
            raise AttributeError("broken")
        return true(self, question)

    monkeypatch.setattr(Drafting, "answer", fail)
    result = run(*bench, "--methods", "suffix,prompt_lookup", "--json")
    assert "eyas: error: suffix failed and is in no figure: AttributeError: broken" in result.stderr
    errors = {name: row["error"] for name, row in rows_of(summary_of(result)).items()}
    assert (errors["suffix"], errors["prompt_lookup"]) == ("AttributeError: broken", None)
    assert run(*bench, "--methods", "suffix", "--restart").exit_code == 1

"""`eyas accelerate`: bad input, the dry run, a whole run, and runs that were stopped at every step."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eyas.adaptive import cost
from eyas.cli._errors import Interrupted
from eyas_train import loop
from eyas_train.accelerate import measure
from eyas_train.accelerate.journal import HEADING
from eyas_train.accelerate.plan import Plan, Prospect, Speeds
from eyas_train.commands import accelerate, features

Run = Callable[..., Any]
COSTS = cost.Costs(64, (1, 8), (0.01, 0.02), (1, 4), (0.001, 0.001), (0.001, 0.001), 0.0, 0.0)
STEPS = ("regenerate", "features", "train", "bench")


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    lines = [json.dumps({"prompt": f"what is {i}"}) for i in range(24)]
    (tmp_path / "questions.jsonl").write_text("\n".join(lines))
    return tmp_path / "questions.jsonl"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan for seconds in place of measurements, and no costs to be measured for the bench."""

    def look(models: Any, material: Any, methods: Any, seconds: float) -> Prospect:
        speeds, plan = Speeds(0.1, 4, 400.0, 6.0, 12.0, 1e4, 1e3, 100.0), Plan(18, 4, 1200, 0.3, 0.2, 2.0, 2.0, 4, 8)
        return Prospect(methods[0], "llama", 64, 6, speeds, plan)

    monkeypatch.setattr(measure, "look", look)
    monkeypatch.setattr(cost, "measure", lambda drafter: COSTS)


@pytest.mark.parametrize(("arguments", "message"), [
    ((), "option --output is missing"),
    (("--output", "x", "--method", "vanilla"), "--method vanilla: known: eagle3, mtp"),
    (("--output", "x", "--method", "eagle4"), "did you mean eagle3?"),
    (("--output", "x", "--data", "nowhere.jsonl"), "nowhere.jsonl does not exist"),
    (("--output", "x", "--minutes", "0"), "--minutes"),
    (("--output", "x", "--target", "llama"), "the model is named twice"),
    (("--output", "x", "--weights", "int8"), "--weights int8: features are read"),
])  # fmt: skip
def test_bad_options_are_refused(
    refused: Callable[..., str], arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """Bug: a mistake is noticed after minutes of measuring, or leaves a folder behind."""
    monkeypatch.chdir(tmp_path)
    assert message in refused("accelerate", "llama", *arguments)
    assert not (tmp_path / "x").exists()


def test_data_that_cannot_be_used_is_refused(refused: Callable[..., str], tmp_path: Path) -> None:
    """Bug: a head is trained on nothing, or plain text is taken for questions."""
    few, text = tmp_path / "few.jsonl", tmp_path / "book.txt"
    few.write_text('{"prompt": "why"}\n')
    text.write_text("Once upon a time.")
    assert "1 questions are too few" in refused("accelerate", "llama", "--output", tmp_path / "h", "--data", few)
    told = refused("accelerate", "llama", "--output", tmp_path / "h", "--data", text)
    assert "is plain text, and has no questions" in told
    assert "it is a file" in refused("accelerate", "llama", "--output", few)
    assert "holds something that this command has not made" in refused("accelerate", "llama", "--output", tmp_path)


def test_large_features_are_not_asked_about(tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a run whose features are large asks in the middle of the night, or ends where nobody can answer, with the
    advice to give an option that it does not have."""
    jobs = list[features.FeatureOptions]()
    monkeypatch.setattr(features, "make_features", lambda llm, job, options: jobs.append(job))
    run = accelerate.Run(None, None, tmp_path, None)  # type: ignore[arg-type]
    run.models = SimpleNamespace(for_training=lambda: None)  # type: ignore[assignment]
    run.prospect = measure.look(None, None, ["mtp"], 0)  # type: ignore[arg-type]
    run.features()
    assert jobs[0].yes


@pytest.mark.exhaustive
def test_every_step_is_done_once_however_often_the_run_is_stopped(
    run: Run, questions: Path, tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a run that goes on answers, reads or trains again, or skips what was stopped half way. The run is stopped at
    the beginning of each step, and in the training, whose options follow from the time that is left."""
    done, trained, stop_in = Counter[str](), list[int](), list[str]()
    train_step = loop.train_step

    def counted(name: str, step: Callable[[Any], None]) -> Callable[[Any], None]:
        def do(self: Any) -> None:
            if name in stop_in:
                raise Interrupted("here")
            step(self)
            done[name] += 1

        return do

    def stopped(setup: Any, loss: Any, optimizer: Any, state: Any) -> Any:
        if len(trained) == 7 and stop_in:
            raise KeyboardInterrupt
        trained.append(state.step)
        return train_step(setup, loss, optimizer, state)

    for name in STEPS:
        monkeypatch.setattr(accelerate.Run, name, counted(name, getattr(accelerate.Run, name)))
    monkeypatch.setattr(loop, "train_step", stopped)
    command = ("accelerate", "llama", "--data", questions, "--minutes", 1, "--output", tmp_path / "head")
    for name in (*STEPS[:3], "within the training", "bench"):
        stop_in[:] = [name]
        result = run(*command)
        assert result.exit_code == 130, (name, result.output, result.exception)
        if name.startswith("within"):
            assert "step 7 of" in result.stderr
            assert "the same command goes on from there" in result.stderr
    stop_in.clear()
    result = run(*command, "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    assert done == dict.fromkeys(STEPS, 1)
    assert trained == list(range(len(trained)))
    report = json.loads(result.stdout.strip().splitlines()[-1])
    assert report == json.loads((tmp_path / "head" / "report.json").read_text())
    assert report["reached"]["equal"] is True
    assert [step["name"] for step in report["steps"]] == ["measure", *STEPS]
    card = (tmp_path / "head" / "README.md").read_text()
    assert card.startswith("# mtp draft head for")
    assert run(*command).exit_code == 0
    assert done == dict.fromkeys(STEPS, 1)
    assert (tmp_path / "head" / "README.md").read_text() == card
    assert card.count(HEADING) == 1
    other = run(*command[:-3], 2, *command[-2:])
    assert (other.exit_code, "minutes 1.0 there, 2.0 now" in other.stderr) == (2, True)
    answer = run("generate", "--target", "llama", "--draft", tmp_path / "head", "--max-new-tokens", 4, "what is 1")
    assert answer.exit_code == 0, answer.output


@pytest.mark.exhaustive
@pytest.mark.long
def test_a_whole_run_measures_plans_trains_and_reports(run: Run, tmp_path: Path) -> None:
    """Bug: what is measured does not fit what the steps take. Everything is real here: the trials, the
    costs, bundled questions, the training in the time that is left."""
    dry = run("accelerate", "llama", "--kernels", "off", "--minutes", 1.5, "--dry-run", "--json")
    assert dry.exit_code == 0, (dry.output, dry.exception)
    planned = json.loads(dry.stdout.strip().splitlines()[-1])
    assert planned["method"] == "mtp"
    assert planned["plan"]["answers"] > 0
    assert "together" in dry.stdout
    assert "measured after training" in dry.stderr
    assert list(tmp_path.iterdir()) == []
    head = tmp_path / "head"
    result = run("accelerate", "llama", "--kernels", "off", "--minutes", 1.5, "--method", "mtp", "--output", head)
    assert result.exit_code == 0, (result.output, result.exception)
    report = json.loads((head / "report.json").read_text())
    assert report["method"] == "mtp"
    assert report["reached"]["equal"] is True
    assert "measured after training" in (head / "README.md").read_text()

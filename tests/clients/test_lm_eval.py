"""lm-eval asks the server what it asks its own `hf` model, on two small tasks of ours: texts are
equal, log-likelihoods up to rounding."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

import eyas
from eyas import tiny
from serving import Running

pytestmark = pytest.mark.slow
TASKS = Path(__file__).parent / "tasks"
Run = Callable[..., CompletedProcess[str]]


@pytest.fixture
def evaluate(run: Run, tmp_path: Path) -> Callable[..., dict[str, list[dict[str, Any]]]]:
    """Runs lm-eval; gives the samples of each task, in the order of the documents."""

    def made(
        kind: str, /, *more: str, tasks: tuple[str, ...] = ("eyas_choice", "eyas_text"), **arguments: Any
    ) -> dict[str, Any]:
        shutil.copy(TASKS / "prompts.jsonl", tmp_path)
        output = tmp_path / f"output-{len(list(tmp_path.glob('output-*')))}"
        listed = ",".join(f"{name}={value}" for name, value in arguments.items())
        options = ["--include_path", TASKS, "--tasks", ",".join(tasks), "--output_path", output, "--batch_size", 1]
        run("lm_eval", "run", "--model", kind, "--model_args", listed, *options, "--log_samples", *more)
        samples = {}
        for task in tasks:
            (file,) = output.rglob(f"samples_{task}_*.jsonl")
            samples[task] = sorted(
                (json.loads(line) for line in file.read_text().splitlines()), key=lambda sample: sample["doc_id"]
            )
        return samples

    return made


def test_completions(evaluate: Callable[..., Any], server: Running, folder: Path) -> None:
    """A wrong offset of `echo`, a log-probability after the temperature, or a "greedy" that
    compares unequal floats changes a sample."""
    own = evaluate("hf", "--device", "cpu", pretrained=folder, dtype="float32")
    ours = evaluate("local-completions", base_url=f"{server.v1}/completions", model="tiny", num_concurrent=3)
    for theirs, sample in zip(own["eyas_choice"], ours["eyas_choice"], strict=True):
        expected, found = ([(float(value), greedy) for ((value, greedy),) in one["resps"]] for one in (theirs, sample))
        assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=1e-3)
        assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
        assert sample["acc"] == theirs["acc"]
    greedy = {reply[0][1] for sample in own["eyas_choice"] for reply in sample["resps"]}
    assert greedy == {"True", "False"}, "answers that are all alike prove nothing"
    assert [sample["resps"] for sample in ours["eyas_text"]] == [sample["resps"] for sample in own["eyas_text"]]


def test_chat_completions(evaluate: Callable[..., Any], server: Running, folder: Path) -> None:
    """A conversation is rendered by the server as lm-eval renders it by the tokenizer's template."""
    tasks = ("eyas_text",)
    own = evaluate("hf", "--device", "cpu", "--apply_chat_template", tasks=tasks, pretrained=folder, dtype="float32")
    ours = evaluate(
        "local-chat-completions",
        "--apply_chat_template",
        tasks=tasks,
        base_url=f"{server.v1}/chat/completions",
        model="tiny",
    )
    assert [sample["resps"] for sample in ours["eyas_text"]] == [sample["resps"] for sample in own["eyas_text"]]


def test_the_hf_model_with_eyas_attached(run: Run, tmp_path: Path) -> None:
    """lm-eval brings a stopping criterion that counts the rows of a batch, and calls
    `model.generate` in its own manner."""
    for file in TASKS.iterdir():
        shutil.copy(file, tmp_path)
    source = Path(eyas.__file__).parents[1]
    program = Path(__file__).parent / "programs" / "lm_eval_attached.py"
    done = run("python", program, source, tmp_path, tiny.HEADS["eagle3"])
    report = json.loads(done.stdout.splitlines()[-1])
    assert all(found["equal"] and found["answers"] == 5 and found["tau"] > 1 for found in report.values()), report

"""The commands behind the figures: each has its help, runs in its smallest form, and goes on where it was stopped."""

import importlib
import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import processes
import zoo
from eyas.core.engine import Decoder, Request
from eyas.core.options import build_options
from eyas.core.target import Target
from eyas.drafters import find
from eyas.errors import EyasError, InputError
from eyas_train.data import Example, Examples
from fp8_support import MULTIPLIES

pytestmark = pytest.mark.slow  # processes of their own

RUNS = Path(__file__).parents[1] / "runs"
FOLDERS = [RUNS, *sorted(RUNS.parent.glob("packages/*/runs"))]
SCRIPTS = {path.stem: path for folder in FOLDERS for path in sorted(folder.glob("[!_]*.py"))}


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of runs/ by its name."""
    for folder in FOLDERS:
        monkeypatch.syspath_prepend(str(folder))

    def load(name: str) -> ModuleType:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != "ray":
                raise
            pytest.skip("Ray is installed by `make scale`")

    return load


def chats(path: Path, count: int, reply: str) -> Path:
    turns = [
        [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": f"{reply} {i}"}]
        for i in range(count)
    ]
    path.write_text("".join(json.dumps({"messages": [*t, *t]}) + "\n" for t in turns))
    return path


@pytest.mark.parametrize("name", SCRIPTS)
def test_help(name: str, command: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards that every script can be imported, and shows the command line that its help begins with."""
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        command(name).main()
    assert ended.value.code == 0
    assert f"python {SCRIPTS[name].relative_to(RUNS.parent)}" in capsys.readouterr().out


def test_answers_of_many_rows_are_plain_decoding(command: Any) -> None:
    """Guards caches side by side, padding, and rows that take new prompts, in float32 by ids."""
    script = command("gpu_head")
    model = zoo.tiny("llama", tie_word_embeddings=True, num_hidden_layers=4)
    dice = np.random.default_rng(0)
    texts = [dice.integers(3, zoo.VOCAB, n).astype(np.uint16) for n in (4, 5, 9, 9, 12, 30, 31, 40)]
    done = script.answer_all(script.Rows(model, 3), texts, np.zeros(8, bool), time.time() + 600, every=5, chunk=2)
    assert sorted(number for number, _ in done) == list(range(8))
    for number, answer in done:
        prompt = torch.from_numpy(texts[number].astype(np.int64))[None]
        length = script.NEW_TOKENS
        out = model.generate(prompt, max_new_tokens=length, do_sample=False, eos_token_id=script.END, pad_token_id=0)
        assert answer.tolist() == out[0, prompt.shape[1] :].tolist()


def test_a_chain_is_measured_without_decoding(command: Any) -> None:
    """Guards the figures of a learning curve: those of real chains over the same greedy answers."""
    script = command("gpu_head")
    target = Target(zoo.tiny("llama", num_hidden_layers=8))
    drafter: Any = find("eagle3").random(target, build_options(find("eagle3").Options, {"head.draft_vocab": 24}), 1)
    with torch.no_grad():  # a head that is right now and then
        drafter.net.fc.weight.zero_()
        drafter.net.head.weight.copy_(target.family.head.weight[drafter.draft_ids_v])
    heldout, tokens, passes = Examples(), 0, 0
    for seed in range(6):
        prompt = torch.randint(3, zoo.VOCAB, (12,), generator=torch.Generator().manual_seed(seed)).tolist()
        decoder = Decoder(target, drafter.chain(4))
        decoder.add(Request(tuple(prompt), 40))
        answer = list[int]()
        while not decoder.finished:
            for step in decoder.step():
                answer += step.tokens
                passes += not step.prefill
                tokens += 0 if step.prefill else len(step.tokens)
        heldout.append(Example([*prompt, *answer], [False] * len(prompt) + [True] * len(answer)))
    found = script.forced_figures(drafter, heldout)
    assert tokens > passes, "nothing is accepted"
    assert found["tau of a chain of 4"] == pytest.approx(tokens / passes, abs=1e-3)


def test_the_results_are_made_from_the_records(command: Any) -> None:
    """Bug: a table of docs/lab/results.md is edited by hand, or a record changes without it; a record does not say
    where it is from."""
    assert command("results").main(["--check"]) == 0, "run: python runs/results.py"
    for path in command("_records").RECORDS.glob("*.json"):
        text = path.read_text(encoding="utf-8")
        json.loads(text)
        named = ('"commit"' in text or '"first_in_commit"' in text) and '"machine"' in text and '"command"' in text
        assert named, f"{path.name} names no commit, machine or command"


@pytest.mark.parametrize("script", ["front_page", "log_index"])
def test_pages_that_scripts_make(script: str, command: Any) -> None:
    """Bug: a record or an entry of the log changes without the README's table, or without the log's index."""
    assert command(script).main(["--check"]) == 0, f"run: python runs/{script}.py"


def test_numbers_of_the_pages(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: README or the guide keeps a number that its record does not have any more."""
    assert command("page_numbers").main([]) == 0, capsys.readouterr().out


def test_rows_outlive_an_interruption(command: Any, tmp_path: Path) -> None:
    """Bugs: a run goes on in the rows of other settings; what was measured is measured again."""
    common = command("_common")
    rows = common.Rows(tmp_path / "raw.jsonl", {"nodes": 4})
    rows.add(("a", 1), {"ms": 2.0})
    again = common.Rows(tmp_path / "raw.jsonl", {"nodes": 4})
    assert ("a", 1) in again
    assert ("a", 2) not in again
    assert again.of("a") == [{"key": ["a", 1], "ms": 2.0}]
    with pytest.raises(InputError, match=r"other settings \(nodes\)"):
        common.Rows(tmp_path / "raw.jsonl", {"nodes": 5})


# --- runs/gpu.py -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.long
def test_everything_for_a_gpu_runs_in_small(command: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the first minutes on a GPU: every stage runs, texts are equal, a second run measures nothing again."""
    gpu, output = command("gpu"), tmp_path / "gpu.json"
    options = "--device cpu --shape small --minutes 30"
    given = [*options.split(), "--output", str(output)]
    with nullcontext() if MULTIPLIES else pytest.raises(EyasError):
        gpu.main(given)
    assert f"left: nothing; failed: {'none' if MULTIPLIES else 'fp8 64 tokens, sampled fp8'}" in capsys.readouterr().out
    content = json.loads(output.read_text())
    measured = [(stage, case) for stage, found in content["stages"].items() for case in found]
    assert measured == [(case.stage, case.name) for case in gpu.cases(gpu.SMALL)]
    texts = [
        row
        for name in ("texts", "compile")
        for record in content["stages"][name].values()
        for row in record["rows"]
        if "texts" in row
    ]
    assert {row["kernels"] for row in texts} == {"off", "on", "compile"}
    assert [row for row in texts if row["dtype"] == "float32" and row["differ"]] == []
    cycles = [row for record in content["stages"]["first"].values() for row in record["rows"]]
    assert {row["method"] for row in cycles} == {"vanilla", "eagle3 8/3/4"}
    assert all(row["tau"] > 1 for row in cycles if row["method"] != "vanilla")
    with nullcontext() if MULTIPLIES else pytest.raises(EyasError):
        gpu.main(given)
    again = json.loads(output.read_text())
    assert again["stages"] == content["stages"]
    assert "== " not in capsys.readouterr().out, "a case was measured again"


def test_a_run_for_a_gpu_ends_in_time_and_goes_on(
    command: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: what was measured is lost when time is over; a failed case ends all others, or is never tried again."""
    gpu = command("gpu")
    calls = list[str]()

    def case(name: str, seconds: float = 0.0, error: Exception | None = None) -> Any:
        def run(lab: Any, before: Any) -> dict[str, Any]:
            calls.append(name)
            if error is not None:
                raise error
            return {"rows": [{"name": name}]}

        return gpu.Case("stage", name, run, seconds)

    def measured(cases: list[Any], retry: bool = False) -> None:
        results = gpu.Results(tmp_path / "record.json", {"command": "x"})
        if retry:
            results.forget_failures()
        gpu.measure(cases, None, results, time.time() + 300, 1.0)

    with pytest.raises(gpu.OutOfTime):
        measured([case("a"), case("b", error=RuntimeError("no such kernel")), case("c"), case("d", seconds=1000)])
    assert calls == ["a", "b", "c"]
    written = json.loads((tmp_path / "record.json").read_text())["stages"]["stage"]
    assert list(written) == ["a", "b", "c"]
    assert "no such kernel" in written["b"]["error"]
    measured([case("a"), case("b"), case("c"), case("d")])
    assert calls[3:] == ["d"]
    measured([case("a"), case("b")], retry=True)
    assert calls[4:] == ["b"]
    capsys.readouterr()


def test_a_case_that_takes_too_long_is_interrupted(command: Any) -> None:
    """Bug: a compiler works on past the end of the lease, and the record of the run never arrives."""
    gpu = command("gpu")

    def endless() -> None:
        while True:
            try:
                sum(range(1000))
            except gpu.OutOfTime:  # as a library would that takes every exception for its own
                break
        while True:
            sum(range(1000))

    with pytest.raises(gpu.OutOfTime), gpu.interrupted_after(0.2):
        endless()


def test_mistakes_in_the_options_for_a_gpu(command: Any, tmp_path: Path) -> None:
    gpu = command("gpu")
    with pytest.raises(EyasError, match="unknown stage 'frist'; did you mean first"):
        gpu.main(["--device", "cpu", "--stages", "machine,frist", "--output", str(tmp_path / "x.json")])
    if not torch.cuda.is_available():
        with pytest.raises(EyasError, match="torch sees no GPU"):
            gpu.main(["--device", "cuda", "--output", str(tmp_path / "x.json")])


@pytest.mark.exhaustive
def test_what_runs_on_a_gpu_needs_few_packages() -> None:
    """Guards a machine that cannot install anything: no package of the command line or of pictures."""
    missing = ("cyclopts", "docstring_parser", "rich_rst", "matplotlib")
    code = WITHOUT.format(missing=missing, runs=str(RUNS)) + "import gpu; gpu.cases(gpu.FULL); print('ok')"
    done = processes.run([sys.executable, "-c", code])
    assert (done.stdout, done.returncode) == ("ok\n", 0), done.stderr


WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
sys.path.insert(0, {runs!r})
"""

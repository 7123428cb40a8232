"""Help pages, and the commands that need no training and no files: methods, doctor, chat."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import eyas
import processes
from eyas import drafters, tiny
from eyas.cli import doctor
from eyas.cli._app import names
from eyas.option_texts import list_options

Run = Callable[..., Any]
HERE = tiny.FOLDER.is_dir()  # looked up before any fixture puts something else there
SMALL = ("--tree.nodes", 6, "--tree.depth", 3, "--tree.branch", 2)


COMMANDS = """accelerate audit bench chat datastore demo doctor examine export features generate heads methods push regenerate serve
    train tune"""


@pytest.mark.slow
def test_the_commands_are_the_files(run: Run) -> None:
    assert set(names()) == set(COMMANDS.split())
    shown = run("--help")
    assert shown.exit_code == 0
    for name in names():
        assert re.search(rf"^│ {name} ", shown.output, re.MULTILINE), name
        assert run(name, "--help").exit_code == 0
    assert run("--version").output == f"eyas {eyas.__version__}\n"
    assert "Usage" in run().output


@pytest.mark.quick("push", "export", "datastore build")
@pytest.mark.parametrize("name", [*names(), "datastore build"])
def test_every_option_says_what_it_is_for(name: str, run: Run) -> None:
    """The help of every command describes every option, those of methods and of the training's config included. A line
    of a panel with an option and no text, or only its default, is an option without help."""
    if name == "datastore":
        return
    shown = run(*name.split(), "--help-all", env={"COLUMNS": "400"}).output
    lines = [line for line in shown.splitlines() if re.match(r"^│ [* ]*--", line)]
    assert lines
    silent = [line for line in lines if not re.search(r"  [^ \[]", line.strip("│ ").lstrip("* "))]
    assert not silent


@pytest.mark.slow
def test_help_of_generate(run: Run) -> None:
    """All options of the design in panels; those of methods only where they are asked for, with their defaults."""
    shown = run("generate", "--help").output
    flags = """--target --draft --method --tokenizer --max-new-tokens --system --raw --temperature --top-k --top-p --min-p
        --repetition-penalty --seed --stop --ignore-eos --batch-size --dtype --device --trust-remote-code --prompt-ids --input --output
        --json --help-all Examples"""
    panels = [f"─ {panel} ─" for panel in ("Prompt", "Model", "Method", "Sampling", "Output", "Machine")]
    assert [word for word in (*flags.split(), *panels) if word not in shown] == []
    assert "--tree.nodes" not in shown
    assert len(shown.splitlines()) < 160, "help was 225 lines long"
    everything = run("generate", "--help-all", env={"COLUMNS": "120"}).output  # a long name folds at 80
    for name in drafters.names():
        for option in list_options(drafters.find(name).Options):
            flag = f"--{option.name.replace('_', '-')} "
            assert (flag in everything) == (not option.use), option
    one = " ".join(run("generate", "--method", "eagle3", "--help").output.replace("│", " ").split())
    assert "verified per cycle, the root included. [default: 60]" in one.lower()
    assert "--tree.choices" not in one


def test_help_of_train_has_the_fields_of_its_config(run: Run) -> None:
    from dataclasses import fields

    from eyas_train.loop import TrainConfig

    shown = run("train", "--help").output
    for field in fields(TrainConfig):
        assert f"--{field.name.replace('_', '-')} " in shown, field.name


OWN = '''
from dataclasses import dataclass
from eyas.drafters.vanilla import Method as Vanilla

@dataclass(frozen=True)
class Options:
    courage: int = 3
    """How much it dares."""

class Method(Vanilla):
    Options = Options

    def describe(self):
        return {"courage": self.options.courage}
'''


@pytest.mark.slow
def test_a_method_of_the_users_own(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dotted path brings its own flags."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "__init__.py").touch()
    (tmp_path / "own" / "drafter.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    arguments = ("generate", "--target", "llama", "x", "--max-new-tokens", 2, "--json", "--courage", 7)
    result = run(*arguments, "--method", "own.drafter")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["tree"] == {"courage": 7}
    assert "How much it dares" in run("generate", "--method=own.drafter", "--help").output
    assert run(*arguments, "--method", "vanilla").exit_code == 2


def test_methods(run: Run) -> None:
    found = json.loads(run("methods", "--json").stdout)["methods"]
    assert [method["name"] for method in found] == drafters.names()
    by_name = {method["name"]: method for method in found}
    assert by_name["eagle2"]["options"]["tree.nodes"] == 60
    assert by_name["eagle2"]["needs_head"]
    assert not by_name["vanilla"]["needs_head"]
    shown = run("methods").output
    assert all(name in shown for name in drafters.names())


@pytest.mark.slow
@pytest.mark.usefixtures("embedded")
def test_doctor_when_all_is_well(run: Run) -> None:
    result = run("doctor", "--json")
    report = json.loads(result.stdout)
    assert (result.exit_code, report["ok"], report["problems"]) == (0, True, [])
    assert report["cpu"]["usable_cores"] >= 1
    assert report["memory"]["free_gb"] > 0
    assert report["versions"]["eyas"] == eyas.__version__
    assert {check["topic"] for check in report["checks"]} == {"packages", "embedded", "self-test"}
    shown = run("doctor")
    assert (shown.exit_code, "all is well" in shown.output) == (0, True)


@pytest.mark.slow
def test_doctor_without_kernels(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It asked the kernels for AMX before it asked whether they are there, and ended in a traceback."""
    from eyas import kernels
    from eyas.kernels import UnavailableError

    def absent() -> bool:
        raise UnavailableError("no compiler")

    monkeypatch.setattr(kernels, "why_not", lambda: "no compiler")
    monkeypatch.setattr(kernels, "has_amx", absent)
    assert "no compiler" in json.loads(run("doctor", "--json").stdout)["fast_paths"]["compiled kernels (CPU)"]


@pytest.mark.slow
def test_doctor_finds_what_is_broken(run: Run, embedded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report that is always green would be worse than none."""
    (embedded / "tokenizer_config.json").write_text("{}")
    (embedded / "eagle1" / "model.safetensors").unlink()
    report = json.loads(run("doctor", "--json").stdout)
    assert not report["ok"]
    problems = "\n".join(report["problems"])
    assert "missing or changed: eagle1/model.safetensors, tokenizer_config.json" in problems
    assert "draft head" in problems
    needed = ["torch>=99", "nothing-of-that-name>=1", "pytest>=99; extra == 'dev'"]
    monkeypatch.setattr(doctor, "requires", lambda _: needed)
    shown = run("doctor")
    words = ("is not >=99", "nothing-of-that-name is missing", "pytest>=99")
    assert (shown.exit_code, [word in shown.output for word in words]) == (1, [True, True, False])


@pytest.mark.slow
def test_doctor_without_the_embedded_model(run: Run, embedded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded model is a distribution of its own: to have not installed it is no fault, and
    the report says how it is installed."""
    monkeypatch.setattr(tiny, "FOLDER", embedded / "nowhere")
    found = json.loads(run("doctor", "--json").stdout)
    assert not any("embedded" in problem for problem in found["problems"])
    assert ("embedded", None, tiny.MISSING) in [(one["topic"], one["good"], one["what"]) for one in found["checks"]]


@pytest.mark.cover(content=2)
@pytest.mark.quick("[]")
@pytest.mark.parametrize("content", ["[]", "7", "null", "{}", '"x"', "[" * 100_000, '{"a": 1' + "0" * 5000 + "}"])
def test_doctor_with_checksums_that_are_none(run: Run, embedded: Path, content: str) -> None:
    """A list of checksums that is no object ended in a traceback; an empty one was taken for a good one."""
    (embedded / "checksums.json").write_text(content)
    result = run("doctor", "--json")
    assert result.exit_code == 1, result.exception
    assert any("checksums.json" in problem for problem in json.loads(result.stdout)["problems"])


@pytest.mark.slow
@pytest.mark.skipif(not HERE, reason="the weights of the embedded model and its head are not in this tree")
def test_the_shipped_model_is_intact(run: Run) -> None:
    result = run("doctor")
    assert result.exit_code == 0, result.output


CHAT = ("chat", "--target", "llama", "--draft", "head", *SMALL, "--max-new-tokens", 12)


@pytest.mark.slow
def test_chat_from_a_pipe(run: Run, world: Path) -> None:
    """Answers on stdout, everything else on stderr; the conversation goes on from turn to turn, and
    /reset forgets it."""
    llm = eyas.load(world / "llama")
    talk = llm.chat()
    first, second = (talk.send(text, max_new_tokens=12).text for text in ("hello", "more"))
    result = run(*CHAT, stdin="hello\nmore\n\n/reset\nhello\n/exit\nnever said\n")
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{first}\n{second}\n{first}\n"
    assert result.stderr.count(" tokens in ") == 3
    assert "the conversation is forgotten" in result.stderr


@pytest.mark.slow
def test_chat_colours_what_was_drafted(run: Run) -> None:
    """A random head seldom guesses right, but with 30 guesses in 100 tokens it does (seeded;
    asserted), and only that is green."""
    wide = ("--tree.nodes", 31, "--tree.branch", 30, "--tree.depth", 1)
    arguments = (*CHAT, *wide, "--max-new-tokens", 100)
    plain = run(*arguments, stdin="hello\n", env={"FORCE_COLOR": "1"})
    painted = run(*arguments, "--color-accepted", stdin="hello\n", env={"FORCE_COLOR": "1"})
    off = run(*arguments, "--color-accepted", stdin="hello\n", env={"NO_COLOR": "1", "FORCE_COLOR": "1"})
    assert off.stdout == plain.stdout
    green = re.findall("\x1b\\[32m(.*?)\x1b\\[0m", painted.stdout, re.DOTALL)
    assert plain.stdout == re.sub("\x1b\\[\\d+m", "", painted.stdout) != painted.stdout
    tau = float(painted.stderr.partition("tau ")[2].partition(",")[0])
    cycles = 99 / tau
    assert tau > 1
    assert len("".join(green)) == pytest.approx(99 - cycles, abs=1.5)  # tokens are characters; tau has two digits


@pytest.mark.slow
def test_chat_survives_what_a_turn_cannot(run: Run) -> None:
    """A message that does not fit is refused by name and leaves no trace in the conversation."""
    result = run(*CHAT, stdin=f"hello\n{'x' * 600}\n/nonsense\nmore\n/help\n")
    assert (result.stdout, result.exit_code) == (run(*CHAT, stdin="hello\nmore\n").stdout, 2)
    for words in ("context is 512", "/reset begins again", "unknown command '/nonsense'", "Ctrl-C stops an answer"):
        assert words in result.stderr


@pytest.mark.exhaustive
def test_ctrl_c_stops_the_answer_and_keeps_the_chat(world: Path) -> None:
    command = [sys.executable, "-m", "eyas", "chat", "--target", world / "llama", "--max-new-tokens", "480"]
    how: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    how |= {"env": processes.environment(), "preexec_fn": processes.accept_interrupts}
    with processes.started(command, True, **how) as process:
        process.stdin.write(b"hello\n")
        process.stdin.flush()
        assert len(process.stdout.read(3)) == 3
        process.send_signal(signal.SIGINT)
        out, said = processes.finish(process, b"/help\n/exit\n")
    assert process.returncode == 0, said.decode()
    told = [words in said for words in (b"interrupted", b"/help: list these commands", b"Traceback")]
    assert told == [True, True, False]
    assert len(out.decode()) < 480

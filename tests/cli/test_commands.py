"""Help pages, and the commands that need no training and no files: methods, doctor, chat."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import eyas
from eyas import drafters, tiny
from eyas.cli import doctor
from eyas.cli._app import names

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

"""Terminals, standard streams, interrupts, optional packages and locks: the command as a process."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import processes
from eyas.locks import locked_output

pytestmark = pytest.mark.slow  # processes of their own

Run = Callable[..., Any]
EYAS = [sys.executable, "-m", "eyas"]
GENERATE = ("generate", "--target", "llama", "--max-new-tokens", 3)


def shell(world: Path, arguments: tuple[object, ...], redirection: str) -> subprocess.CompletedProcess[str]:
    """The command as a shell runs it, with a redirection such as `>&-`."""
    words = [str(world / "llama") if a == "llama" else str(a) for a in arguments]
    line = f"{shlex.join([*EYAS, *words])} {redirection}"
    return processes.run(["sh", "-c", line], env=processes.environment())


@pytest.mark.exhaustive
def test_closed_standard_streams(world: Path, tmp_path: Path) -> None:
    """`eyas generate hi >&-` ended with a traceback; and a file opened later must not become standard output."""
    closed = shell(world, (*GENERATE, "hi"), ">&-")
    assert closed.returncode == 0, closed.stderr
    (tmp_path / "in.jsonl").write_text('{"prompt": "hi"}\n')
    written = shell(world, (*GENERATE, "--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl"), ">&- <&-")
    assert written.returncode == 0, written.stderr
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 1
    silent = shell(world, (*GENERATE, "-"), "<&-")
    assert silent.returncode == 2
    assert "the prompt is empty" in silent.stderr


@pytest.mark.cover(moment=1)
@pytest.mark.parametrize("moment", ["import cyclopts", "import torch", "import transformers"])
def test_ctrl_c_while_it_starts(moment: str) -> None:
    """Within the first second, Ctrl-C printed a traceback of whatever was being imported. The
    process interrupts itself at the first import of a package, so there is nothing to wait for."""
    code = f"""
import os, signal, sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {moment.split()[1]!r}:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
sys.argv = ["eyas", "generate", "hi"]
from eyas.cli import main
main()
"""
    how: dict[str, Any] = {"preexec_fn": processes.accept_interrupts, "env": processes.environment()}
    done = processes.run([sys.executable, "-c", code], **how)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "eyas: interrupted\n")


BLOCK = """
import sys
from importlib.machinery import PathFinder
class Without:
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {blocked!r} else PathFinder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(PathFinder, name)
sys.meta_path[sys.meta_path.index(PathFinder)] = Without()
{imports}

for arguments in {lines!r}:
    sys.argv = ["eyas", *arguments]
    try:
        main()
    except SystemExit as ended:
        if ended.code:
            raise
"""


def without(
    packages: set[str], *lines: tuple[object, ...], imports: str = "from eyas.cli import main"
) -> subprocess.CompletedProcess[str]:
    """Commands in one process where some packages are not installed; the first that fails ends it."""
    commands = [list(map(str, arguments)) for arguments in lines]
    code = BLOCK.format(blocked=packages, imports=imports, lines=commands)
    return processes.run([sys.executable, "-c", code], env=processes.environment())


@pytest.mark.exhaustive
def test_without_the_library_of_the_command_line() -> None:
    """Guards a GPU machine without a network: `import eyas` and the bench need none of the packages that only the
    command line or pictures need, and `python -m eyas` says in a line which one it lacks."""
    missing, lab = {"cyclopts", "docstring_parser", "rich_rst", "matplotlib"}, ("run", "simulate", "cost")
    imports = f"import eyas, eyas.api, eyas.hardware.machine, {', '.join(f'eyas_lab.bench.{name}' for name in lab)}"
    done = without(missing, imports=imports)
    assert (done.returncode, done.stderr) == (0, "")
    done = without(missing, ("doctor",))
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("eyas: error: the command line needs the package cyclopts: pip install cyclopts")


@pytest.mark.exhaustive
def test_a_command_says_what_to_install(tmp_path: Path) -> None:
    done = without({"fastapi"}, ("serve", "--target", tmp_path / "no model"))
    assert (done.returncode, done.stdout) == (2, "")
    said = "eyas: error: eyas serve needs fastapi: pip install '.[serve]' in a clone of eyas\n"
    assert done.stderr == said


def test_help_does_not_import_torch() -> None:
    """`eyas --help` and `eyas generate --help` took as long as loading a model."""
    pages = ((*name, "--help") for name in ((), ("generate",), ("chat",), ("bench",), ("features",)))
    done = without({"torch", "transformers"}, ("--version",), *pages)
    assert done.returncode == 0, done.stderr


def write(path: Path, *lines: Any) -> Path:
    """Write lines of JSON; a text stands as it is."""
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


@pytest.fixture
def files(tmp_path: Path) -> tuple[object, ...]:
    """A command that answers the lines of in.jsonl into out.jsonl."""
    write(tmp_path / "in.jsonl", {"prompt": "hi"})
    return (*GENERATE, "--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl")


def test_one_process_at_a_time_writes_results(
    run: Run, refused: Run, tmp_path: Path, files: tuple[object, ...]
) -> None:
    """Two runs on one output wrote every line twice, and both ended with status 0."""
    with locked_output(tmp_path / "out.jsonl"):
        assert f"out.jsonl is being written by process {os.getpid()} on " in refused(*files)
    assert (tmp_path / "out.jsonl").read_text() == ""
    assert run(*files).exit_code == 0


def test_results_of_other_prompts_or_settings_are_refused(
    run: Run, refused: Run, tmp_path: Path, files: tuple[object, ...]
) -> None:
    """The answer to another question was returned, without a word."""
    prompts, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    one, two = {"prompt": "one"}, {"prompt": "two", "id": "b"}
    write(prompts, one, two)
    assert run(*files).exit_code == 0
    before = output.read_text()
    for options, words in (
        (("--temperature", 0.5), "temperature 0.0 there, 0.5 now"),
        (("--max-new-tokens", 4, "--stop", "x"), "max_new_tokens 3 there, 4 now; stop [] there, ['x'] now"),
        (("--dtype", "bfloat16"), "dtype float32 there, bfloat16 now"),
    ):
        assert words in refused(*files, *options)
    write(prompts, one, {**two, "prompt": "too"})
    assert "holds the answer to another prompt for id 'b'" in refused(*files)
    write(prompts, {"prompt": "zero"}, one)
    assert "holds the answer to another prompt for line 1" in refused(*files)
    assert output.read_text() == before
    results = [json.loads(line) for line in before.splitlines()]
    write(output, *({k: v for k, v in line.items() if k not in ("prompt_sha256", "settings")} for line in results))
    write(prompts, one, two, {"prompt": "three"})
    assert "2 of 3 are in" in run(*files).stderr, "an earlier version did not say to what its results are the answers"


@pytest.mark.parametrize(
    "line", ['{"prompt_ids": [' + "1" * 5000 + "]}", "[" * 60_000, '{"prompt": "x", "id": ' + "7" * 5000 + "}"]
)
def test_json_that_python_refuses_is_a_bad_line(
    run: Run, refused: Run, tmp_path: Path, line: str, files: tuple[object, ...]
) -> None:
    """Thousands of digits or brackets ended in a traceback, in prompts and in an old output."""
    write(tmp_path / "in.jsonl", line, {"prompt": "hi"})
    result = run(*files[:-2])
    assert (result.exit_code, "in.jsonl:1: JSON " in result.stderr) == (2, True)
    assert [json.loads(out)["line"] for out in result.stdout.splitlines()] == [2]
    write(tmp_path / "out.jsonl", line)
    assert "holds something other than results" in refused(*files)

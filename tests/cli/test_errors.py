"""Errors: each gives one line and a status, and nothing is lost."""

import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import processes
from eyas.cli import _files, generate

Run = Callable[..., Any]
GENERATE = ("generate", "--target", "llama", "--max-new-tokens", 4)
ASK = (*GENERATE, "x")


BAD = {
    "unknown command": (("generat", "x"), ["unknown command 'generat'", "did you mean generate"]),
    "unknown flag": ((*ASK, "--temprature", 1), ["--temprature", "--temperature"]),
    "flag without a value": ((*ASK, "--seed"), ["--seed needs a value"]),
    "no number": ((*ASK, "--top-k", "many"), ["--top-k", "unable to convert 'many' into int"]),
    "unknown method": ((*ASK, "--method", "eagel2"), ["unknown method 'eagel2'", "eagle2"]),
    "no such module": ((*ASK, "--method", "my.method"), ["method 'my.method' cannot be loaded", "No module named 'my'"]),
    "option of another method": ((*ASK, "--draft", "head", "--tree.choices", "chain"),
                                 ["--tree.choices is an option of cascade, ", ", not of the method in use"]),
    "no command": (("--bogus",), ["unknown option '--bogus'; known: accelerate", "tune (see eyas --help)"]),
    "a method that needs a head": ((*ASK, "--method", "eagle2"), ["needs a trained head", "--draft"]),
    "log-probabilities nowhere": ((*ASK, "--logprobs", 1), ["in the JSON object: add --json"]),
    "empty prompt": ((*GENERATE, ""), ["the prompt is empty"]),
    "no prompt": (GENERATE, ["nothing to answer: give one of PROMPT, --prompt-ids, --input"]),
    "two prompts": ((*ASK, "--prompt-ids", "1"), ["give only one of PROMPT and --prompt-ids"]),
    "ids that are words": ((*GENERATE, "--prompt-ids", "1,two"), ["whole numbers separated by commas", "'1,two'"]),
    "prompt too long": ((*GENERATE, "x" * 600), ["the prompt has 602 tokens", "context is 512"]),
    "no such target": (("generate", "--target", "./nowhere", "x"), ["'./nowhere' does not exist"]),
    "no such head": ((*ASK, "--draft", "./nowhere"), ["draft head ./nowhere: there is no such folder"]),
    "no tokenizer": (("generate", "--target", "bare", "x"), ["this target has no tokenizer", "--prompt-ids"]),
    "unknown dtype": ((*ASK, "--dtype", "float7"), ["unknown dtype 'float7'", "bfloat16"]),
    "no input file": ((*GENERATE, "--input", "./nowhere.jsonl"), ["input file './nowhere.jsonl' does not exist"]),
    "output without input": ((*ASK, "--output", "o.jsonl"), ["--output goes with --input"]),
    "system and raw": ((*ASK, "--system", "s", "--raw"), ["--system needs the chat template, which --raw bypasses"]),
    "chat without a template": (("chat", "--target", "bare"), ["no chat template"]),
    "no data": (("train", "--output", "o"), ["option --data (or --features) is missing"]),
    "rounded without kernels": ((*ASK, "--weights", "int8"), ["weights int8 are for the compiled kernels", "there are none"]),
    "rounded features": (("train", "--data", "./nowhere", "--output", "o", "--activations", "int8"), ["--activations int8", "as it is"]),
    "usage": (("generate", "--nope"), ["(see eyas generate --help)"]),
    **{f"method {name!r}": ((*ASK, "--method", name), [f"unknown method {name!r}"]) for name in ("..", "my method")},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(name: str, refused: Run) -> None:
    """Each of these was a traceback, or silently something else, in one library or another."""
    arguments, parts = BAD[name]
    said = refused(*arguments)
    for part in parts:
        assert part in said, said


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"prompt": f"number {i}"}) + "\n" for i in range(4)))
    return tmp_path / "in.jsonl"


@pytest.mark.slow
def test_a_disk_that_fills_up_keeps_whole_lines(
    run: Run, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third result fits only by half: the half must go, and the next run must do it again."""
    output = tmp_path / "o.jsonl"
    arguments = (*GENERATE, "--input", prompts, "--output", output)
    writes: list[int] = []

    class Small(io.FileIO):
        """A file on a disk with room for two and a half results."""

        def write(self, data: Any) -> int:
            writes.append(len(data))
            if len(writes) == 4:
                raise OSError(28, "No space left on device")
            return super().write(data[: len(data) // 2] if len(writes) == 3 else data)

    def opened(path: Any, mode: str, **how: Any) -> Any:
        return Small(path, mode.replace("b", "")) if "a" in mode else open(path, mode, **how)

    with monkeypatch.context() as patch:
        patch.setattr(_files, "open", opened, raising=False)
        result = run(*arguments)
    assert result.exit_code == 2
    assert "no space left on the device" in result.stderr
    assert [json.loads(line)["line"] for line in output.read_text().splitlines()] == [1, 2]
    assert run(*arguments).exit_code == 0
    assert [json.loads(line)["line"] for line in output.read_text().splitlines()] == [1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_stdout_that_is_full_or_closed() -> None:
    """Python's own complaint at its end, and status 120, came instead."""
    command = [sys.executable, "-m", "eyas", "--version"]
    with open("/dev/full", "w") as full:
        done = processes.run(command, stdout=full)
    assert (done.returncode, done.stderr) == (2, "eyas: error: no space left on the device: free some and try again\n")
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        done = processes.run(command, stdout=closed)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_fault_of_ours_is_a_traceback(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not look like the user's mistake: the exception escapes, so Python prints it and exits with 1."""

    def broken(*_: Any) -> None:
        raise FileNotFoundError("not a file that the user named")

    monkeypatch.setattr(generate, "_answer_one", broken)
    result = run(*ASK)
    assert (result.exit_code, type(result.exception)) == (1, FileNotFoundError)


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB. More words.")]
)
def test_out_of_memory_is_one_line(refused: Run, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def greedy(*_: Any) -> None:
        raise error

    monkeypatch.setattr(generate, "_answer_one", greedy)
    assert "out of memory" in refused(*GENERATE, "--method", "vanilla", "x")


@pytest.mark.parametrize("command", ["train", "features"])
@pytest.mark.parametrize("value", ["on", "fixed", "compile"])
def test_kernels_where_features_are_read(command: str, value: str, run: Callable[..., Any], tmp_path: Path) -> None:
    """Bug: `train --kernels compile` and `features --kernels on` read the features by the model's own forward, and say
    nothing. The help does not offer the option."""
    assert "--kernels" not in run(command, "--help-all").stdout
    data = tmp_path / "chats.jsonl"
    data.write_text('{"messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]}\n')
    arguments = [command, "--data", str(data), "--output", str(tmp_path / "out"), "--kernels", value]
    result = run(*arguments, "--method", "eagle3")
    assert result.exit_code == 2
    assert f"--kernels {value}: features are read by the model's own forward" in result.stderr

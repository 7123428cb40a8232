"""Errors: each gives one line and a status, and nothing is lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import processes
import zoo
from eyas import checkpoints
from eyas.cli import _files, generate
from eyas.core.target import Target
from eyas.drafters import eagle1
from eyas.errors import InputError

Run = Callable[..., Any]
GENERATE = ("generate", "--target", "llama", "--max-new-tokens", 4)


# --- what was asked for ----------------------------------------------------------------------------------------------------------------

BAD = {
    "unknown command": (("generat", "x"), ["unknown command 'generat'", "did you mean generate"]),
    "unknown flag": ((*GENERATE, "x", "--temprature", 1), ["--temprature", "--temperature"]),
    "flag without a value": ((*GENERATE, "x", "--seed"), ["--seed needs a value"]),
    "no number": ((*GENERATE, "x", "--top-k", "many"), ["--top-k", "unable to convert 'many' into int"]),
    "unknown method": ((*GENERATE, "x", "--method", "eagel2"), ["unknown method 'eagel2'", "eagle2"]),
    "no such module": (
        (*GENERATE, "x", "--method", "my.method"),
        ["method 'my.method' cannot be loaded", "No module named 'my'"],
    ),
    "an option for training": ((*GENERATE, "x", "--ttt.steps", 3), ["unknown option --ttt.steps"]),
    "option of another method": (
        (*GENERATE, "x", "--draft", "head", "--tree.choices", "chain"),
        ["--tree.choices is an option of eagle1, ", ", not of the method in use"],
    ),
    "an option where a command is expected": (
        ("--bogus",),
        ["unknown option '--bogus'; known: accelerate", "tune (see eyas --help)"],
    ),
    "an unknown user's folder": ((*GENERATE, "x", "--draft", "~no-such-user/head"), ["write the path in full"]),
    "a name that no file can have": ((*GENERATE, "x", "--draft", "head" * 99), ["headhead", "file name too long"]),
    "unknown subcommand": (("datastore", "bogus"), ["(see eyas datastore --help)"]),
    "option of no method": ((*GENERATE, "x", "--tree.nods", 3), ["--tree.nods", "--tree.nodes"]),
    "impossible option": (
        (*GENERATE, "x", "--draft", "head", "--tree.nodes", 0),
        ["tree.nodes must be a whole number, 1 or more, got 0"],
    ),
    "a method that needs a head": ((*GENERATE, "x", "--method", "eagle2"), ["needs a trained head", "--draft"]),
    "a bias without a number": (
        (*GENERATE, "x", "--logit-bias", "7"),
        ["--logit-bias takes a token id and a number", "'7'"],
    ),
    "a bias that is too large": (
        (*GENERATE, "x", "--logit-bias", "7:101"),
        ["the bias of token 7 must be from -100 to 100"],
    ),
    "log-probabilities nowhere": (
        ("generate", "--target", "llama", "x", "--logprobs", 1),
        ["in the JSON object: add --json"],
    ),
    "min_tokens above the length": (
        (*GENERATE, "x", "--max-new-tokens", 4, "--min-tokens", 5),
        ["min_tokens must be from 0 to"],
    ),
    "empty prompt": ((*GENERATE, ""), ["the prompt is empty"]),
    "blank prompt": ((*GENERATE, " \n"), ["the prompt is empty"]),
    "no prompt": (GENERATE, ["nothing to answer: give one of PROMPT, --prompt-ids, --input"]),
    "two prompts": ((*GENERATE, "x", "--prompt-ids", "1"), ["give only one of PROMPT and --prompt-ids"]),
    "no ids": ((*GENERATE, "--prompt-ids", ","), ["the prompt is empty"]),
    "ids that are words": ((*GENERATE, "--prompt-ids", "1,two"), ["whole numbers separated by commas", "'1,two'"]),
    "id outside": ((*GENERATE, "--prompt-ids", "1,160"), ["token id 160 is outside", "vocabulary of 160"]),
    "negative id": ((*GENERATE, "--prompt-ids=-1"), ["token id -1 is outside"]),
    "prompt too long": ((*GENERATE, "x" * 600), ["the prompt has 602 tokens", "context is 512"]),
    "no room": (
        ("generate", "--target", "llama", "x", "--max-new-tokens", 600),
        ["600 new tokens", "at most 509 new tokens"],
    ),
    "no new tokens": (
        ("generate", "--target", "llama", "x", "--max-new-tokens", 0),
        ["max_new_tokens must be a whole number", "got 0"],
    ),
    "negative temperature": ((*GENERATE, "x", "--temperature", -1), ["temperature must be 0 or more, got -1.0"]),
    "NaN temperature": ((*GENERATE, "x", "--temperature", "nan"), ["temperature must be 0 or more, got nan"]),
    "top_p above 1": ((*GENERATE, "x", "--top-p", 1.5), ["top_p must be above 0 and at most 1, got 1.5"]),
    "negative seed": ((*GENERATE, "x", "--seed", -1), ["seed must be a whole number"]),
    "empty stop": ((*GENERATE, "x", "--stop", ""), ["stop string 1 is empty"]),
    "no such target": (("generate", "--target", "./nowhere", "x"), ["'./nowhere' does not exist"]),
    "no such head": ((*GENERATE, "x", "--draft", "./nowhere"), ["draft head ./nowhere: there is no such folder"]),
    "no such tokenizer": ((*GENERATE, "x", "--tokenizer", "./nowhere"), ["tokenizer", "'./nowhere' cannot be loaded"]),
    "no tokenizer": (("generate", "--target", "bare", "x"), ["this target has no tokenizer", "--prompt-ids"]),
    "unknown dtype": ((*GENERATE, "x", "--dtype", "float7"), ["unknown dtype 'float7'", "bfloat16"]),
    "unknown device": ((*GENERATE, "x", "--device", "tpu9"), ["device 'tpu9' cannot be used"]),
    "no input file": ((*GENERATE, "--input", "./nowhere.jsonl"), ["input file './nowhere.jsonl' does not exist"]),
    "a folder as input": ((*GENERATE, "--input", "."), ["input file '.' is a folder"]),
    "output without input": ((*GENERATE, "x", "--output", "o.jsonl"), ["--output goes with --input"]),
    "batch without input": ((*GENERATE, "x", "--batch-size", 2), ["--batch-size goes with --input"]),
    "system and raw": (
        (*GENERATE, "x", "--system", "s", "--raw"),
        ["--system needs the chat template, which --raw bypasses"],
    ),
    "chat without a template": (("chat", "--target", "bare"), ["no chat template"]),
    "no data": (("train", "--output", "o"), ["option --data (or --features) is missing"]),
    "rounded without kernels": (
        (*GENERATE, "x", "--weights", "int8"),
        ["weights int8 are for the compiled kernels", "there are none"],
    ),
    "rounded features": (
        ("train", "--data", "./nowhere", "--output", "o", "--activations", "int8"),
        ["--activations int8", "as it is"],
    ),
    "demo of no prompts": (("demo", "--prompts", "./nowhere.txt"), ["prompts file './nowhere.txt' does not exist"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(name: str, refused: Run) -> None:
    """Each of these was a traceback, or silently something else, in one library or another."""
    arguments, parts = BAD[name]
    said = refused(*arguments)
    for part in parts:
        assert part in said, said


def test_usage_errors_point_to_help(refused: Run) -> None:
    assert refused("generate", "--nope").endswith("(see eyas generate --help)")


# --- heads and targets -----------------------------------------------------------------------------------------------------------------


@pytest.mark.quick("size0-hidden size is 32, the target's 48")
@pytest.mark.parametrize(
    ("size", "words"),
    [
        ({"hidden_size": 32, "head_dim": 8}, "hidden size is 32, the target's 48"),
        ({"vocab_size": 99}, "vocabulary is 99, the target's 160"),
    ],
)
def test_a_head_of_another_size(refused: Run, tmp_path: Path, size: dict[str, int], words: str) -> None:
    checkpoints.save(eagle1.Method.random(Target(zoo.tiny("llama", **size))).weights(), tmp_path)
    assert words in refused(*GENERATE, "x", "--draft", tmp_path)


@pytest.fixture
def head(world: Path, tmp_path: Path) -> Path:
    """A head to be broken."""
    return Path(shutil.copytree(world / "head", tmp_path / "head"))


def test_missing_and_extra_tensors_are_named(refused: Run, head: Path) -> None:
    tensors = load_file(head / "model.safetensors")
    tensors["layers.0.mlp.extra.weight"] = tensors.pop("layers.0.mlp.up_proj.weight")
    tensors["fc.weight"] = tensors["fc.weight"][:, :-1].contiguous()
    save_file(tensors, head / "model.safetensors")
    said = refused(*GENERATE, "x", "--draft", head)
    for part in (
        "missing layers.0.mlp.up_proj.weight",
        "unexpected layers.0.mlp.extra.weight",
        "fc.weight is [48, 95] and should be [48, 96]",
    ):
        assert part in said


@pytest.mark.slow
def test_broken_files_of_a_head(refused: Run, head: Path) -> None:
    weights = head / "model.safetensors"
    whole = weights.read_bytes()
    for broken in (whole[: len(whole) // 2], b"nothing of the kind", b""):
        weights.write_bytes(broken)
        assert "model.safetensors is corrupt or truncated" in refused(*GENERATE, "x", "--draft", head)
    weights.unlink()
    assert "no weights" in refused(*GENERATE, "x", "--draft", head)
    (head / "config.json").unlink()
    assert "no config.json" in refused(*GENERATE, "x", "--draft", head)


def test_broken_files_of_a_target(refused: Run, world: Path, tmp_path: Path) -> None:
    target = Path(shutil.copytree(world / "bare", tmp_path / "target"))
    assert "is a file" in refused("generate", "--target", target / "config.json", "--prompt-ids", "1")
    (target / "config.json").unlink()
    assert "has no config.json" in refused("generate", "--target", target, "--prompt-ids", "1")


def test_truncated_weights_of_a_target(refused: Run, world: Path, tmp_path: Path) -> None:
    target = Path(shutil.copytree(world / "bare", tmp_path / "target"))
    weights = target / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert f"target '{target}' cannot be loaded" in refused("generate", "--target", target, "--prompt-ids", "1")


def test_a_target_that_cannot_be_served(refused: Run, tmp_path: Path) -> None:
    zoo.REFUSED["minimax"]().save_pretrained(tmp_path)
    assert "minimax" in refused("generate", "--target", tmp_path, "--prompt-ids", "1").lower()


@pytest.mark.slow
def test_nan_logits_name_the_layer(refused: Run, tmp_path: Path) -> None:
    model = zoo.FAMILIES["llama"]()
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight[0, 0] = float("nan")
    model.save_pretrained(tmp_path)
    said = refused("generate", "--target", tmp_path, "--prompt-ids", "1,2,3", "--method", "vanilla")
    assert "the target's logits are NaN (after layer 2)" in said


# --- files that cannot be written ------------------------------------------------------------------------------------------------------


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"prompt": f"number {i}"}) + "\n" for i in range(4)))
    return tmp_path / "in.jsonl"


@pytest.mark.slow
def test_output_that_cannot_be_opened(refused: Run, prompts: Path, tmp_path: Path) -> None:
    assert f"the folder '{tmp_path}/none' does not exist" in refused(
        *GENERATE, "--input", prompts, "--output", tmp_path / "none" / "o.jsonl"
    )
    assert "is a folder" in refused(*GENERATE, "--input", prompts, "--output", tmp_path)
    assert "not a directory" in refused(*GENERATE, "--input", prompts, "--output", prompts / "o.jsonl")
    assert "--output would write into" in refused(*GENERATE, "--input", prompts, "--output", prompts)


def test_output_folder_not_writable(
    refused: Run, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulated, because tests may run as root, to whom everything is writable."""

    def denied(path: Any, mode: str = "r", **settings: Any) -> Any:
        if "a" in mode:
            raise PermissionError(13, "Permission denied", str(path))
        return open(path, mode, **settings)

    monkeypatch.setattr(_files, "open", denied, raising=False)
    said = refused(*GENERATE, "--input", prompts, "--output", tmp_path / "o.jsonl")
    assert said == f"eyas: error: output file '{tmp_path}/o.jsonl' cannot be used: permission denied"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_no_space_left(refused: Run, prompts: Path) -> None:
    said = refused(*GENERATE, "--method", "vanilla", "--input", prompts, "--output", "/dev/full")
    assert "no space left on the device" in said
    assert "run the same command again" in said


def test_a_line_of_prompts_is_no_half_result(tmp_path: Path) -> None:
    """Bug: the only line of a file of prompts, which is named as the output by mistake, is cut off as half a result."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"id": "a", "prompt": "x"}')
    with pytest.raises(InputError, match="something other than results"), _files.Results(str(path)):
        pass
    assert path.read_text() == '{"id": "a", "prompt": "x"}'


@pytest.mark.slow
def test_a_disk_that_fills_up_keeps_whole_lines(
    run: Run, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third result fits only by half: the half must go, and the next run must do it again."""
    output = tmp_path / "o.jsonl"
    arguments = (*GENERATE, "--input", prompts, "--output", output)
    real, limit = open, []

    class Small:
        """A file on a disk with room for two and a half results."""

        def __init__(self, file: Any) -> None:
            self.file = file

        def write(self, data: bytes) -> int:
            limit.append(len(data))
            if len(limit) == 3:
                return int(self.file.write(data[: len(data) // 2]))
            if len(limit) == 4:
                raise OSError(28, "No space left on device")
            return int(self.file.write(data))

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *error: object) -> None:
            self.file.close()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

    with monkeypatch.context() as patch:
        patch.setattr(
            _files,
            "open",
            lambda path, mode, **s: Small(real(path, mode, **s)) if "a" in mode else real(path, mode, **s),
            raising=False,
        )
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
    command = [sys.executable, "-m", "eyas", "generate"]
    with open("/dev/full", "w") as full:
        done = processes.run([*command[:3], "--version"], stdout=full)
    assert done.returncode == 2
    assert done.stderr == "eyas: error: no space left on the device: free some and try again\n"
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        done = processes.run([*command[:3], "--version"], stdout=closed)
    assert done.returncode == 1
    assert done.stderr == ""


# --- faults of ours --------------------------------------------------------------------------------------------------------------------


def test_a_fault_of_ours_is_a_traceback(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not look like the user's mistake: the exception escapes, so Python prints it and
    exits with 1."""

    def broken(*_: Any) -> None:
        raise FileNotFoundError("not a file that the user named")

    monkeypatch.setattr(generate, "_answer_one", broken)
    result = run(*GENERATE, "x")
    assert result.exit_code == 1
    assert isinstance(result.exception, FileNotFoundError)


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB. More words.")]
)
def test_out_of_memory_is_one_line(refused: Run, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def greedy(*_: Any) -> None:
        raise error

    monkeypatch.setattr(generate, "_answer_one", greedy)
    assert "out of memory" in refused(*GENERATE, "--method", "vanilla", "x")


@pytest.fixture
def ctrl_c_interrupts() -> Iterator[None]:
    """Python's own handler: background jobs of a shell begin without it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_interrupts")
def test_ctrl_c_during_an_import_is_an_interrupt(capsys: pytest.CaptureFixture[str]) -> None:
    """transformers makes an ImportError of it, and eyas said that a method cannot be loaded."""
    from eyas.cli._errors import exit_status
    from eyas.errors import OptionError

    def command() -> int:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise OptionError("method 'eagle1' cannot be loaded") from ImportError("PreTrainedModel")
        return 0

    assert exit_status(command) == 130
    assert capsys.readouterr().err == "eyas: interrupted\n"


# --- what is installed -------------------------------------------------------------------------------------------------------------------

WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
"""


@pytest.mark.exhaustive
def test_without_the_library_of_the_command_line() -> None:
    """Guards a GPU machine without a network: `import eyas` and the bench need none of the packages
    that only the command line or pictures need, and `python -m eyas` says in a line which one it
    lacks."""
    missing = ("cyclopts", "docstring_parser", "rich_rst", "matplotlib")
    start = WITHOUT.format(missing=missing)
    command = (
        "import eyas, eyas.api, eyas_lab.bench.run, eyas_lab.bench.simulate, eyas_lab.bench.cost, eyas.hardware.machine"
    )
    done = processes.run([sys.executable, "-c", start + command])
    assert (done.returncode, done.stderr) == (0, "")
    done = processes.run([sys.executable, "-c", start + "from eyas.cli import main; sys.argv[1:] = ['doctor']; main()"])
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("eyas: error: the command line needs the package cyclopts: pip install cyclopts")

"""Errors: each gives one line and a status, and nothing is lost."""

import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import processes
import zoo
from eyas import checkpoints, drafters
from eyas.cli import _files, _options, generate
from eyas.core.target import Target
from eyas.drafters import eagle1
from eyas.errors import InputError
from eyas.option_texts import list_options

Run = Callable[..., Any]
GENERATE = ("generate", "--target", "llama", "--max-new-tokens", 4)
ASK = (*GENERATE, "x")


BAD = {
    "unknown command": (("generat", "x"), ["unknown command 'generat'", "did you mean generate"]),
    "unknown flag": ((*ASK, "--temprature", 1), ["--temprature", "--temperature"]),
    "flag without a value": ((*ASK, "--seed"), ["--seed needs a value"]),
    "no number": ((*ASK, "--top-k", "many"), ["--top-k", "unable to convert 'many' into int"]),
    "unknown method": ((*ASK, "--method", "eagel2"), ["unknown method 'eagel2'", "eagle2"]),
    "unknown mode": ((*ASK, "--tree", "atuo"), ["atuo"]),
    "no such module": ((*ASK, "--method", "my.method"), ["method 'my.method' cannot be loaded", "No module named 'my'"]),
    "an option for training": ((*ASK, "--ttt.steps", 3), ["unknown option --ttt.steps"]),
    "option of another method": ((*ASK, "--draft", "head", "--tree.choices", "chain"),
                                 ["--tree.choices is an option of cascade, ", ", not of the method in use"]),
    "no command": (("--bogus",), ["unknown option '--bogus'; known: accelerate", "tune (see eyas --help)"]),
    "an unknown user's folder": ((*ASK, "--draft", "~no-such-user/head"), ["write the path in full"]),
    "a name that no file can have": ((*ASK, "--draft", "head" * 99), ["headhead", "file name too long"]),
    "unknown subcommand": (("datastore", "bogus"), ["(see eyas datastore --help)"]),
    "option of no method": ((*GENERATE, "x", "--tree.nods", 3), ["--tree.nods", "--tree.nodes"]),
    "impossible option": ((*ASK, "--draft", "head", "--tree.nodes", 0), ["tree.nodes must be a whole number, 1 or more, got 0"]),
    "a method that needs a head": ((*ASK, "--method", "eagle2"), ["needs a trained head", "--draft"]),
    "a bias without a number": ((*ASK, "--logit-bias", "7"), ["--logit-bias takes a token id and a number", "'7'"]),
    "a bias that is too large": ((*ASK, "--logit-bias", "7:101"), ["the bias of token 7 must be from -100 to 100"]),
    "log-probabilities nowhere": ((*ASK, "--logprobs", 1), ["in the JSON object: add --json"]),
    "min_tokens above the length": ((*ASK, "--min-tokens", 5), ["min_tokens must be from 0 to"]),
    "empty prompt": ((*GENERATE, ""), ["the prompt is empty"]),
    "blank prompt": ((*GENERATE, " \n"), ["the prompt is empty"]),
    "no prompt": (GENERATE, ["nothing to answer: give one of PROMPT, --prompt-ids, --input"]),
    "two prompts": ((*ASK, "--prompt-ids", "1"), ["give only one of PROMPT and --prompt-ids"]),
    "no ids": ((*GENERATE, "--prompt-ids", ","), ["the prompt is empty"]),
    "ids that are words": ((*GENERATE, "--prompt-ids", "1,two"), ["whole numbers separated by commas", "'1,two'"]),
    "id outside": ((*GENERATE, "--prompt-ids", "1,160"), ["token id 160 is outside", "vocabulary of 160"]),
    "negative id": ((*GENERATE, "--prompt-ids=-1"), ["token id -1 is outside"]),
    "prompt too long": ((*GENERATE, "x" * 600), ["the prompt has 602 tokens", "context is 512"]),
    "no room": ((*ASK, "--max-new-tokens", 600), ["600 new tokens", "at most 509 new tokens"]),
    "no new tokens": ((*ASK, "--max-new-tokens", 0), ["max_new_tokens must be a whole number", "got 0"]),
    "negative temperature": ((*ASK, "--temperature", -1), ["temperature must be 0 or more, got -1.0"]),
    "NaN temperature": ((*ASK, "--temperature", "nan"), ["temperature must be 0 or more, got nan"]),
    "top_p above 1": ((*ASK, "--top-p", 1.5), ["top_p must be above 0 and at most 1, got 1.5"]),
    "negative seed": ((*ASK, "--seed", -1), ["seed must be a whole number"]),
    "empty stop": ((*ASK, "--stop", ""), ["stop string 1 is empty"]),
    "no such target": (("generate", "--target", "./nowhere", "x"), ["'./nowhere' does not exist"]),
    "no such head": ((*ASK, "--draft", "./nowhere"), ["draft head ./nowhere: there is no such folder"]),
    "no such tokenizer": ((*ASK, "--tokenizer", "./nowhere"), ["tokenizer", "'./nowhere' cannot be loaded"]),
    "no tokenizer": (("generate", "--target", "bare", "x"), ["this target has no tokenizer", "--prompt-ids"]),
    "unknown dtype": ((*ASK, "--dtype", "float7"), ["unknown dtype 'float7'", "bfloat16"]),
    "unknown device": ((*ASK, "--device", "tpu9"), ["device 'tpu9' cannot be used"]),
    "no input file": ((*GENERATE, "--input", "./nowhere.jsonl"), ["input file './nowhere.jsonl' does not exist"]),
    "a folder as input": ((*GENERATE, "--input", "."), ["input file '.' is a folder"]),
    "output without input": ((*ASK, "--output", "o.jsonl"), ["--output goes with --input"]),
    "batch without input": ((*ASK, "--batch-size", 2), ["--batch-size goes with --input"]),
    "system and raw": ((*ASK, "--system", "s", "--raw"), ["--system needs the chat template, which --raw bypasses"]),
    "chat without a template": (("chat", "--target", "bare"), ["no chat template"]),
    "no data": (("train", "--output", "o"), ["option --data (or --features) is missing"]),
    "rounded without kernels": ((*ASK, "--weights", "int8"), ["weights int8 are for the compiled kernels", "there are none"]),
    "rounded keys without kernels": ((*ASK, "--kv", "bfloat16"), ["kv bfloat16 are for the compiled kernels", "there are none"]),
    "rounded keys of features": (("train", "--data", "./nowhere", "--output", "o", "--kv", "bfloat16"), ["--kv bfloat16", "as it is"]),
    "rounded features": (("train", "--data", "./nowhere", "--output", "o", "--activations", "int8"), ["--activations int8", "as it is"]),
    "demo of no prompts": (("demo", "--prompts", "./nowhere.txt"), ["prompts file './nowhere.txt' does not exist"]),
    "usage": (("generate", "--nope"), ["(see eyas generate --help)"]),
    **{f"method {name!r}": ((*ASK, "--method", name), [f"unknown method {name!r}"]) for name in (".", "..", "my method", "a..b", "")},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(name: str, refused: Run) -> None:
    """Each of these was a traceback, or silently something else, in one library or another."""
    arguments, parts = BAD[name]
    said = refused(*arguments)
    for part in parts:
        assert part in said, said


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
    assert words in refused(*ASK, "--draft", tmp_path)


@pytest.fixture
def head(world: Path, tmp_path: Path) -> Path:
    """A head to be broken."""
    return Path(shutil.copytree(world / "head", tmp_path / "head"))


def test_missing_and_extra_tensors_are_named(refused: Run, head: Path) -> None:
    tensors = load_file(head / "model.safetensors")
    tensors["layers.0.mlp.extra.weight"] = tensors.pop("layers.0.mlp.up_proj.weight")
    tensors["fc.weight"] = tensors["fc.weight"][:, :-1].contiguous()
    save_file(tensors, head / "model.safetensors")
    said = refused(*ASK, "--draft", head)
    for name in ("missing layers.0.mlp.up_proj.weight", "unexpected layers.0.mlp.extra.weight"):
        assert name in said
    assert "fc.weight is [48, 95] and should be [48, 96]" in said


@pytest.mark.slow
def test_broken_files_of_a_head(refused: Run, head: Path) -> None:
    weights = head / "model.safetensors"
    whole = weights.read_bytes()
    for broken in (whole[: len(whole) // 2], b"nothing of the kind", b""):
        weights.write_bytes(broken)
        assert "model.safetensors is corrupt or truncated" in refused(*ASK, "--draft", head)
    weights.unlink()
    assert "no weights" in refused(*ASK, "--draft", head)
    (head / "config.json").unlink()
    assert "no config.json" in refused(*ASK, "--draft", head)


def test_broken_files_of_a_target(refused: Run, world: Path, tmp_path: Path) -> None:
    target = Path(shutil.copytree(world / "bare", tmp_path / "target"))
    weights = target / "model.safetensors"
    asked = ("generate", "--prompt-ids", "1", "--target")
    assert "is a file" in refused(*asked, target / "config.json")
    weights.write_bytes(weights.read_bytes()[:1000])
    assert f"target '{target}' cannot be loaded" in refused(*asked, target)
    (target / "config.json").unlink()
    assert "has no config.json" in refused(*asked, target)


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


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"prompt": f"number {i}"}) + "\n" for i in range(4)))
    return tmp_path / "in.jsonl"


@pytest.mark.slow
def test_output_that_cannot_be_opened(refused: Run, prompts: Path, tmp_path: Path) -> None:
    for output, words in (
        (tmp_path / "none" / "o.jsonl", f"the folder '{tmp_path}/none' does not exist"),
        (tmp_path, "is a folder"),
        (prompts / "o.jsonl", "not a directory"),
        (prompts, "--output would write into"),
        ("/proc/x", "output file '/proc/x' cannot be created there"),
    ):
        assert words in refused(*GENERATE, "--input", prompts, "--output", output)


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


def test_no_option_of_a_method_has_a_commands_name() -> None:
    """Bug: DSpark's `--stop 0.4`, a threshold, and the stop string `--stop "."` of generate and chat: one of them wins."""
    groups = [kind for kind in vars(_options).values() if isinstance(kind, type) and is_dataclass(kind)]
    taken = {field.name for group in groups for field in fields(group)} - {"tree"}  # --tree auto, and --tree.nodes
    assert {"stop", "kernels", "temperature"} <= taken
    for name in drafters.names():
        assert not taken & {option.name for option in list_options(drafters.find(name).Options)}, name

"""The commands that train heads and compare them: they run, go on where they stopped, and say what is missing."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

import toy_tokenizer
import zoo
from eyas.cli._options import method_options
from eyas.cli.train import command as train_command
from eyas.core.drafter import build_options
from eyas.core.target import Target
from eyas.drafters import find
from eyas.errors import EyasError
from eyas.train.config import TrainConfig
from eyas.train.features import layers_for_training

RUNS = Path(__file__).parents[1] / "runs"
TINY = [
    "--seeds", 1, "--limit", 3, "--max-new-tokens", 8, "--tree", "5/3/2", "--ttt", 2, "--batch-tokens", 64, "--max-length", 48,
    "--heldout-tokens", 100, "--evaluations", 1,
]  # fmt: skip


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of runs/ by its name."""
    monkeypatch.syspath_prepend(str(RUNS))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of eight layers with a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("model")
    zoo.tiny("llama", vocab_size=toy_tokenizer.VOCAB, num_hidden_layers=8, eos_token_id=1).save_pretrained(folder)
    toy_tokenizer.byte_tokenizer().save_pretrained(folder)
    assert len(AutoTokenizer.from_pretrained(folder)) == toy_tokenizer.VOCAB
    return folder


def chats(path: Path, count: int, reply: str) -> Path:
    turns = [[{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": f"{reply} {i}"}] for i in range(count)]
    path.write_text("".join(json.dumps({"messages": [*t, *t]}) + "\n" for t in turns))
    return path


def arguments(model: Path, folder: Path, name: str) -> list[str]:
    places = ["--target", model, "--chats", chats(folder / "eval.jsonl", 6, "it is"), "--work", folder / "work"]
    return [str(part) for part in (*places, "--output", folder / f"{name}.json", *TINY)]


@pytest.mark.parametrize("name", ["ablation", "scaling", "data_source"])
def test_help(name: str, command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the flags, and the command lines that the help begins with."""
    with pytest.raises(SystemExit) as ended:
        command(name).main(["--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert f"python runs/{name}.py --data" in said
    assert "--max-new-tokens" in said


@pytest.mark.slow
def test_ablation(command: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the whole way from chats to figures; that a run stopped after the first head is called partial and goes on to the same figures
    as one that was not stopped; that intervals hold their values; and that another --tokens does not pass unseen.
    """
    ablation, heads, output = command("ablation"), command("_heads"), tmp_path / "ablation.json"
    given = [*arguments(model, tmp_path, "ablation"), "--data", str(chats(tmp_path / "chat.jsonl", 40, "that is"))]
    given += ["--tokens", "300", "--tune", "100", "--rates", "1e-3,1e-2", "--variants", "eagle3; eagle1 net"]
    trained = heads.train_head

    def stopped(*arguments: Any) -> Any:
        if arguments[-1].name == "eagle1_net-seed0":
            raise KeyboardInterrupt
        return trained(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(heads, "train_head", stopped)
        with pytest.raises(KeyboardInterrupt):
            ablation.main(given)
    part = json.loads(output.read_text())
    assert (part["complete"], part["heads_trained"]) == (False, "1 of 2")
    assert "PARTIAL: 1 of 2" in part["caption"]
    ablation.main(given)
    whole = json.loads(output.read_text())
    assert whole["complete"]
    assert whole["kinds"]["eagle3"] == part["kinds"]["eagle3"]
    assert [head["equal_to_plain"] for head in whole["heads"]] == ["3 of 3"] * 2
    assert whole["heads"][0]["tokens"] == whole["heads"][1]["tokens"] >= 300
    assert set(whole["settings"]["tuning"]["eagle3"]["tried"]) == {"0.001", "0.01"}
    value, low, high = whole["kinds"]["eagle3"]["tau"]["tree"]
    assert low <= value <= high
    rows = whole["per_chat"]["eagle3-seed0 chain"]
    assert sum(row[1] for row in rows) / sum(row[2] for row in rows) == pytest.approx(whole["kinds"]["eagle3"]["tau"]["chain"][0], abs=1e-4)
    assert {len(row) for row in rows} == {3 + 2 * heads.CHAIN}
    with pytest.raises(EyasError, match="other numbers of tokens"):
        ablation.main([*given, "--tokens", "200"])


@pytest.mark.slow
def test_scaling(command: Any, model: Path, tmp_path: Path) -> None:
    """Guards nested data and equal steps: every size reads as many steps, of data that hold the smaller ones."""
    given = [*arguments(model, tmp_path, "scaling"), "--data", str(chats(tmp_path / "chat.jsonl", 40, "that is"))]
    command("scaling").main([*given, "--unit", "120", "--sizes", "1,2"])
    found = json.loads((tmp_path / "scaling.json").read_text())
    assert found["complete"]
    assert len({head["steps"] for head in found["heads"]}) == 1
    sizes = found["settings"]["data_tokens"]
    assert 120 <= sizes["1x"] < 240 <= sizes["2x"]
    assert {"eagle2 1x", "eagle2 2x", "eagle3 1x", "eagle3 2x"} == set(found["kinds"])
    assert found["kinds"]["eagle3 2x"]["speedup"]["tree"][0] > 0


@pytest.mark.slow
def test_data_source(command: Any, model: Path, tmp_path: Path) -> None:
    """Guards the pairing: what only one file has is left out, and a conversation that ends early cuts its partner."""
    source = command("data_source")
    fixed, own = chats(tmp_path / "chat.jsonl", 40, "that is"), chats(tmp_path / "own.jsonl", 50, "mine:")
    lines = own.read_text().splitlines()
    short = json.loads(lines[7])
    lines[7] = json.dumps({"messages": short["messages"][:2]})
    own.write_text("\n".join(lines[5:]))
    pairs = source.pairs(fixed, own)
    assert len(pairs) == 35
    assert all([t["content"] for t in a if t["role"] == "user"] == [t["content"] for t in b if t["role"] == "user"] for a, b in pairs)
    assert sorted(len(a) for a, _ in pairs)[:2] == [2, 4]
    given = [*arguments(model, tmp_path, "data_source"), "--data", str(fixed), str(own), "--tokens", "300"]
    source.main(given)
    found = json.loads((tmp_path / "data_source.json").read_text())
    assert found["complete"]
    assert found["settings"]["sources"]["fixed"]["examples"] == found["settings"]["sources"]["regenerated"]["examples"]
    assert set(found["differences"]) == {"regenerated - fixed"}


@pytest.mark.parametrize("read", [["--data", "a.jsonl", "--data", "b.jsonl"], ["--features", "folder"]], ids=["data", "features"])
def test_bench_heads_command_lines(command: Any, read: list[str]) -> None:
    """Guards every stage's `eyas train`: flags that there are, a method with these options that can be trained from the final features."""
    bench_heads, target = command("bench_heads"), Target(zoo.tiny("llama"))
    args, more = bench_heads.parse([*read, "--output", "here", "--tokens", "5000", "--device", "cpu"])
    assert args.stages == list(bench_heads.STAGES)
    for stage in args.stages:
        line = bench_heads.command(stage, args, more)
        assert line[1:4] == ["-m", "eyas", "train"]
        context = train_command.make_context("train", line[4:])
        assert (list(context.params["data"]), context.params["features"]) == ((read[1::2], None) if read[0] == "--data" else ([], read[1]))
        assert (context.params["output"], context.params["device"]) == (str(Path("here", stage)), "cpu")
        config = TrainConfig(**context.meta["Training"])
        assert (config.tokens, config.heldout) == (5000, 0.005 if read[0] == "--data" else 0.05)
        kind = find(context.params["method"])
        assert layers_for_training(target, [(kind, build_options(kind.Options, method_options(context)))]) == (target.num_layers,)


def test_bench_heads_goes_on(command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards that what is done is left alone, that other budgets and interrupted runs are not done, and that a failure ends the command."""
    bench_heads, started, status = command("bench_heads"), list[str](), 0

    def trained(line: list[str]) -> int:
        started.append(Path(line[line.index("--output") + 1]).name)
        return status

    monkeypatch.setattr(bench_heads, "trained", trained)
    for name, step, tokens in (("medusa", 9, 2_000_000), ("hydra", 8, 2_000_000), ("hydra++", 9, 1000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "training.json").write_text(json.dumps({"step": step, "steps": 9, "config": {"tokens": tokens}}))
    given = ["--data", "chat.jsonl", "--output", str(tmp_path), "--stages", "medusa,hydra,hydra++,eagle1-token"]
    bench_heads.main(given)
    assert started == ["hydra", "hydra++", "eagle1-token"]
    assert "medusa: done already" in capsys.readouterr().out
    status = 130
    with pytest.raises(SystemExit) as ended:
        bench_heads.main(given)
    assert ended.value.code == 130
    assert started[3:] == ["hydra"]
    with pytest.raises(EyasError, match=r"unknown stage 'medusaa'; did you mean medusa"):
        bench_heads.main(["--data", "chat.jsonl", "--stages", "medusaa"])


def test_intervals_are_paired(command: Any) -> None:
    """Guards the pairing of differences: heads that differ by a constant on every chat differ by it in every resampling. A false alarm is
    impossible: nothing is drawn but the resampling, which is seeded.
    """
    draw, dice = command("_heads").Resampled(50), np.random.default_rng(1)
    cycles = dice.integers(1, 9, 50).astype(float)
    emitted = cycles * 2 + dice.integers(0, 5, 50)
    value, low, high = draw.difference((emitted, cycles), (emitted + 0.5 * cycles, cycles))
    assert value == low == high == 0.5
    value, low, high = draw.ratio(emitted, cycles)
    assert low < value < high
    assert draw.ratio(cycles * 0, cycles * 0) == [None, None, None]


def test_the_table_of_heads(command: Any) -> None:
    """Guards the count of parameters: EAGLE-1's layer and its fc, without the embeddings that it shares with the target, nor integers."""
    weights = RUNS.parent / "src" / "eyas" / "tiny" / "weights"
    (line,) = (line for line in command("papers").trained([weights]).splitlines() if "EAGLE-1 and EAGLE-2 (shipped)" in line)
    hidden, inner, kv = 384, 1024, 128
    layer = 2 * hidden * hidden + hidden + 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inner + hidden
    assert line.split("|")[2].strip() == f"{layer / 1e6:.2f}M"

"""The commands behind the figures: each has its help, runs in its smallest form, and goes on where
it was stopped."""

from __future__ import annotations

import importlib
import json
import shlex
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig

import processes
import toy_tokenizer
import zoo
from eyas import cli, kernels
from eyas.cli._app import parse
from eyas.core.engine import Decoder, Request
from eyas.core.options import build_options
from eyas.core.target import Target
from eyas.drafters import find
from eyas.errors import EyasError, InputError
from eyas_train.config import TrainConfig
from eyas_train.data import Example, Examples
from eyas_train.features import layers_for_training
from fp8_support import MULTIPLIES

pytestmark = pytest.mark.slow  # processes of their own

RUNS = Path(__file__).parents[1] / "runs"
TINY = shlex.split(
    "--seeds 1 --limit 3 --max-new-tokens 8 --tree 5/3/2 --ttt 2 --batch-tokens 64 --max-length 48 --draft-vocab 12"
)
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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of eight layers with a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("model")
    zoo.tiny("llama", vocab_size=toy_tokenizer.VOCAB, num_hidden_layers=8, eos_token_id=1).save_pretrained(folder)
    toy_tokenizer.byte_tokenizer().save_pretrained(folder)
    assert len(AutoTokenizer.from_pretrained(folder)) == toy_tokenizer.VOCAB
    return folder


def chats(path: Path, count: int, reply: str) -> Path:
    turns = [
        [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": f"{reply} {i}"}]
        for i in range(count)
    ]
    path.write_text("".join(json.dumps({"messages": [*t, *t]}) + "\n" for t in turns))
    return path


def arguments(model: Path, folder: Path, name: str) -> list[str]:
    places = ["--target", model, "--chats", chats(folder / "eval.jsonl", 6, "it is"), "--work", folder / "work"]
    return [str(part) for part in (*places, "--output", folder / f"{name}.json", *TINY)]


@pytest.mark.parametrize("name", SCRIPTS)
def test_help(name: str, command: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards that every script can be imported, has its options, and shows the command line that
    its help begins with."""
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        command(name).main()
    assert ended.value.code == 0
    assert f"python {SCRIPTS[name].relative_to(RUNS.parent)}" in capsys.readouterr().out


def test_bits_are_counted(command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the record: a row for each kind of pass, answers apart; names that do not exist."""
    if not kernels.available():
        pytest.skip("no kernels here")
    bits, output = command("exact_bits"), tmp_path / "bits.json"
    monkeypatch.setenv("EYAS_KERNELS_ISA", "")  # put back afterwards
    monkeypatch.setattr(bits, "MODES", bits.MODES[1:2])
    monkeypatch.setattr(bits, "PASSES", {name: bits.PASSES[name] for name in ("trees", "levels of a tree")})
    given = ["exact_bits", "--isas", "native", "--models", "llama", "--effort", "0.01", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", given)
    bits.main()
    record = json.loads(output.read_text())
    assert [row["pass"] for row in record["rows"]] == ["trees", "levels of a tree", "answers"]
    assert record["sums"]["answers"] == {"compared": 16, "different": 0}
    assert record["sums"]["logits"]["compared"] > 50
    assert record["sums"]["logits"]["different"] == 0
    monkeypatch.setattr(sys, "argv", [*given, "--models", "lama"])
    with pytest.raises(InputError, match="did you mean llama"):
        bits.main()


def test_formats_of_features(command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the record, and that our format notices a changed bit and a cut file."""
    output = tmp_path / "formats.json"
    given = ["feature_formats", "--formats", "safetensors", "--examples", "30", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", given)
    command("feature_formats").main()
    figures = json.loads(output.read_text())["formats"]["safetensors"]
    assert figures["notices_a_changed_bit"]
    assert figures["notices_a_cut_file"]
    assert 4608 < figures["bytes_per_token"] < 4800
    assert all(figures[name] > 0 for name in ("write", "in_order", "random", "random_one_layer"))


def test_first_weights(command: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the record: each head before and after its fit, on examples that the fit did not read."""
    output, data = tmp_path / "first.json", chats(tmp_path / "chat.jsonl", 30, "that is")
    given = [
        "--target",
        str(model),
        "--data",
        str(data),
        "--max-length",
        "64",
        "--heldout",
        "0.3",
        "--layers",
        "0,3,6",
    ]
    script = command("first_weights")
    monkeypatch.setattr(script, "HEADS", {name: script.HEADS[name] for name in ("EAGLE-1", "EAGLE-3")})
    monkeypatch.setattr(sys, "argv", ["first_weights", *given, "--output", str(output)])
    script.main()
    heads = json.loads(output.read_text())["heads"]
    for row in heads.values():
        assert row["new"]["tokens"] == row["fitted"]["tokens"] > 0
        assert row["new"]["loss"] != row["fitted"]["loss"]
        assert "explain" in row["fit"]


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
    """Bug: a table of docs/lab/results.md is edited by hand, or a record changes without it; a picture
    is missing."""
    results = command("results")
    assert results.main(["--check"]) == 0, "run: python runs/results.py"
    pages = "".join((results.DOCS / "lab" / page).read_text(encoding="utf-8") for page in ("results.md", "report.md"))
    for name in results.PICTURES:
        assert f"results/{name}.svg" in pages
        assert (results.RECORDS / f"{name}.svg").read_text(encoding="utf-8").count("<svg") == 1
    for path in results.RECORDS.glob("*.json"):
        json.loads(path.read_text(encoding="utf-8"))
    papers = (results.DOCS / "lab" / "papers.md").read_text(encoding="utf-8")
    assert command("papers").page(results.RECORDS, old=papers) == papers, "run: python runs/papers.py"


@pytest.mark.parametrize("script", ["front_page", "log_index"])
def test_pages_that_scripts_make(script: str, command: Any) -> None:
    """Bug: a record or an entry of the log changes without the README's table, or without the log's index."""
    assert command(script).main(["--check"]) == 0, f"run: python runs/{script}.py"


def test_expected_times_are_those_of_the_page(command: Any) -> None:
    """Bug: the arithmetic changes, and docs/lab/gpu_plan.md keeps its old figures."""
    page = (RUNS.parent / "docs" / "lab" / "gpu_plan.md").read_text(encoding="utf-8")
    assert command("gpu_estimate").table() in page, "run: python runs/gpu_estimate.py"


def test_predictions_are_those_of_the_record(command: Any) -> None:
    """Bug: the arithmetic of `eyas predict` changes, or its record, and docs/guide/predict.md keeps its old figures."""
    check = command("predict_check")
    record = json.loads((RUNS.parent / "docs" / "results" / "predict.json").read_text(encoding="utf-8"))
    assert check.tables(record) in check.PAGE.read_text(encoding="utf-8"), (
        "run: python packages/eyas-lab/runs/predict_check.py --tables"
    )


def test_several_gpus_on_paper(command: Any) -> None:
    """Guards the plan for several GPUs: the page has the table; the split is that of transformers;
    no GPU gets a part of a head; each further GPU is faster, and none by more than its share."""
    parallel = command("gpu_parallel")
    assert parallel.table() in (RUNS.parent / "docs" / "lab" / "gpu_plan.md").read_text(encoding="utf-8"), (
        "run: python runs/gpu_parallel.py"
    )
    split = {name.rpartition(".")[2]: how for name, how in LlamaConfig().base_model_tp_plan.items()}
    columns = dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), "colwise")
    assert split == {**columns, "o_proj": "rowwise", "down_proj": "rowwise"}
    sizes, tokens = parallel.TARGET, parallel.TOKENS
    assert parallel.collectives(sizes, 6) == (2 * 80 + 1, 2 * 80 + 2 + 6 * 3)
    for gpus, more in zip(parallel.GPUS, parallel.GPUS[1:], strict=False):
        assert sizes.kv_heads % more == sizes.heads % more == sizes.inner % more == sizes.vocab % more == 0
        steps = [parallel.plain_step(sizes, count, tokens) for count in (gpus, more)]
        assert 1 < steps[0] / steps[1] < more / gpus


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


def smallest(command: Any, monkeypatch: pytest.MonkeyPatch, output: Path, name: str, *arguments: object) -> Any:
    """The record of a script's run."""
    monkeypatch.setattr(sys, "argv", [f"runs/{name}.py", *map(str, arguments), "--output", str(output)])
    command(name).main()
    record = json.loads(output.read_text())
    assert record["command"].startswith(f"python runs/{name}.py ")
    return record


@pytest.mark.slow
def test_acceptance(command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the whole way from chats to a record with the embedded model: texts are equal,
    intervals hold their values, a second run asks nothing again."""
    held_out = chats(tmp_path / "eval.jsonl", 3, "it is")
    given = ("acceptance", "--chats", held_out, "--limit", 3, "--max-new-tokens", 6)
    record = smallest(command, monkeypatch, tmp_path / "acceptance.json", *given)
    assert set(record["equal_to_vanilla"].values()) == {3}
    value, low, high = record["without_loops"]["eagle2 dynamic tree"]["tau"]
    assert low <= value <= high
    assert len(record["without_loops"]["eagle1 chain"]["n-alpha"]) == 5
    answers = (tmp_path / "acceptance" / "answers.jsonl").read_bytes()
    assert (
        smallest(command, monkeypatch, tmp_path / "acceptance.json", *given)["without_loops"] == record["without_loops"]
    )
    assert (tmp_path / "acceptance" / "answers.jsonl").read_bytes() == answers


@pytest.mark.exhaustive
def test_speed(command: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the bench of `make bench`: every contestant's row, texts equal, plain decoding over
    itself is 1; --table shows a record."""
    output, speed = tmp_path / "speed.json", command("speed")
    speed.main(
        ["--limit", "1", "--max-new-tokens", "4", "--methods", "eagle2", "--parts", "speed", "--output", str(output)]
    )
    record = json.loads(output.read_text())
    assert {"plain", "plain, model's own forward", "eagle2 auto", "random head, auto", "transformers generate"} <= set(
        record["table"]
    )
    assert record["table"]["plain"]["over_plain"] == [1.0, None, None]
    assert {row["equal"] for row in record["table"].values()} == {"1 of 1"}
    speed.main(["--table", str(output)])
    assert "| eagle2 8/4/2 |" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_cost_curves_of_the_bench(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the other half of `make bench`: every target whose passes it times is built; only the
    timing itself is left out."""
    speed, timed = command("speed"), list[Target]()

    def verify_cost(target: Target, context: int = 0, nodes: tuple[int, ...] = (1, 8)) -> list[dict[str, float]]:
        timed.append(target)
        return [{"nodes": n, "ms": 1.0} for n in nodes]

    monkeypatch.setattr(speed, "verify_cost", verify_cost)
    base = speed.eyas.load(method="vanilla")
    curves = speed.costs(base)
    assert {target.runner.name for target in timed} == ({"model", "kernels"} if kernels.available() else {"model"})
    assert timed[1] is base.target
    rounded = {target.runner.weight_format for target in timed if not target.runner.weight_format.exact}
    assert len(rounded) == (kernels.has_avx512_bf16() + 3 * kernels.has_dots() if kernels.available() else 0)
    assert {len(rows) for name, rows in curves.items() if name.endswith("by context")} == {len(speed.CONTEXTS)}


@pytest.mark.exhaustive
def test_long_context(command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the forced text: every method's cycles emit the same text, all but the token of the
    prompt's pass."""
    book = tmp_path / "book.txt"
    book.write_text("It was a dark night, and the wind sang in the chimney of the old house. " * 40)
    given = ("--books", book, "--at", 40, 80, "--new-tokens", 6, "--passages", 1, "--tasks", "continue", "--nodes", 5)
    record = smallest(command, monkeypatch, tmp_path / "long.json", "long_context", *given)
    (row,) = (json.loads(line) for line in (tmp_path / "long.raw.jsonl").read_text().splitlines()[1:])
    assert {sum(emitted) for by_length in row["cycles"].values() for emitted in by_length} == {len(row["text"]) - 1}
    assert len(record["tasks"]["continue"]["all"]["seagle"]["tau"]) == 2


@pytest.mark.slow
def test_draft_cost(command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards SEAGLE's claim in bytes: its cache does not grow with the context, EAGLE-3's does."""
    given = ("--contexts", 600, 1200, "--base", 600, "--rounds", 2, "--cycles", 2, "--trained", 256, "--nodes", 5)
    draft = smallest(command, monkeypatch, tmp_path / "draft.json", "draft_cost", *given)["draft"]
    assert len(set(draft["seagle"]["cache_bytes"])) == 1
    assert draft["eagle3"]["cache_bytes"][0] < draft["eagle3"]["cache_bytes"][1]
    assert draft["seagle"]["cycle_wall_ratio"][0][0] == 1


def test_the_rate_with_the_least_loss_is_taken(
    command: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: heads are compared at the first learning rate, or at the one that is worst for them."""
    ablation, heads, compared = command("ablation"), command("_heads"), list[Any]()
    monkeypatch.setattr(
        heads, "train", lambda head, folder, args: {"losses": [{"loss": 9}, {"loss": abs(head.lr - 2e-3)}]}
    )
    monkeypatch.setattr(heads, "compare", lambda entered, *given, **settings: compared.extend(entered))
    ablation.main(
        [
            *arguments(model, tmp_path, "ablation"),
            "--data",
            "chat.jsonl",
            "--rates",
            "1e-3,2e-3,4e-3",
            "--variants",
            "eagle3",
        ]
    )
    assert [(head.lr, head.tokens, head.seed) for head in compared] == [(2e-3, 300_000, 0)]


@pytest.mark.exhaustive
def test_ablation(command: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the way from chats to figures: heads are trained by `eyas train`, texts are equal, and
    a second run trains nothing again."""
    ablation, heads = command("ablation"), command("_heads")
    given = [*arguments(model, tmp_path, "ablation"), "--data", str(chats(tmp_path / "chat.jsonl", 40, "that is"))]
    given += ["--tokens", "300", "--heldout-tokens", "100", "--rates", "1e-3", "--variants", "eagle3; eagle1 net"]
    assert heads.call([sys.executable, "-c", "raise SystemExit(3)"]) == 3
    # no process that imports torch for each head
    monkeypatch.setattr(heads, "call", lambda line: cli.run(line[line.index("eyas") + 1 :]))
    ablation.main(given)
    record = json.loads((tmp_path / "ablation.json").read_text())
    assert set(record["kinds"]) == {"eagle3", "eagle1 net"}
    assert record["settings"]["tuning"]["eagle3"] == {"lr": 0.001, "tried": {}}
    assert [set(head["equal_to_plain"].values()) for head in record["heads"]] == [{3}, {3}]
    assert list(record["differences"]) == ["eagle1 net - eagle3"]
    monkeypatch.setattr(heads, "call", lambda line: pytest.fail("trained again"))
    ablation.main(given)
    with pytest.raises(EyasError, match="unknown variant 'eagle9'"):
        ablation.main([*given, "--variants", "eagle9"])


def test_data_source(command: Any, tmp_path: Path) -> None:
    """Guards the pairing: what only one file has is left out, and a conversation that ends early
    cuts its partner."""
    source = command("data_source")
    fixed, own = chats(tmp_path / "chat.jsonl", 40, "that is"), chats(tmp_path / "own.jsonl", 50, "mine:")
    lines = own.read_text().splitlines()
    short = json.loads(lines[7])
    lines[7] = json.dumps({"messages": short["messages"][:2]})
    own.write_text("\n".join(lines[5:]))
    pairs = source.pairs(fixed, own)
    assert len(pairs) == 35
    assert all(
        [t["content"] for t in a if t["role"] == "user"] == [t["content"] for t in b if t["role"] == "user"]
        for a, b in pairs
    )
    assert sorted(len(a) for a, _ in pairs)[:2] == [2, 4]


@pytest.mark.cover(read=1)
@pytest.mark.parametrize(
    "read", [["--data", "a.jsonl", "--data", "b.jsonl"], ["--features", "folder"]], ids=["data", "features"]
)
def test_bench_heads_command_lines(command: Any, read: list[str]) -> None:
    """Guards every stage's `eyas train`: flags that there are, a method with these options that can
    be trained from the final features."""
    bench_heads, target = command("bench_heads"), Target(zoo.tiny("llama"))
    args, more = bench_heads.parse([*read, "--output", "here", "--tokens", "5000", "--device", "cpu"])
    assert args.stages == list(bench_heads.STAGES)
    for stage in args.stages:
        line = bench_heads.command(stage, args, more)
        assert line[1:4] == ["-m", "eyas", "train"]
        train = parse(line[3:])[1].arguments
        head, model = train["head"], train["model"]
        assert (list(head.data), head.features) == ((read[1::2], None) if read[0] == "--data" else ([], read[1]))
        assert (head.output, model.device) == (str(Path("here", stage)), "cpu")
        config = TrainConfig(**train["training"])
        assert (config.tokens, config.heldout) == (5000, 0.005 if read[0] == "--data" else 0.05)
        kind = find(head.method)
        assert layers_for_training(target, [(kind, build_options(kind.Options, train["options"]))]) == (
            target.num_layers,
        )


def test_bench_heads_goes_on(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards that what is done is left alone, that other budgets and interrupted runs are not done,
    and that a failure ends the command."""
    bench_heads, started, status = command("bench_heads"), list[str](), 0

    def trained(line: list[str]) -> int:
        started.append(Path(line[line.index("--output") + 1]).name)
        return status

    monkeypatch.setattr(bench_heads, "call", trained)
    for name, step, tokens in (("medusa", 9, 2_000_000), ("hydra", 8, 2_000_000), ("hydra++", 9, 1000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "training.json").write_text(
            json.dumps({"step": step, "steps": 9, "config": {"tokens": tokens}})
        )
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


def test_the_table_of_heads(command: Any) -> None:
    """Guards the count of parameters: EAGLE-1's layer and its fc, without the embeddings that it
    shares with the target, nor integers."""
    weights = RUNS.parent / "tiny" / "eyas_tiny" / "weights"
    (line,) = (
        line for line in command("papers").trained([weights]).splitlines() if "EAGLE-1 and EAGLE-2 (shipped)" in line
    )
    hidden, inner, kv = 384, 1024, 128
    layer = 2 * hidden * hidden + hidden + 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inner + hidden
    assert line.split("|")[2].strip() == f"{layer / 1e6:.2f}M"


# --- runs/gpu.py -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.long
def test_everything_for_a_gpu_runs_in_small(command: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the first minutes on a GPU: every stage runs, on the way of a GPU as far as a CPU can
    go; texts are equal by every runner; each case is in the record; a second run measures nothing
    again."""
    gpu, output = command("gpu"), tmp_path / "gpu.json"
    options = "--device cpu --shape small --contexts 64 --rows 2 --rounds 1 --minutes 30"
    given = [*options.split(), "--output", str(output)]
    with nullcontext() if MULTIPLIES else pytest.raises(EyasError):
        gpu.main(given)
    assert f"left: nothing; failed: {'none' if MULTIPLIES else 'fp8 64 tokens, sampled fp8'}" in capsys.readouterr().out
    content = json.loads(output.read_text())
    plan = gpu.plan_of(gpu.options(given))
    assert {name: list(cases) for name, cases in content["stages"].items()} == {
        s.name: [c.name for c in s.cases] for s in gpu.stages(plan)
    }
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
    assert all(row["error"] < 0.02 for record in content["stages"]["attention"].values() for row in record["rows"])
    with nullcontext() if MULTIPLIES else pytest.raises(EyasError):
        gpu.main(given)
    again = json.loads(output.read_text())
    assert again["stages"] == content["stages"]
    assert "== " not in capsys.readouterr().out, "a case was measured again"


def test_a_run_for_a_gpu_ends_in_time_and_goes_on(
    command: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bugs: the time is over and what was measured is lost; a case that fails ends all others, or
    is never measured again."""
    gpu, lab = command("gpu"), command("_gpu_lab")
    calls = list[str]()

    def case(name: str, seconds: float = 0.0, error: Exception | None = None) -> Any:
        def run(bench: Any) -> dict[str, Any]:
            calls.append(name)
            if error is not None:
                raise error
            return {"rows": [{"name": name}]}

        return command("_gpu_stages").Case(name, run, seconds)

    def measured(cases: list[Any], minutes: float = 5.0, retry: bool = False) -> Any:
        results = lab.Results(tmp_path / "record.json", {"command": "x"})
        if retry:
            results.forget_failures()
        bench = gpu.Bench(lab.Lab(torch.device("cpu"), lab.SMALL), results)
        gpu.measure([gpu.Stage("stage", "", cases)], bench, lab.Clock(minutes, time.time()), 1.0)

    broken = case("b", error=RuntimeError("no such kernel"))
    with pytest.raises(lab.OutOfTime):
        measured([case("a"), broken, case("c"), case("d", seconds=1000)])
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
    gpu, lab = command("gpu"), command("_gpu_lab")

    def endless() -> None:
        while True:
            try:
                sum(range(1000))
            except lab.OutOfTime:  # as a library would that takes every exception for its own
                break
        while True:
            sum(range(1000))

    with pytest.raises(lab.OutOfTime), gpu.interrupted_after(0.2):
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
    """Guards a machine that has torch and transformers and cannot install anything: no package of
    the command line or of pictures."""
    missing = ("cyclopts", "docstring_parser", "rich_rst", "matplotlib")
    code = WITHOUT.format(missing=missing, runs=str(RUNS)) + "import gpu, gpu_counts; gpu.stages(gpu.FULL); print('ok')"
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

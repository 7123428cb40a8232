"""`eyas generate`: one prompt and files of them."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

KEYS = {
    "token_ids", "text", "finish_reason", "cycles", "accepted_lengths", "tau", "seconds", "prefill_seconds", "tokens_per_second", "method",
    "target", "draft", "tree", "policy", "decisions", "predicted_tokens", "dtype", "device", "runs_by", "weights", "activations",
    "kv", "versions",
}  # fmt: skip
TREE = ("--tree.nodes", 6, "--tree.depth", 3, "--tree.branch", 2)
GENERATE = ("generate", "--target", "llama")
Run = Callable[..., Any]


# --- one prompt ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_json_is_the_python_interface(answer: Run, world: Path) -> None:
    """Other programs read this object; a renamed key breaks them silently. The command adds a stream up by itself; it
    must come to the same result as LLM.generate."""
    import eyas

    tree = {"nodes": 6, "depth": 3, "branch": 2, "noise": "coupled"}
    llm = eyas.load(world / "llama", world / "head", tree=tree)
    sampled = answer("hello", "--draft", "head", *TREE, "--temperature", 0.9, "--seed", 5)["token_ids"]
    assert tuple(sampled) == llm.generate("hello", max_new_tokens=24, temperature=0.9, seed=5).token_ids
    made, found = llm.generate("hello", max_new_tokens=24), answer("hello", "--draft", "head", *TREE)
    assert set(found) == KEYS
    assert (tuple(found["token_ids"]), found["text"]) == (made.token_ids, made.text)
    assert tuple(found["accepted_lengths"]) == made.stats.accepted_lengths
    assert (found["method"], found["target"], found["draft"]) == ("eagle2", str(world / "llama"), str(world / "head"))
    assert found["tree"] == {"kind": "dynamic", **tree}
    assert (found["dtype"], found["device"], found["finish_reason"]) == ("float32", "cpu", "length")
    assert {"eyas", "python", "torch", "transformers"} <= set(found["versions"])
    assert len(found["token_ids"]) == 24 == 1 + sum(found["accepted_lengths"]) + found["cycles"]
    assert found["tau"] == pytest.approx(23 / found["cycles"])
    assert 0 < found["prefill_seconds"] < found["seconds"]
    assert found["tokens_per_second"] == pytest.approx(23 / (found["seconds"] - found["prefill_seconds"]))


def test_laws_and_log_probabilities(answer: Run, world: Path) -> None:
    """Guards the way of each option to the engine, and the form of log-probabilities in JSON."""
    import eyas

    llm = eyas.load(world / "llama", method="vanilla")
    flags = ("--presence-penalty", 1.5, "--frequency-penalty", 0.5, "--logit-bias", "7:9", "--logit-bias", "9:-100",
             "--min-tokens", 5, "--stop-token-id", 7)  # fmt: skip
    told = answer("hello", "--method", "vanilla", *flags, "--logprobs", 2, "--prompt-logprobs", 0)
    laws = {"presence_penalty": 1.5, "frequency_penalty": 0.5, "logit_bias": {7: 9, 9: -100}, "min_tokens": 5,
            "stop_token_ids": [7]}  # fmt: skip
    made = llm.generate("hello", max_new_tokens=24, logprobs=2, prompt_logprobs=0, **laws)
    assert (tuple(told["token_ids"]), told["finish_reason"]) == (made.token_ids, made.finish_reason)
    entries = [{"token": e.token, "logprob": e.logprob, "top": [list(p) for p in e.top]} for e in made.logprobs or ()]
    assert told["logprobs"] == entries
    assert [entry and entry["token"] for entry in told["prompt_logprobs"]] == [None, *llm.ids("hello")[1:]]
    assert set(told) == KEYS | {"logprobs", "prompt_logprobs"}


@pytest.mark.slow
def test_text_is_streamed_and_the_summary_goes_to_stderr(run: Run, answer: Run) -> None:
    """Without a draft stderr says so, unless a method is named; a prompt may come from stdin."""
    said = answer("hello", "--draft", "head")["text"]
    result = run(*GENERATE, "--draft", "head", "--max-new-tokens", 24, "hello")
    assert (result.exit_code, result.stdout) == (0, said + "\n")
    summary = r"eyas: 24 tokens in [\d.]+ s \([\d.]+ tokens/s\), tau 1.\d\d, eagle2, cut at the length asked for\n"
    assert re.fullmatch(summary, result.stderr)
    copied = run(*GENERATE, "--max-new-tokens", 2, "hello").stderr
    assert "no --draft: drafts are copied from the text so far (suffix)" in copied
    assert run(*GENERATE, "--max-new-tokens", 2, "--method", "vanilla", "x").stderr.count("\n") == 1
    off = run(*GENERATE, "--max-new-tokens", 4, "--drafting", "off", "--ignore-eos", "x").stderr
    assert re.fullmatch(r"eyas: 4 tokens .*, tau 1.00, no drafts, cut at the length asked for\n", off)
    assert answer("-", stdin="hello")["text"] == said


@pytest.mark.slow
def test_a_first_measurement_is_announced(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards against a silent wait of some seconds; and against saying so each time, or where
    nothing is measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ask = ("generate", "--target", "llama", "--draft", "head", "--max-new-tokens", 4, "hello")
    assert "measuring passes and drafts" not in run(*ask, "--tree", "fixed").stderr
    assert ["measuring passes and drafts" in run(*ask).stderr for _ in range(2)] == [True, False]


@pytest.mark.slow
def test_options_of_prompts_and_ends(answer: Run, world: Path, run: Run) -> None:
    """Guards --system, --raw, --tokenizer, --stop, --ignore-eos and --repetition-penalty, each by its effect."""
    whole = answer("hello", "--ignore-eos", "--max-new-tokens", 40)
    assert len(whole["token_ids"]) == 40
    plain = whole["token_ids"][:24]
    for flags in (("--system", "be brief"), ("--raw",), ("--repetition-penalty", 5)):
        assert answer("hello", *flags)["token_ids"] != plain
    other = run(
        "generate", "--target", "bare", "--tokenizer", world / "llama", "hello", "--max-new-tokens", 24, "--json"
    )
    assert json.loads(other.stdout)["token_ids"] == answer("hello")["token_ids"]
    stop = whole["text"][3]
    cut = answer("hello", "--ignore-eos", "--max-new-tokens", 40, "--stop", stop, "--stop", "never there")
    assert (cut["finish_reason"], cut["text"]) == ("stop", whole["text"][: whole["text"].index(stop)])


# --- many prompts ----------------------------------------------------------------------------------------------------------------------

LINES = [
    {"prompt": "one", "id": "a"},
    {"messages": [{"role": "user", "content": "two"}]},
    {"prompt_ids": [1, 20, 30], "id": 7},
    {"prompt": "four", "answer": "a key of the user's own"},
]


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def key(result: dict[str, Any]) -> Any:
    return result.get("id", result.get("line"))


@pytest.mark.cover(batch=1)
@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 3])
def test_a_file_of_prompts(run: Run, answer: Run, tmp_path: Path, batch: int) -> None:
    output, given = tmp_path / "out.jsonl", write(tmp_path / "in.jsonl", [*LINES, ""])
    files = ("--batch-size", batch, "--input", given, "--output", output, "--json")
    result = run(*GENERATE, "--draft", "head", *TREE, "--max-new-tokens", 12, *files)
    assert result.exit_code == 0, result.output
    found = {key(line): line for line in results(output)}
    assert set(found) == {"a", 2, 7, 4}
    assert all(set(line) - {"id", "line"} == KEYS | {"prompt_sha256", "settings"} for line in found.values())
    if batch == 1:
        assert list(found) == ["a", 2, 7, 4]
    for name, prompt in (("a", ("one",)), (2, ("two",)), (4, ("four",)), (7, ("--prompt-ids", "1,20,30"))):
        assert found[name]["token_ids"] == answer(*prompt, "--max-new-tokens", 12)["token_ids"]
    summary = json.loads(result.stdout)
    assert (summary["results"], summary["skipped"], summary["bad"], summary["tokens"]) == (4, 0, 0, 48)
    listed = run(*GENERATE, "--max-new-tokens", 3, "--input", "-", stdin='{"prompt": "a"}\n{"prompt": "b"}\n')
    assert [json.loads(line)["line"] for line in listed.stdout.splitlines()] == [1, 2]


@pytest.mark.slow
def test_lines_with_tools(run: Run, world: Path, tmp_path: Path) -> None:
    """Guards against tools of a line that are dropped: the prompt is the server's. A changed list is
    another prompt, and a template without a place for tools refuses them."""
    from transformers import AutoTokenizer

    from eyas.text import render

    target, tools = tmp_path / "target", [{"type": "function", "function": {"name": "now"}}]
    shutil.copytree(world / "llama", target)
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.chat_template = "{% if tools %}{{ tools | tojson }}{% endif %}" + str(tokenizer.chat_template)
    tokenizer.save_pretrained(target)
    asked = {"messages": [{"role": "user", "content": "hello"}], "tools": tools}
    given, output = write(tmp_path / "in.jsonl", [asked]), tmp_path / "out.jsonl"
    command = ("generate", "--max-new-tokens", 2, "--prompt-logprobs", 0, "--input", given)
    assert run(*command, "--target", target, "--output", output).exit_code == 0
    (found,) = results(output)
    assert len(found["prompt_logprobs"]) == len(render(tokenizer, asked["messages"], tools=tools))
    write(given, [{**asked, "tools": [{"type": "function", "function": {"name": "then"}}]}])
    assert "another prompt" in run(*command, "--target", target, "--output", output).stderr
    assert "no place for tools" in run(*command, "--target", "llama").stderr


@pytest.mark.slow
def test_resuming_does_not_repeat(run: Run, tmp_path: Path) -> None:
    """Lines that are there stay, byte for byte; half a line is done again; new lines are added; other settings are noted."""
    given, output = write(tmp_path / "in.jsonl", LINES), tmp_path / "out.jsonl"
    command = (*GENERATE, "--max-new-tokens", 4, "--input", given, "--output", output)
    assert run(*command).exit_code == 0
    whole = output.read_text()
    first_two = "".join(line + "\n" for line in whole.splitlines()[:2])
    output.write_text(first_two + whole.splitlines()[2][:57])
    result = run(*command)
    assert (result.exit_code, "2 of 4 are in" in result.stderr) == (0, True)
    assert output.read_text().startswith(first_two)
    assert [key(line) for line in results(output)] == ["a", 2, 7, 4]
    write(given, [*LINES, {"prompt": "five"}])
    assert run(*command).exit_code == 0
    assert [key(line) for line in results(output)] == ["a", 2, 7, 4, 5]
    before = output.read_text()
    assert run(*command).exit_code == 0
    assert output.read_text() == before
    write(given, [*LINES, {"prompt": "five"}, {"prompt": "six"}])
    assert "were made with method suffix" in run(*command, "--draft", "head").stderr
    output.write_text(output.read_text().replace('"weights": "exact"', '"weights": "int4"', 1))
    write(given, [*LINES, {"prompt": "five"}, {"prompt": "six"}, {"prompt": "seven"}])
    assert "weights int4 there, exact now" in run(*command).stderr


def test_bad_lines_are_named_and_the_run_goes_on(run: Run, tmp_path: Path) -> None:
    bad = {
        2: ("{not json", "not JSON"),
        3: ("[1]", "not a JSON object"),
        4: ({"promt": "x"}, "did you mean prompt"),
        5: ({"prompt": "x", "prompt_ids": [1]}, "both prompt and prompt_ids"),
        6: ({"prompt": 3}, "prompt must be a string"),
        7: ({"prompt": " "}, "empty"),
        8: ({"prompt_ids": [1, 160]}, "token id 160 is outside the target's vocabulary of 160"),
        9: ({"messages": [{"role": "usr", "content": "x"}]}, "unknown role 'usr'; did you mean user?"),
        10: ({"prompt": "x" * 600}, "the target's context is 512"),
        11: ({"prompt": "x", "id": [1]}, "the id must be"),
        12: ({"prompt": "x", "id": "a"}, "is on line 1 already"),
        13: ({"prompt_ids": "1,2"}, "prompt_ids must be a list"),
        14: ({"messages": []}, "messages must be a list"),
        15: ({"prompt": "half a pair \ud800"}, "not valid Unicode"),
    }
    given = write(tmp_path / "in.jsonl", [LINES[0], *(line for line, _ in bad.values()), LINES[3]])
    output = tmp_path / "out.jsonl"
    result = run(*GENERATE, "--max-new-tokens", 2, "--input", given, "--output", output)
    assert result.exit_code == 2
    assert [key(line) for line in results(output)] == ["a", 16]
    said = {int(line.split(":")[3]): line for line in result.stderr.splitlines() if line.startswith("eyas: error: ")}
    assert set(said) == set(bad)
    for number, (_, reason) in bad.items():
        assert reason in said[number], said[number]
    assert "2 results, 14 bad" in result.stderr


@pytest.mark.slow
def test_a_file_of_something_else_is_not_touched(refused: Run, tmp_path: Path) -> None:
    """A user who names the wrong file as --output must not lose it."""
    given = write(tmp_path / "in.jsonl", LINES)
    for content in ("my diary\n", "my diary, no newline", '{"prompt": "x"}\n', '{"line": 1}\n'):
        precious = tmp_path / "precious.txt"
        precious.write_text(content)
        assert "holds something other than results" in refused(*GENERATE, "--input", given, "--output", precious)
        assert precious.read_text() == content


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the fifth cycle."""
    from eyas.core.engine import Decoder

    step, calls = Decoder.step, []

    def stopped(self: Decoder) -> Any:
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Decoder, "step", stopped)


@pytest.mark.usefixtures("interrupted")
@pytest.mark.parametrize("more", [(), ("--json",)])
def test_interrupt_keeps_what_was_said(run: Run, more: tuple[str, ...]) -> None:
    """The text so far is on stdout, and status and stderr say that it is not all."""
    result = run(*GENERATE, "--method", "vanilla", "--ignore-eos", "hello", *more)
    assert result.exit_code == 130
    if more:
        found = json.loads(result.stdout.splitlines()[-1])
        assert (len(found["token_ids"]), found["finish_reason"]) == (5, "interrupted")
    else:  # tokens are characters; the first cycle comes with the prompt's own token
        assert len(result.stdout) == len("five!\n")
        assert result.stderr.splitlines()[-1] == "eyas: interrupted: 5 tokens are above"


@pytest.mark.usefixtures("interrupted")
def test_interrupt_keeps_results(run: Run, tmp_path: Path) -> None:
    """Ctrl-C in the middle of a file: whole lines stay, and the message says how to go on."""
    given, output = write(tmp_path / "in.jsonl", LINES), tmp_path / "out.jsonl"
    result = run(*GENERATE, "--method", "vanilla", "--max-new-tokens", 3, "--input", given, "--output", output)
    assert result.exit_code == 130
    kept = results(output)
    assert 1 <= len(kept) < len(LINES)
    said = f"eyas: interrupted: {len(kept)} results are in {output}; the same command goes on after them"
    assert result.stderr.splitlines()[-1] == said


# --- the page of one answer ------------------------------------------------------------------------------------------------------------


def viewed(run: Run, file: Path, *arguments: object) -> tuple[dict[str, Any], Any]:
    """The data of the page that the command writes, and its result."""
    result = run("generate", *arguments, "--view", file)
    assert result.exit_code == 0, result.output
    pattern = r'<script type="application/json" id="data">(.*?)</script>'
    return json.loads(re.findall(pattern, file.read_text(encoding="utf-8"))[0]), result


@pytest.mark.slow
def test_view_shows_every_cycle(run: Run, tmp_path: Path) -> None:
    """The file holds the same answer as stdout, and a tree for each cycle, whose accepted tokens
    are the answer's. Without a tokenizer, token ids are shown as numbers."""
    file = tmp_path / "view.html"
    data, result = viewed(run, file, "--target", "llama", "--draft", "head", *TREE, "--max-new-tokens", 24, "hello")
    tokens = [token for cycle in data["cycles"] for token in cycle["tokens"]]
    assert (data["prompt"], len(tokens)) == ("hello", 24)
    assert "".join(token["text"] for token in tokens) == data["text"] == result.stdout.removesuffix("\n")
    assert [cycle["prefill"] for cycle in data["cycles"]] == [True] + [False] * (len(data["cycles"]) - 1)
    for cycle in data["cycles"][1:]:
        nodes = cycle["nodes"]
        assert len(nodes) == TREE[1]
        assert all(nodes[t["node"]]["token"] == t["token"] for t in cycle["tokens"] if t["node"] is not None)
    assert data["cycles"][-1]["tau_so_far"] == pytest.approx(data["tau"])
    assert str(file) in result.stderr
    data, result = viewed(run, file, "--target", "bare", "--prompt-ids", "5,6,7", "--max-new-tokens", 4)
    shown = "".join(token["text"] for cycle in data["cycles"] for token in cycle["tokens"])
    assert (data["prompt"], data["text"]) == ("5, 6, 7", None)
    assert shown.split() == result.stdout.strip().split(",")


@pytest.mark.slow
def test_a_head_learns_and_is_saved(answer: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """Bugs: the options do not reach the learner; the text changes; the head that was saved cannot be used."""
    plain = answer("hello", "--draft", "head", "--tree", "fixed")
    saved = tmp_path / "saved"
    learning = ("--adapt", "--adapt-percent", 1e9, "--adapt-save", saved)
    assert answer("hello", "--draft", "head", "--tree", "fixed", *learning)["token_ids"] == plain["token_ids"]
    assert json.loads((saved / "adapt.json").read_text())["steps"] > 0
    again = answer("hello", "--draft", saved, "--tree", "fixed")
    assert (again["method"], again["token_ids"]) == ("eagle2", plain["token_ids"])

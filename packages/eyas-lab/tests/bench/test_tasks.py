"""Tasks: formats seen by content, parts and limits, broken lines, the hub, the bundled prompts, the user's own."""

from __future__ import annotations

import gzip
import itertools
import json
import sys
import tomllib
import types
import warnings
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from eyas import tiny
from eyas.errors import InputError, OptionError
from eyas_lab.bench.tasks import Prompt, load, read_prompts
from eyas_lab.bench.tasks._sources import BUNDLED, TASKS

ROOT = Path(__file__).resolve().parents[4]
LAB = ROOT / "packages" / "eyas-lab"
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
OTHERS = ("translation", "summarization", "qa", "math_reasoning", "rag")


def write(path: Path, *records: Any) -> Path:
    """Lines, packed if the name says so; a record that is a string stands as it is."""
    text = "".join(f"{record if isinstance(record, str) else json.dumps(record)}\n" for record in records)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def spec_bench(path: Path, each: int = 8) -> Path:
    """A file in Spec-Bench's form: `each` questions of each category, MT-bench's with two turns."""
    return write(path, *(
        {"question_id": 100 * c + k, "category": name, "turns": [f"{name} {k}", "And why?"][: 1 + (name in MT_BENCH)]}
        for c, name in enumerate((*MT_BENCH, *OTHERS)) for k in range(each // 8 if name in MT_BENCH else each)
    ))  # fmt: skip


def test_speed_bench_is_read_as_its_authors_prepare_it(tmp_path: Path) -> None:
    """Bug: the turns of its messages are asked at once; a text that was never fetched is asked; the kinds of the
    qualitative part, or the lengths and kinds of the others, are one task."""
    missing = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
    turns = ("Write a loop.", "And now in C.")
    messages = [{"role": "user", "content": text} for text in turns]
    write(
        tmp_path / "qualitative.jsonl",
        {"question_id": "a1", "category": "coding", "messages": messages, "multiturn": True},
        {"question_id": "a2", "category": "rag", "turns": ["Read this: ..."]},
        {"question_id": "a3", "category": "math", "turns": [f"{missing}\n\n{{question}}"]},
    )
    kinds = ("mixed", "low_entropy")
    long = write(
        tmp_path / "throughput_8k.jsonl", *({"question_id": k, "category": k, "turns": ["x " * 9]} for k in kinds)
    )
    with pytest.warns(UserWarning, match=r":3: its text is not in the file: fetch it with SPEED-Bench's prepare.py"):
        prompts = load(f"speed_bench:{tmp_path}")
    assert prompts[0] == Prompt("speed_bench/coding/a1", "speed_bench/coding", turns, max_new_tokens=1024)
    assert [prompt.task for prompt in prompts] == ["speed_bench/coding", "speed_bench/rag"]
    assert [p.task for p in load(f"speed_bench:{long}")] == [f"speed_bench/throughput_8k_{kind}" for kind in kinds]
    with pytest.warns(UserWarning, match="its text is not in the file"):
        assert [prompt.id for prompt in load(f"speed_bench/rag:{tmp_path}")] == ["speed_bench/rag/a2"]


@pytest.mark.parametrize(
    ("record", "name", "turns"),
    [
        ({"question_id": 81, "category": "writing", "turns": ["a", "b"]}, "81", ("a", "b")),
        ({"prompt": ["a", "b"], "prompt_id": 5}, "5", ("a", "b")),
        ({"question": "How many?", "answer": "#### 4"}, "1", ("How many?",)),
        ({"question_text": "who sang it", "annotations": []}, "1", ("who sang it",)),
        ({"task_id": "HumanEval/7", "prompt": "def f():\n", "canonical_solution": "    pass"}, "7", ("def f():\n",)),
        ({"instruction": "Sort.", "input": "b a", "output": "a b"}, "1", ("Sort.\n\nb a",)),
        ({"instruction": "Sing.", "input": "", "output": "la"}, "1", ("Sing.",)),
        ({"article": "It rained.", "id": "x9"}, "x9", ("Summarize: It rained.",)),
    ],
    ids=["turns", "prompts", "question", "question_text", "humaneval", "alpaca", "alpaca without input", "cnn_dm"],
)
def test_a_format_is_seen_by_its_keys(
    tmp_path: Path, record: dict[str, Any], name: str, turns: tuple[str, ...]
) -> None:
    """Bug: the name of a task decides how a line is read, and gsm8k in EAGLE's form is refused; or
    HumanEval goes through a template."""
    expected = Prompt(f"gsm8k/{name}", "gsm8k", turns, max_new_tokens=512, raw="task_id" in record)
    assert load(f"gsm8k:{write(tmp_path / 'x.jsonl', record)}") == [expected]


def test_an_array_and_a_packed_file_are_read_like_lines(tmp_path: Path) -> None:
    """Bug: alpaca_data.json, one JSON array, is one broken line; or .gz is told by its name only."""
    records = [{"instruction": "Sing."}, {"instruction": "Dance."}]
    (tmp_path / "array.json").write_text(json.dumps(records, indent=1))
    packed = write(tmp_path / "lines.jsonl.gz", *records)
    assert load(f"alpaca:{tmp_path / 'array.json'}") == load(f"alpaca:{packed}") != []


def test_chat_data_is_asked_up_to_its_longest_reply(tmp_path: Path) -> None:
    """Bug: the reply that the model is to write stands in its prompt; or a chat that ends with a
    question loses that question."""
    said = ["Hi", "Hello!", "A story?", "Once upon a time.", "Bye", "Bye!"]
    chat = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
    old = [{"from": ("human", "gpt")[i % 2], "value": text} for i, text in enumerate(said[:3])]
    first, second = load(f"chats:{write(tmp_path / 'x.jsonl', {'messages': chat}, {'conversations': old})}")
    assert first.turns == second.turns == ()
    assert first.messages == second.messages == tuple(chat[:3])


def test_spec_bench_has_six_tasks_and_mt_bench_is_one_of_them(tmp_path: Path) -> None:
    """Bug: MT-bench's eight categories become eight tasks beside Spec-Bench's five; or mt_bench:
    takes the other five too."""
    path = spec_bench(tmp_path / "question.jsonl")
    tasks = Counter(prompt.task for prompt in load(f"spec_bench:{path}"))
    assert tasks == {f"spec_bench/{task}": 8 for task in ("mt_bench", *OTHERS)}
    alone = load(f"mt_bench:{path}")
    assert len(alone) == 8
    assert all(prompt.task == "mt_bench" and len(prompt.turns) == 2 for prompt in alone)
    assert [prompt.id for prompt in alone] == [f"mt_bench/{100 * c}" for c in range(8)]
    assert [p.id for p in load(f"spec_bench/rag:{path}")] == [f"spec_bench/rag/{1200 + k}" for k in range(8)]


def test_a_folder_is_its_question_file_or_those_of_its_folders(tmp_path: Path) -> None:
    """Bug: MT-bench's reference answers, which lie beside its questions, are asked too; or one
    folder of six is all that is read."""
    for name in ("sum", "qa"):
        write(tmp_path / "eagle" / name / "question.jsonl", {"question_id": 1, "category": "x", "turns": [name]})
        write(tmp_path / "eagle" / name / "answers.jsonl", {"question_id": 1, "turns": ["an answer"]})
    prompts = load(f"eagle:{tmp_path / 'eagle'}")
    assert [(p.task, p.id, p.turns[0]) for p in prompts] == [(f"eagle/{n}", f"eagle/{n}/1", n) for n in ("qa", "sum")]
    assert [p.task for p in load(f"eagle:{tmp_path / 'eagle' / 'qa'}")] == ["eagle/qa"]
    for name in ("one", "two"):
        write(tmp_path / "both" / f"{name}.jsonl", {"question": "x"})
    with pytest.raises(InputError, match=r"holds one\.jsonl, two\.jsonl: name one"):
        load(f"gsm8k:{tmp_path / 'both'}")


def test_passages_have_their_length_and_come_from_every_book(tmp_path: Path) -> None:
    """Bug: a length counts the request's own words, passages overlap, one book fills them all, or a
    book that is too short ends the run."""
    for name, count in (("a", 9000), ("b", 4000), ("short", 60)):
        words = [f"{name}{i}" for i in range(count)]
        paragraphs = [" ".join(words[k : k + 37]) for k in range(0, count, 37)]
        (tmp_path / f"{name}.txt").write_bytes("\r\n\r\n".join(paragraphs).encode())
    with pytest.warns(UserWarning, match="short has 60 words, fewer than 400"):
        prompts = load(f"long:{tmp_path}@50+400", seed=3)
    assert Counter(p.task for p in prompts) == {"long/50": 8, "long/400": 8}
    assert len({p.id for p in prompts}) == 16
    for prompt in prompts:
        ask, _, passage = prompt.turns[0].partition("\n\n")
        words = passage.split()
        assert ask.startswith("Summarize")
        assert "\r" not in passage
        assert len(words) == int(prompt.task.partition("/")[2])
        assert prompt.id == f"{prompt.task}/{words[0].rstrip('0123456789')}-{words[0].lstrip('abhorst')}"
    ours = [p.turns[0].split()[8:] for p in prompts if p.id.startswith("long/400/b-")]
    assert len(ours) == 4
    assert sum(map(len, ours)) == len(set().union(*ours)), "passages of one book overlap"
    with pytest.warns(UserWarning, match="short"):
        assert load(f"long:{tmp_path}@50+400", seed=4) != prompts


def test_a_book_as_long_as_its_passage_is_one(tmp_path: Path) -> None:
    """Bug: places to begin are counted one too many, and the last passage has a word less."""
    (tmp_path / "x.txt").write_text("one two three\n\nfour five six seven eight\n")
    for length, seed in itertools.product((7, 8), range(5)):
        for prompt in load(f"long:{tmp_path / 'x.txt'}@{length}", seed=seed):
            assert len(prompt.turns[0].partition("\n\n")[2].split()) == length


@pytest.mark.parametrize("seed", range(4))
def test_a_limit_takes_of_every_part_in_proportion(tmp_path: Path, seed: int) -> None:
    """Bug: a limit takes the first lines, which are all MT-bench's; or a task of ten lines weighs
    as much as one of eighty."""
    path = spec_bench(tmp_path / "question.jsonl", each=16)
    whole, some = load(f"spec_bench:{path}"), load(f"spec_bench:{path}", limit=24, seed=seed)
    assert Counter(p.task for p in some) == {f"spec_bench/{task}": 4 for task in ("mt_bench", *OTHERS)}
    categories = {p.turns[0].split()[0] for p in some if p.task == "spec_bench/mt_bench"}
    assert len(categories) == 4, "four of the eight categories"
    assert some == [p for p in whole if p in some], "in the order of the file"
    assert some == load(f"spec_bench:{path}", limit=24, seed=seed)
    lines = ({"turns": ["x"], "category": "ab"[i % 10 == 0], "question_id": i} for i in range(100))
    uneven = write(tmp_path / "uneven.jsonl", *lines)
    taken = Counter(int(p.id.partition("/")[2]) % 10 == 0 for p in load(f"nq:{uneven}", limit=20, seed=seed))
    assert taken == {True: 2, False: 18}


def test_limits_at_their_ends(tmp_path: Path) -> None:
    """Bug: a limit above the number of prompts fails, 0 means everything, or the seed chooses nothing."""
    path = write(tmp_path / "x.jsonl", *({"question": f"{i}?"} for i in range(9)))
    assert load(f"nq:{path}", limit=9) == load(f"nq:{path}", limit=10) == load(f"nq:{path}")
    assert all(len({p.id for p in load(f"nq:{path}", limit=k)}) == k for k in range(1, 10))
    # of 9; fewer: chance below 1e-7
    assert len({load(f"nq:{path}", limit=1, seed=seed)[0].id for seed in range(40)}) > 4
    with pytest.raises(OptionError, match="limit of 0"):
        load(f"nq:{path}", limit=0)


def test_a_broken_line_is_named_and_the_rest_goes_on(tmp_path: Path) -> None:
    """Bug: one broken line ends the bench, or is left out without a word, or is said without its number."""
    lines = ('{"turns": ["a"]}', "{", '{"turn": ["b"]}', '{"turns": [""]}', "[1]", '{"turns": "c"}', '{"turns": ["\\ud800"]}',
             '{"turns": ["d"]}')  # fmt: skip
    path = write(tmp_path / "x.jsonl", *lines)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prompts = load(f"nq:{path}")
    assert [p.turns for p in prompts] == [("a",), ("d",)]
    assert [p.id for p in prompts] == ["nq/1", "nq/8"], "a line's number is its id where it has none"
    said = [str(warning.message) for warning in caught]
    assert [line.removeprefix(f"{path}:").partition(":")[0] for line in said] == ["2", "3", "4", "5", "6", "7"]
    assert "'turn'" in said[1]
    assert all(Path(warning.filename).is_relative_to(LAB / "src") for warning in caught)


@pytest.mark.parametrize(
    ("spec", "kind", "says"),
    [
        ("gsm8", OptionError, "no task 'gsm8'; did you mean gsm8k"),
        ("gsm8k:nowhere.jsonl", InputError, "nowhere.jsonl does not exist; PATH is test.jsonl"),
        ("bundled:x.jsonl", OptionError, "--prompts"),
        ("bundled/chats", OptionError, "no part 'chats'; did you mean chat"),
        ("spec_bench", InputError, "not on the hub: give a file, spec_bench:PATH"),
        ("long", InputError, "long:PATH"),
        ("long:x.txt@0", OptionError, "above 0"),
        ("long:x.txt", InputError, "x.txt does not exist"),
        ("nq:EMPTY", InputError, "has no prompts: name another file"),
        ("nq:BAD", InputError, "no line can be used; the first: .*x.jsonl:1: not JSON"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str, kind: type[Exception], says: str
) -> None:
    """Bug: a traceback, or a line that does not help."""
    monkeypatch.chdir(tmp_path)
    files = {"EMPTY": write(tmp_path / "e.jsonl"), "BAD": write(tmp_path / "x.jsonl", "{")}
    for word, path in files.items():
        spec = spec.replace(word, str(path))
    with pytest.raises(kind, match=says) as caught:
        load(spec)
    assert "\n" not in str(caught.value)


def test_the_hub_is_asked_for_a_name_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: without `datasets`, or without a network, a traceback of somebody else's instead of what
    to install or which path to give."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"gsm8k:PATH \(test.jsonl\), or `pip install datasets`"):
        load("gsm8k")
    asked: list[tuple[Any, ...]] = []

    def load_dataset(*args: Any, **kwargs: Any) -> list[dict[str, str]]:
        asked.append((*args, kwargs["split"]))
        if "cnn" in args[0]:
            raise ConnectionError("no route\nto anywhere")
        return [{"question": "How many?", "answer": "4"}]

    fake = types.ModuleType("datasets")
    fake.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert load("gsm8k") == [Prompt("gsm8k/1", "gsm8k", ("How many?",), max_new_tokens=512)]
    with pytest.raises(InputError, match=r"cannot be fetched from the hub \(no route\); give a file, cnn_dm:PATH"):
        load("cnn_dm")
    assert asked == [("openai/gsm8k", "main", "test"), ("abisee/cnn_dailymail", "3.0.0", "test")]


TOOLS = [{"type": "function", "function": {"name": "now"}}]


def test_own_prompts_in_every_way(tmp_path: Path) -> None:
    """Bug: a way of asking is lost, or a task that the line names."""
    chat = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]
    path = write(
        tmp_path / "mine.jsonl",
        {"prompt": "a", "id": "first", "max_new_tokens": 7},
        {"prompt": "b", "raw": True},
        {"turns": ["c", "d"], "system": "Rhyme.", "task": "poems"},
        {"messages": chat, "task": "poems", "id": 0},
        {"prompt_ids": [5, 6]},
        {"messages": chat, "tools": TOOLS},
    )
    prompts, problems = read_prompts(path)
    assert problems == []
    assert prompts == [
        Prompt("mine/first", "mine", ("a",), max_new_tokens=7),
        Prompt("mine/2", "mine", ("b",), raw=True),
        Prompt("poems/3", "poems", ("c", "d"), "Rhyme."),
        Prompt("poems/0", "poems", (), messages=tuple(chat)),
        Prompt("mine/5", "mine", (), prompt_ids=(5, 6)),
        Prompt("mine/6", "mine", (), messages=tuple(chat), template={"tools": TOOLS}),
    ]


def test_own_prompts_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    """Bug: a line that asks two things asks one of them; an id stands for two prompts; an option
    that does nothing is taken."""
    wrong = {
        "both prompt and turns": {"prompt": "a", "turns": ["b"]},
        "'promt': did you mean prompt": {"promt": "a"},
        "is at .*:1 already": {"prompt": "b", "id": 7},
        '"max_new_tokens" must be': {"prompt": "a", "max_new_tokens": 0},
        '"raw" goes with one "prompt"': {"turns": ["a", "b"], "raw": True},
        '"raw" goes with one': {"prompt": "a", "system": "b", "raw": True},
        '"system" goes with': {"prompt_ids": [1], "system": "b"},
        '"prompt_ids" must be': {"prompt_ids": [1, "2"]},
        '"task" must be': {"prompt": "a", "task": 3},
        "the id must be": {"prompt": "a", "id": 1.5},
        "nobody asks": {"messages": [{"role": "assistant", "content": "Hi"}]},
        "message 1 has the unknown role": {"messages": [{"role": "usr", "content": "Hi"}]},
    }
    path = write(tmp_path / "mine.jsonl", {"prompt": "good", "id": 7}, *wrong.values())
    prompts, problems = read_prompts(path)
    assert [p.turns for p in prompts] == [("good",)]
    assert len(problems) == len(wrong)
    for number, (says, problem) in enumerate(zip(wrong, problems, strict=True), start=2):
        with pytest.raises(InputError, match=f"^{path}:{number}: .*{says}"):
            raise InputError(problem)
    with pytest.raises(InputError, match="does not exist"):
        read_prompts(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match="no line can be used"):
        read_prompts(write(tmp_path / "bad.jsonl", {"question": "the formats of tasks are not the user's"}))


def test_the_bundled_prompts_are_four_of_each_of_six_kinds() -> None:
    """Bug: a kind is missing, an id stands twice, or the file is not in the package; or all prompts are one line, and a
    method that copies from its prompt is never seen at work. Every other task has a path or a dataset."""
    prompts = load("bundled")
    kinds = ("chat", "summarising", "rewriting", "qa", "maths", "retrieval")
    assert Counter(p.task for p in prompts) == {f"bundled/{kind}": 4 for kind in kinds}
    assert len({p.id for p in prompts}) == len({p.turns for p in prompts}) == 24
    assert sum(len(p.turns) == 2 for p in prompts) >= 2
    packed = tomllib.loads((LAB / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["eyas_lab"]
    assert any(fnmatch(BUNDLED.relative_to(LAB / "src" / "eyas_lab").as_posix(), pattern) for pattern in packed)
    assert Counter(p.task for p in load("bundled", limit=6)) == {f"bundled/{kind}": 1 for kind in kinds}
    assert [p.task for p in load("bundled/maths")] == ["bundled/maths"] * 4
    tokenizer = tiny.tokenizer()
    lengths = [len(tokenizer(" ".join(p.turns))["input_ids"]) for p in prompts]
    assert min(lengths) < 20
    assert sum(100 <= length <= 300 for length in lengths) >= 6
    assert max(lengths) <= 400
    assert [name for name, task in TASKS.items() if not task.file and not task.hub] == ["bundled"]

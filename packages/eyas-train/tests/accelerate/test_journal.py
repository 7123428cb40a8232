"""What a run keeps of itself, and the questions that it divides."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eyas.errors import InputError, OptionError
from eyas_train.accelerate.journal import FILE, Journal
from eyas_train.accelerate.material import questions, read_material, write_material


def test_a_finished_step_is_known_to_the_next_session(tmp_path: Path) -> None:
    """Bug: a step is done again, or one that was interrupted counts as done; or other settings go on in the folder."""
    journal = Journal(tmp_path, {"minutes": 5})
    with journal.step("one"):
        pass
    with pytest.raises(KeyboardInterrupt), journal.step("two"):
        raise KeyboardInterrupt
    journal.write(plan={"a": 1})
    again = Journal(tmp_path, {"minutes": 5})
    assert (again.is_done("one"), again.is_done("two"), again["plan"]) == (True, False, {"a": 1})
    assert again.seconds() >= again.seconds("one") >= 0
    with again.step("two"):
        pass
    assert Journal(tmp_path, {"minutes": 5}).is_done("two")
    with pytest.raises(OptionError, match="minutes 5 there, 6 now; repeat the old ones"):
        Journal(tmp_path, {"minutes": 6})


@pytest.mark.parametrize("content", ["{", "[]", '{"format": "eyas-accelerate", "version": 1}', '{"format": "x"}'])
def test_a_damaged_journal_is_refused(tmp_path: Path, content: str) -> None:
    """Bug: a traceback, or a run that begins again and overwrites what is there."""
    (tmp_path / FILE).write_text(content)
    with pytest.raises(InputError, match=FILE):
        Journal(tmp_path, {})


def test_bundled_questions_are_many_and_different() -> None:
    """Bug: two kinds share a question, or a form lacks its place for the subject."""
    every = questions()
    assert len(every) == len(set(every)) > 700
    assert not any("{" in question or "}" in question for question in every)


def test_no_question_is_both_trained_on_and_benched(tmp_path: Path) -> None:
    """Bug: the bench asks what the head was trained on, or shows the target the reply that it is to make. Copies of a
    question are one."""
    data, answers, bench = (tmp_path / f"{name}.jsonl" for name in ("data", "answers", "bench"))
    chats = [
        {"messages": [{"role": "user", "content": str(i)}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]}
        for i in range(20)
    ]  # fmt: skip
    data.write_text("\n".join(map(json.dumps, [*chats, *({"prompt": f"question {i % 20}"} for i in range(40))])))
    material = read_material([str(data)])
    write_material(material, answers, bench)
    lines = [[json.loads(line) for line in file.read_text().splitlines()] for file in (answers, bench)]
    answered, benched = ([line.get("prompt") or line["messages"][0]["content"] for line in part] for part in lines)
    assert (len(answered), len(benched), len({*answered, *benched})) == (30, 10, 40)
    assert {len(line["messages"]) for line in lines[1]} == {1}
    assert read_material([str(data)]) == material
    data.write_text("\n".join(map(json.dumps, chats[:9])))
    with pytest.raises(InputError, match="9 questions are too few"):
        read_material([str(data)])

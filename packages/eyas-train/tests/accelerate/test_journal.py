"""What a run keeps of itself, and the questions that it divides."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eyas.errors import InputError, OptionError
from eyas_train.accelerate.journal import FILE, Journal
from eyas_train.accelerate.material import read_material, write_material
from eyas_train.accelerate.questions import questions


def test_a_finished_step_is_known_to_the_next_session(tmp_path: Path) -> None:
    """Bug: a step is done again, or one that was interrupted counts as done, or its time is lost."""
    journal = Journal(tmp_path, {"minutes": 5})
    with journal.step("one"):
        pass
    with pytest.raises(KeyboardInterrupt), journal.step("two"):
        raise KeyboardInterrupt
    journal.write(plan={"a": 1})
    again = Journal(tmp_path, {"minutes": 5})
    assert again.is_done("one")
    assert not again.is_done("two")
    assert "two" in again["steps"]
    assert again["plan"] == {"a": 1}
    assert again.seconds() >= again.seconds("one") >= 0
    with again.step("two"):
        pass
    assert Journal(tmp_path, {"minutes": 5}).is_done("two")


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    """Bug: a run with other data goes on in the old one's folder."""
    Journal(tmp_path, {"minutes": 5, "data": "a"}).write()
    with pytest.raises(OptionError, match="minutes 5 there, 6 now; repeat the old ones"):
        Journal(tmp_path, {"minutes": 6, "data": "a"})


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
    """Bug: the bench asks what the head was trained on. Copies of a question are one."""
    lines = [json.dumps({"prompt": f"question {i % 40}"}) for i in range(60)]
    (tmp_path / "q.jsonl").write_text("\n".join(lines))
    material = read_material([str(tmp_path / "q.jsonl")])
    write_material(material, tmp_path / "answers.jsonl", tmp_path / "bench.jsonl")
    answered = [json.loads(line)["prompt"] for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    benched = [json.loads(line)["messages"] for line in (tmp_path / "bench.jsonl").read_text().splitlines()]
    asked = [messages[0]["content"] for messages in benched]
    assert len(answered) + len(asked) == 40
    assert len(asked) == 10
    assert set(answered) & set(asked) == set()
    assert read_material([str(tmp_path / "q.jsonl")]) == material


def test_chats_are_benched_up_to_their_first_reply(tmp_path: Path) -> None:
    """Bug: the bench shows the target the reply that it is to make."""
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    chats = [{"id": i, "messages": [{**talk[0], "content": str(i)}, *talk[1:]]} for i in range(20)]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, chats)))
    write_material(read_material([str(tmp_path / "q.jsonl")]), tmp_path / "answers.jsonl", tmp_path / "bench.jsonl")
    for line in (tmp_path / "bench.jsonl").read_text().splitlines():
        assert [message["role"] for message in json.loads(line)["messages"]] == ["user"]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, chats[:9])))
    with pytest.raises(InputError, match="9 questions are too few"):
        read_material([str(tmp_path / "q.jsonl")])

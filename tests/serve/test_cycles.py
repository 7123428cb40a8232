"""Steps as the page reads them."""

import json
import math
from typing import Any

from eyas.core.requests import Step
from eyas.features.traces import Trace, TraceNode
from eyas.serve.cycles import CycleWriter
from toy_tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer(None)
END = 1  # <|end|>
EURO = "\N{EURO SIGN}"
A, B, E1, E2, E3 = TOKENIZER("ab" + EURO)["input_ids"]  # a token is a byte


def cycle(tokens: list[int], nodes: tuple[TraceNode, ...], path: tuple[int, ...], finish: str | None = None) -> Step:
    """A cycle that emits `tokens`, of which all but those behind the path were drafted. Its nodes
    had other numbers in the draft."""
    trace = Trace(nodes, path, tokens[-1], finish or "no child")
    drafted = tuple(n + 7 * (n > 0) for n in path)
    timed: dict[str, Any] = {"seconds": 0.5, "stage_seconds": {"draft": 0.1}}
    return Step(1, tuple(tokens), finish, drafted, **timed, extra={"trace": trace})


def node(
    parent: int, token: int, depth: int, accepted: bool = True, p: float = 0.5, q: float | None = 0.25
) -> TraceNode:
    return TraceNode(parent, token, depth, q, p, accepted)


def test_texts_of_a_character_in_pieces() -> None:
    """A character of three bytes, drafted in two and completed by the target, comes with its last
    token; no half of it is shown as text. The texts of the tokens are the answer's text."""
    writer = CycleWriter(TOKENIZER)
    first = writer.write(Step(1, (A,), None, seconds=2.0))
    assert (first["prefill"], first["nodes"], first["ms"]) == (True, [], 2000)
    nodes = (node(-1, A, 0, q=None, p=1.0), node(0, E1, 1), node(0, A, 1, accepted=False), node(1, E2, 2))
    second = writer.write(cycle([E1, E2, E3], nodes, (0, 1, 3)))
    assert [t["text"] for t in second["tokens"]] == ["", "", EURO]
    assert [t["node"] for t in second["tokens"]] == [1, 3, None], "numbers of the trace's nodes, not of the draft's"
    assert second["bonus_text"] == "\N{REPLACEMENT CHARACTER}"
    assert (second["number"], second["tau_so_far"], second["ms"], second["parts_ms"]) == (1, 3.0, 500, {"draft": 100})


def test_last_cycle_is_cut_and_lets_go_what_was_held_back() -> None:
    """A text that ends inside a character shows a replacement character, as `decode` does; special
    tokens are no text, but have one in the tree; a path that was cut emits drafted tokens only."""
    writer = CycleWriter(TOKENIZER)
    nodes = (node(-1, END, 0, q=None, p=1.0), node(0, E1, 1), node(1, END, 2), node(2, E1, 3))
    made = writer.write(cycle([E1, END], nodes, (0, 1, 2, 3), finish="stop"))
    assert "".join(t["text"] for t in made["tokens"]) == TOKENIZER.decode([E1, END], skip_special_tokens=True)
    assert [t["node"] for t in made["tokens"]] == [1, 2]
    assert [n["text"] for n in made["nodes"]][::2] == ["<|end|>", "<|end|>"]
    assert made["ended"] == "stop"


def test_json_of_broken_numbers_and_of_no_tokenizer() -> None:
    """A NaN would be written as NaN, which is no JSON: the page would show nothing at all."""
    nodes = (node(-1, 5, 0, q=None, p=1.0), node(0, 6, 1, p=math.nan, q=math.inf))
    made = CycleWriter(None).write(cycle([6, 9], nodes, (0, 1)))
    read = json.loads(json.dumps(made, allow_nan=False))
    assert (read["nodes"][1]["p"], read["nodes"][1]["q"]) == (None, None)
    assert [t["text"] for t in read["tokens"]] == ["6 ", "9 "]
    assert [n["text"] for n in read["nodes"]] == ["5", "6"]

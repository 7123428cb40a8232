"""Ctrl-C at a chosen line of eyas: what comes next is answered, and answered right. A trace function raises
KeyboardInterrupt, as a signal's handler does."""

import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import eyas
import zoo
from eyas.core.engine import Decoder, Request
from eyas.core.rows import Row
from eyas.errors import InputError
from test_defaults import default

SOURCE = str(Path(eyas.__file__).parent)


def leaves_a_block(frame: FrameType) -> bool:
    """Whether a `with` may be about to call __exit__: no signal's handler runs there, but a trace function does."""
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with ")


@contextmanager
def interrupted_at(line: int, places: dict[tuple[str, int], list[int]] | None = None) -> Iterator[list[int]]:
    """Raise KeyboardInterrupt when so many lines of eyas have begun within this context; 0: never. Yield the number of
    lines so far. Finalisers are left alone: Python swallows what they raise.

    Args:
        places: is filled with the numbers at which each line of a function began.
    """
    begun = [0]

    def on_line(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            begun[0] += 1
            if places is not None:
                places.setdefault((frame.f_code.co_qualname, frame.f_lineno), []).append(begun[0])
            if 0 < line <= begun[0] and not leaves_a_block(frame):
                sys.settrace(None)
                raise KeyboardInterrupt
        return on_line

    def on_call(frame: FrameType, event: str, argument: Any) -> Any:
        ours = frame.f_code.co_filename.startswith(SOURCE) and frame.f_code.co_name != "__del__"
        return on_line if ours else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield begun
    finally:
        sys.settrace(before)


def interrupt(do: Callable[[], object], line: int) -> bool:
    """Do something until this line; return whether it was interrupted."""
    try:
        with interrupted_at(line):
            do()
    except KeyboardInterrupt:
        return True
    return False


def lines_of(do: Callable[[], object]) -> int:
    """Return how many lines of eyas something takes."""
    with interrupted_at(0) as begun:
        do()
    return begun[0]


def lines_in(do: Callable[[], object], *functions: str) -> list[int]:
    """The numbers, among all lines of eyas, at which lines of functions with such names begin."""
    places: dict[tuple[str, int], list[int]] = {}
    with interrupted_at(0, places):
        do()
    found = [numbers for (name, _), numbers in places.items() if name.startswith(functions)]
    return sorted(number for numbers in found for number in numbers)


FIRST, SECOND = "I want to book a table for two.", "In San Jose, please."
POINTS = 24


@cache
def tiny() -> eyas.LLM:
    return eyas.load(tree="fixed")  # a tree by the clock would take another number of lines each time


def begun() -> eyas.api.Chat:
    """A chat after its first answer."""
    chat = tiny().chat(max_new_tokens=6)
    chat.send(FIRST)
    return chat


@cache
def second_answer() -> str:
    return begun().send(SECOND).text


@cache
def lines() -> int:
    second_answer()  # what is made once and kept is there afterwards
    chat = begun()
    return lines_of(lambda: chat.send(SECOND))


def check(chat: eyas.api.Chat) -> None:
    """The next message is answered as if nothing had happened before."""
    assert [message["role"] for message in chat.messages] == ["user", "assistant"]
    assert chat.send(SECOND).text == second_answer()
    assert len(chat.messages) == 4


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_a_chat_goes_on_after_ctrl_c(part: int) -> None:
    """Bug: a request between two lists is found by nobody, or keys of half a step stay. At many lines in turn."""
    for number in range(part, POINTS, 4):
        chat = begun()
        assert interrupt(lambda: chat.send(SECOND), 1 + number * (lines() - 1) // POINTS)  # noqa: B023 - called at once
        check(chat)


@pytest.mark.parametrize("place", [Row.from_request, Decoder._release, Decoder._emit], ids=lambda place: place.__name__)
def test_between_two_lists(place: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: see above. The three places at which a request changes its list, hit exactly; other errors than Ctrl-C, too."""
    chat, owner = begun(), Row if place.__name__ == "from_request" else Decoder  # type: ignore[attr-defined]
    for error in (KeyboardInterrupt, MemoryError):

        def fail(*_: object, error: type[BaseException] = error, **__: object) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(owner, place.__name__, fail)  # type: ignore[attr-defined]
            with pytest.raises(error):
                chat.send(SECOND)
    check(chat)


def test_a_stream_that_is_interrupted() -> None:
    """Guards streams: an interrupted one ends; one that its owner still reads keeps the chat."""
    chat = begun()
    stream = chat.stream(SECOND, max_new_tokens=60, ignore_eos=True)
    next(stream)
    with pytest.raises(InputError, match="still being streamed"):
        chat.send(SECOND)
    assert interrupt(lambda: list(stream), 200)
    assert not list(stream)
    check(chat)


def test_a_broken_decoder_says_so() -> None:
    """Bug: a decoder whose step was interrupted goes on with half a row, or for ever."""
    decoder = Decoder(tiny().target, tiny().drafter)
    number = decoder.add(Request((5, 6, 7), 8))
    assert interrupt(decoder.step, 30)
    decoder.cancel(number)  # nothing to do, and no error
    with pytest.raises(InputError, match="did not reach its end: make a new Decoder"):
        decoder.step()


@pytest.mark.slow
def test_layers_with_state_after_ctrl_c() -> None:
    """Bug: Ctrl-C between a forward's replacement and the `with` that puts it back made all answers wrong."""
    model = zoo.HYBRIDS["qwen3_next"]()
    with default("bfloat16"):  # in which the fuzz found it
        llm = eyas.load(model, tokenizer=False, kernels="off", method="suffix")

        def ids() -> list[int]:
            return list(llm.generate(list(range(3, 35)), max_new_tokens=12, ignore_eos=True).token_ids)

        wanted = ids()
        assert ids() == wanted
        points = lines_in(ids, "_Projections.replace", "replace_forward")
        assert points
        for point in points[len(points) // 2 :]:
            interrupt(ids, point)
            assert not [name for name, module in model.named_modules() if "forward" in vars(module)], point
        assert ids() == wanted

"""Ctrl-C at any moment: what comes next is answered, and answered right. With tests/state_fuzz.py, which adds other disturbances."""

import sys
from functools import cache
from pathlib import Path

import pytest

import eyas
import processes
import zoo
from eyas.core.engine import Decoder, Request
from eyas.core.rows import Row
from eyas.errors import InputError
from interrupts import interrupt, lines_in, lines_of
from test_defaults import default

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


def fuzz(seed: int, rounds: int) -> None:
    program = Path(__file__).with_name("state_fuzz.py")
    done = processes.run([sys.executable, program, str(seed), str(rounds)], env=processes.environment())
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == rounds


@pytest.mark.slow
def test_a_little_of_everything() -> None:
    """Guards defaults, edits and interruptions together: no wrong id, no crash, no hang. Seeded; `make test-all` has more."""
    fuzz(1, 3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [2, 3])
def test_more_of_everything(seed: int) -> None:
    """The same over more rounds. The seeds are those that were tried; python tests/state_fuzz.py tries others."""
    fuzz(seed, 20)


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

"""Windows of the draft (SEAGLE): what is kept, what is read of a long prompt, and that nothing grows with the text."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from eyas import drafters
from eyas.core.engine import Decoder, Request
from eyas.core.options import build_options
from eyas.core.target import Target
from eyas.drafters import Drafter
from eyas.drafters._eagle import EagleSession
from eyas.errors import OptionError
from eyas.nn import DraftKVCache, LayerShape, rope, rope_frequencies
from reference import plain_decode, run

SHAPE = LayerShape(8, 8, 2, 2, 4)


def make(target: Target, method: str = "seagle", **options: Any) -> Drafter:
    chosen = {} if method == "eagle1" else {"tree.nodes": 8, "tree.depth": 3, "tree.branch": 2}
    chosen |= {} if method in ("eagle1", "eagle2") else {"head.layers": "0,1,2"}
    kind = drafters.find(method)
    return kind.random(target, build_options(kind.Options, {**chosen, **options}), seed=1)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    dice = random.Random(seed)
    return tuple(dice.randrange(60) for _ in range(length))


@pytest.mark.parametrize("sink", [0, 2])
def test_trim_keeps_the_first_and_the_last_each_once_rotated_by_index(sink: int) -> None:
    """Against keys and values kept apart: rows below the window, exactly there, and beyond it."""
    size, generator = 5, torch.Generator().manual_seed(0)
    cache = DraftKVCache(2, 4, 3, torch.float32, torch.device("cpu"), (sink, size))
    frequency, T = rope_frequencies(SHAPE), 12
    keys, values = torch.randn(3, T, 2, 4, generator=generator), torch.randn(3, T, 2, 4, generator=generator)
    slots = torch.arange(T).expand(3, T)
    cache.prepare(range(3), lambda: slots, T)
    cache.store(keys, values, slots, frequency)
    length = torch.tensor([sink + size - 1, sink + size, T])
    trimmed = cache.trim(length, frequency)
    assert trimmed.tolist() == [sink + size - 1, sink + size, sink + size]
    cache.prepare(range(3), lambda: slots[:, :1] + sink + size, sink + size)
    seen_keys, seen_values = cache._stores[cache.store_key][:2]
    for row, kept in enumerate(([*range(sink + size - 1)], [*range(sink + size)], [*range(sink), *range(T - size, T)])):
        expected = rope(keys[row, kept][None], torch.arange(len(kept))[None], frequency)[0]
        torch.testing.assert_close(seen_keys[row, :, : len(kept)].transpose(0, 1), expected)
        torch.testing.assert_close(seen_values[row, :, : len(kept)].transpose(0, 1), values[row, kept])


def trees(drafter: Drafter, request: Request) -> list[list[int]]:
    drafts = [step.draft for step in run(Decoder(drafter.target, drafter), [request])[1]]
    return [draft.tokens_BN[0].tolist() for draft in drafts if draft is not None]


@pytest.mark.cover(method=1)
@pytest.mark.parametrize("method", ["eagle1", "eagle2", "eagle3"])
def test_until_the_window_is_full_nothing_changes(method: str, target: Target) -> None:
    """The same trees as without a window: 30 tokens in one of 40; other trees in one of 6."""
    plain, request = make(target, method), Request(prompt(14), 16)
    wide, narrow = (make(target, method, **{"window.size": size}) for size in (40, 6))
    assert trees(wide, request) == trees(plain, request)
    assert trees(narrow, request) != trees(plain, request)


@pytest.mark.cover
@pytest.mark.parametrize("crop", ["halves", "last", "none"])
@pytest.mark.parametrize("sink", [0, 3])
def test_ids_stay_those_of_the_target(crop: str, sink: int, target: Target) -> None:
    """Prompts shorter and far longer than the window, together; several chunks of prefill."""
    drafter = make(target, **{"window.size": 7, "window.sink": sink, "window.crop": crop})
    requests = [Request(prompt(n, n), 12) for n in (3, 60, 17)]
    tokens, _ = run(Decoder(target, drafter, 2), requests)
    assert tokens == [plain_decode(target.model, request) for request in requests]


def session_after(target: Target, length: int, crop: str, chunk: int, size: int = 8, sink: int = 2) -> EagleSession:
    """A session that has read a prompt in chunks; its cache's un-rotated keys tell which pairs it holds."""
    drafter = make(target, **{"window.size": size, "window.sink": sink, "window.crop": crop})
    session, ids = drafter.open(1), torch.tensor(prompt(length))
    features = target.encode(ids[None], drafter.feature_layers)[0]
    session.begin(0, 0, length)
    with torch.inference_mode():
        for begin in range(0, length, chunk):
            session.prefill(0, ids[begin : begin + chunk], features[begin : begin + chunk], begin)
    return session


def pairs_held(session: EagleSession, target: Target, length: int) -> list[int]:
    """Which pairs of the prompt stand in the slots, found by their un-rotated keys."""
    drafter, ids = session.drafter, torch.tensor(prompt(length))
    with torch.no_grad():
        features = target.encode(ids[None], drafter.feature_layers)[0]
        inputs: Tensor = drafter.net.join(drafter.net.fuse(features[:-1]), drafter.embed(ids[1:]))[0]
        keys = drafter.net.layer.attention.key_value(inputs)[0]
    held = session.cache._stores[session.cache.store_key][2, 0, :, : int(session.length_B[0])].transpose(0, 1)
    return [int((keys - key).abs().sum((1, 2)).argmin()) for key in held]


@pytest.mark.parametrize("chunk", [4, 7, 100])
def test_what_is_read_of_a_long_prompt(chunk: int, target: Target) -> None:
    """Window of 2 + 8, prompt of 50 tokens, cut in any way: 49 pairs are complete, the last waits for the root."""
    expected = {
        "halves": [0, 1, 2, 3, 4, 45, 46, 47, 48],  # the first 5, and with the waiting one the last 5
        "last": [40, 41, 42, 43, 44, 45, 46, 47, 48],
        "none": list(range(49)),
    }
    for crop, pairs in expected.items():
        session = session_after(target, 50, crop, chunk)
        assert pairs_held(session, target, 50) == pairs, crop
        assert int(session.pairs_B[0]) == 49
        assert pairs_held(session_after(target, 10, crop, 4), target, 10) == list(range(9))  # a short one is read whole


@pytest.mark.parametrize("crop", ["halves", "last"])
def test_memory_does_not_grow_with_the_prompt(crop: str, target: Target) -> None:
    """The same slots after 60 tokens as after 900."""
    slots = {session_after(target, length, crop, 64).cache.slots for length in (60, 900)}
    assert len(slots) == 1


@pytest.mark.slow
def test_a_chat_goes_on_within_the_window(target: Target) -> None:
    """Later turns reuse the row: what was forgotten is read anew or done without, and ids stay those of the target."""
    drafter = make(target, **{"window.size": 9, "window.sink": 2})
    decoder, history = Decoder(target, drafter, reuse=True), list(prompt(20))
    for turn in range(4):
        request = Request(tuple(history), 6)
        tokens, _ = run(decoder, [request])
        assert tokens == [plain_decode(target.model, request)]
        history = [*history, *tokens[0], *prompt(3 + 7 * turn, turn)] if turn != 2 else history[:12]


def test_the_default_window_is_what_the_head_was_trained_on(target: Target) -> None:
    drafter = make(target)
    drafter.trained_length = 64
    assert drafter.window() == (4, 64 - 4 - 4)
    assert drafter.describe()["window"] == {"sink": 4, "size": 56, "crop": "halves"}
    assert make(target, "eagle3").window() is None
    drafter.trained_length = 8
    with pytest.raises(OptionError, match=r"trained on 8 tokens, too few .* give --window\.size"):
        drafter.open(1)


def test_a_head_that_was_trained_with_a_window_keeps_it(target: Target) -> None:
    drafter = make(target, "eagle3")
    drafter.trained_window = 12
    assert drafter.window() == (0, 12)
    again = type(drafter).load(drafter.weights(), target)
    assert again.window() == again.chain(3).window() == (0, 12)
    assert make(target, "eagle3", **{"window.size": 5}).window() == (4, 5)


@pytest.mark.parametrize(("options", "message"), [
    ({"window.size": 0}, r"window\.size must be a whole number, 1 or more, got 0"),
    ({"window.sink": -1}, r"window\.sink must be a whole number, 0 or more, got -1"),
    ({"window.crop": "half"}, r"unknown window\.crop 'half'.*halves"),
])  # fmt: skip
def test_bad_windows(options: dict[str, Any], message: str, target: Target) -> None:
    with pytest.raises(OptionError, match=message):
        make(target, **options)


@pytest.mark.parametrize("method", ["eagle1", "eagle2", "eagle3"])
def test_flags_without_a_window_are_refused(method: str, target: Target) -> None:
    """They would do nothing. Defaults are no flags; seagle brings a window; a trained one has no sinks."""
    kind = drafters.find(method)
    own = {"head.layers": "0,1,2"} if method == "eagle3" else {}

    def options(given: dict[str, Any], **more: Any) -> Any:
        return build_options(kind.Options, {**more, **{f"window.{name}": value for name, value in given.items()}})

    def random(**given: Any) -> Drafter:
        return kind.random(target, options(given, **own))

    def load(trained: int | None = None, **given: Any) -> Drafter:
        head = random()
        head.trained_window = trained  # type: ignore[attr-defined]
        return kind.load(head.weights(), target, options(given))

    for make_it in (load, random):
        said = r"window\.sink: this draft has no window; give --window\.size too, or leave it out"
        with pytest.raises(OptionError, match=said):
            make_it(sink=2)
        with pytest.raises(OptionError, match=r"window\.sink and window\.crop: this draft .* leave them out"):
            make_it(sink=0, crop="last")
        assert make_it(sink=4, crop="halves").window() is None
        assert make_it(sink=2, crop="last", size=9).window() == (2, 9)
    if method == "eagle3":
        assert load(12, crop="last").window() == (0, 12)
        said = r"window\.sink: this head was trained with a window of 12, without sinks; give"
        with pytest.raises(OptionError, match=said):
            load(12, sink=2)
        assert make(target, "seagle", **{"window.sink": 2, "window.crop": "last"}).options.window.sink == 2


def test_positions_never_leave_the_window(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Far past the window no query is rotated beyond sink + size + the tree's depth + a cycle's catching up."""
    drafter = make(target, **{"window.size": 10, "window.sink": 2})
    seen: list[int] = []
    forward = drafter.net.forward

    def watch(hidden: Tensor, embeddings: Tensor, position: Tensor, *rest: Any) -> Tensor:
        seen.append(int(position.max()))
        return forward(hidden, embeddings, position, *rest)

    monkeypatch.setattr(drafter.net, "forward", watch)
    run(Decoder(target, drafter), [Request(prompt(200), 20)])
    assert max(seen) < 2 + 10 + 2 * 4

"""load, generate, stream, chat."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from transformers import LogitsProcessor

import eyas
import words
import zoo
from eyas import checkpoints
from eyas.api import LLM
from eyas.core import engine as decode
from eyas.core.engine import Decoder, Request
from eyas.core.target import Target
from eyas.drafters.eagle1 import Method
from eyas.errors import CheckpointError, InputError, ModelError, OptionError
from reference import plain_decode


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(zoo.tiny("llama", vocab_size=words.VOCAB, eos_token_id=1))


@pytest.fixture(scope="module")
def llm(target: Target) -> LLM:
    """A target with a random EAGLE head: losslessness needs no good one."""
    drafter = eyas.api._drafter(target, Method.random(target), None, {}, None)
    return LLM(target, drafter, words.byte_tokenizer())


def plain(llm: LLM, prompt: object, new: int, **sampling: object) -> tuple[int, ...]:
    law = eyas.Sampling(**sampling)  # type: ignore[arg-type]
    return tuple(plain_decode(llm.target.model, Request(llm.ids(prompt), new, law, llm.eos)))  # type: ignore[arg-type]


def test_one_prompt_and_many(llm: LLM) -> None:
    """Guards the three kinds of prompts, alone and in lists, and their order."""
    prompts = ["Hello there", [{"role": "user", "content": "Hello there"}], list(llm.ids("Hello there")), "Another one, longer than that"]
    results = llm.generate(prompts, max_new_tokens=20, batch_size=3)
    assert isinstance(results, list)
    assert results[0].token_ids == results[1].token_ids == results[2].token_ids == plain(llm, prompts[0], 20)
    assert results[3].token_ids == plain(llm, prompts[3], 20)
    one = llm.generate("Hello there", max_new_tokens=20)
    assert one.token_ids == results[0].token_ids
    assert one.text == llm.tokenizer.decode(one.token_ids, skip_special_tokens=True)  # type: ignore[union-attr]
    assert one.stats.tokens == len(one.token_ids) - 1
    assert sum(one.stats.accepted_lengths) + one.stats.cycles >= one.stats.tokens
    assert llm.generate("Hello there", max_new_tokens=20, raw=True).token_ids == plain(llm, llm.ids("Hello there", raw=True), 20)


def test_stream_is_generate(llm: LLM) -> None:
    """Guards streaming: pieces add up to the text and ids of generate; bytes that are no characters yet are held back."""
    for temperature in (0.0, 1.0):
        whole = llm.generate("Tell me", max_new_tokens=40, temperature=temperature, seed=5)
        pieces = list(llm.stream("Tell me", max_new_tokens=40, temperature=temperature, seed=5))
        assert "".join(p.text for p in pieces) == whole.text
        assert tuple(t for p in pieces for t in p.token_ids) == whole.token_ids
        assert [p.finish_reason for p in pieces[:-1]] == [None] * (len(pieces) - 1)
        assert pieces[-1].finish_reason == whole.finish_reason


def test_closing_a_stream_leaves_everything_usable(llm: LLM) -> None:
    """Guards early ends: the next answer is right."""
    stream = llm.stream("Tell me", max_new_tokens=40)
    next(stream)
    stream.close()
    assert llm.generate("Tell me", max_new_tokens=9).token_ids == plain(llm, "Tell me", 9)


def test_stop_strings(llm: LLM) -> None:
    """Guards stops: text ends before the stop string, ids with the token that completes it."""
    whole = llm.generate("Stop now", max_new_tokens=40, temperature=1.0, seed=3)
    for place in range(1, 30):
        stop = whole.text[place : place + 2]
        if len(stop) < 2 or "\ufffd" in whole.text[: place + 2]:
            continue
        found = llm.generate("Stop now", max_new_tokens=40, temperature=1.0, seed=3, stop=[stop])
        assert found.text == whole.text[: whole.text.index(stop)]
        assert found.finish_reason == "stop"
        assert found.token_ids == whole.token_ids[: len(found.token_ids)]


def test_eos_is_in_the_ids_and_not_in_the_text(llm: LLM, target: Target) -> None:
    """Guards EOS from the configuration, as an int or a list."""
    ids = plain(llm, "Hello there", 20)
    ending = LLM(target, llm.drafter, llm.tokenizer)
    ending.eos = frozenset({ids[7], 9999})
    result = ending.generate("Hello there", max_new_tokens=20)
    assert result.token_ids == ids[: ids.index(ids[7]) + 1]
    assert result.finish_reason == "stop"
    assert ending.generate("Hello there", max_new_tokens=20, ignore_eos=True).token_ids == ids


def test_chat_keeps_the_conversation(llm: LLM) -> None:
    """Guards the kept row: every turn is answered as the whole conversation would be from scratch."""
    chat = llm.chat(system="Be brief.", max_new_tokens=12)
    for text in ("Hi.", "And then?", "Why?"):
        said = [*chat.messages, {"role": "user", "content": text}]
        assert chat.send(text).token_ids == plain(llm, said, 12)
    stream = chat.stream("More", max_new_tokens=30)
    next(stream)
    stream.close()
    assert chat.messages[-2] == {"role": "user", "content": "More"}
    said = [*chat.messages, {"role": "user", "content": "Go on"}]
    assert chat.send("Go on").token_ids == plain(llm, said, 12)


def test_two_turns_at_once_are_refused(llm: LLM) -> None:
    """Guards a conversation whose last answer was not read to its end."""
    chat = llm.chat(max_new_tokens=20)
    open_stream = chat.stream("Hi")
    next(open_stream)
    with pytest.raises(InputError, match="still being streamed"):
        chat.send("Are you there?")
    open_stream.close()
    assert chat.send("Are you there?").token_ids


class Counting(LogitsProcessor):  # type: ignore[misc]
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


def test_processors_are_named_or_refused(llm: LLM) -> None:
    """Guards the slow path: it is said in the output; processors with a memory are refused by name."""
    assert llm.generate("Hi", max_new_tokens=4, logits_processor=[Counting()]).stats.slow_processors == ("Counting",)
    stateful = type("SynthIDTextWatermarkLogitsProcessor", (Counting,), {})
    with pytest.raises(InputError, match="SynthIDTextWatermarkLogitsProcessor remembers"):
        llm.generate("Hi", max_new_tokens=4, logits_processor=[stateful()])


def test_bad_prompts(llm: LLM) -> None:
    """Guards what the user may get wrong, one line each."""
    for prompt, words_ in (
        ("", "empty"),
        ("  ", "empty"),
        ([], "empty"),
        ([{"role": "robot", "content": "x"}], "role"),
        (5, "a prompt is"),
    ):
        with pytest.raises(InputError, match=words_):
            llm.generate(prompt)  # type: ignore[call-overload]
    with pytest.raises(InputError, match="unknown sampling parameter 'temprature'; did you mean temperature"):
        llm.generate("Hi", temprature=1)
    with pytest.raises(OptionError, match="temperature must be 0 or more, got -1"):
        llm.generate("Hi", temperature=-1)
    mute = LLM(llm.target, llm.drafter, None)
    assert mute.generate([5, 6, 7], max_new_tokens=5).token_ids == plain(llm, [5, 6, 7], 5)
    with pytest.raises(InputError, match="no tokenizer"):
        mute.generate("Hi")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, target: Target) -> tuple[Path, Path]:
    base = tmp_path_factory.mktemp("models")
    target.model.save_pretrained(base / "target")
    words.byte_tokenizer().save_pretrained(base / "target")
    checkpoints.save(Method.random(target).weights(), base / "head")
    return base / "target", base / "head"


def test_load(folders: tuple[Path, Path], llm: LLM) -> None:
    """Guards the front door: folders, methods, options, and what a head may not be combined with."""
    model, head = folders
    loaded = eyas.load(model, head, tree={"nodes": 9, "depth": 3})
    assert (loaded.method, loaded.drafter.options.tree.nodes, loaded.draft_name) == ("eagle2", 9, str(head))
    assert loaded.generate("Hello there", max_new_tokens=10).token_ids == plain(llm, "Hello there", 10)
    assert eyas.load(model, head, method="eagle1").method == "eagle1"
    assert eyas.load(model).method == "suffix"
    assert eyas.load(llm.target.model, head, tokenizer=words.byte_tokenizer()).generate("Hi", max_new_tokens=3).token_ids
    for arguments, options, kind, message in (
        ((model, head, "eagel2"), {}, OptionError, "unknown method 'eagel2'; did you mean eagle"),
        ((model, head), {"tree": {"nods": 4}}, OptionError, "unknown option 'tree.nods'; did you mean tree.nodes"),
        ((model, head), {"tree.nodes": 0}, OptionError, "tree.nodes must be a whole number, 1 or more, got 0"),
        ((model, None, "eagle1"), {}, CheckpointError, "needs a trained head"),
        ((head,), {}, ModelError, "lacks tensors"),
        ((llm.target.model, llm.drafter, "eagle1"), {}, OptionError, "brings its own method"),
        ((model / "nowhere" / "at" / "all",), {}, ModelError, "does not exist"),
        ((head.parent,), {}, ModelError, "no config.json"),
    ):
        with pytest.raises(kind, match=message):
            eyas.load(*arguments, **options)  # type: ignore[arg-type]


def test_a_head_of_another_target_warns(folders: tuple[Path, Path]) -> None:
    """Guards the fingerprint: same sizes, other weights."""
    other = zoo.tiny("llama", seed=9, vocab_size=words.VOCAB)
    with pytest.warns(UserWarning, match="trained for another target"):
        eyas.load(other, folders[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        eyas.load(*folders)


def test_a_head_of_another_size(folders: tuple[Path, Path]) -> None:
    """Guards both numbers in the message."""
    with pytest.raises(CheckpointError, match="hidden size is 48, the target's 32"):
        eyas.load(zoo.tiny("llama", vocab_size=words.VOCAB, hidden_size=32), folders[1])
    with pytest.raises(CheckpointError, match=f"vocabulary is {words.VOCAB}, the target's 200"):
        eyas.load(zoo.tiny("llama", vocab_size=200), folders[1])


def test_caches_that_are_small_serve_again(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards what an answer leaves in the caches of the next one: longer, shorter and sampled ones, several rows, a broken-off stream."""
    monkeypatch.setattr(decode, "KEPT", 1 << 30)
    made = list[object]()
    whole = Decoder.__init__

    def counted(self: Decoder, *args: object, **kwargs: object) -> None:
        made.append(self)
        whole(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Decoder, "__init__", counted)
    fresh = LLM(llm.target, llm.drafter, llm.tokenizer)
    for prompt in ("A long text, to begin with, of many words.", "Short.", "One in between."):
        assert tuple(fresh.generate(prompt, max_new_tokens=12).token_ids) == plain(llm, prompt, 12)
    assert len(made) == 1
    drawn = LLM(llm.target, llm.drafter, llm.tokenizer).generate("Drawn.", max_new_tokens=12, temperature=1.0, seed=3)
    assert fresh.generate("Drawn.", max_new_tokens=12, temperature=1.0, seed=3).token_ids == drawn.token_ids
    next(iter(fresh.stream("Broken off", max_new_tokens=12)))
    prompts = ["One row", "and another one", "and a third"]
    for prompt, result in zip(prompts, fresh.generate(prompts, batch_size=2, max_new_tokens=8), strict=True):
        assert tuple(result.token_ids) == plain(llm, prompt, 8)
    monkeypatch.setattr(decode, "KEPT", 0)
    fresh.generate("Large", max_new_tokens=4)
    made.clear()
    assert tuple(fresh.generate("Short.", max_new_tokens=12).token_ids) == plain(llm, "Short.", 12)
    assert len(made) == 1, "large caches are given back"

"""load, generate, stream, chat."""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LogitsProcessor

import eyas
import toy_tokenizer
import zoo
from eyas import checkpoints, kernels
from eyas.api import LLM, load
from eyas.core.engine import Decoder, Request
from eyas.core.target import Target
from eyas.drafters.eagle1 import Method
from eyas.errors import CheckpointError, EyasError, InputError, ModelError, OptionError
from eyas.text import render
from reference import plain_decode


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(zoo.tiny("llama", vocab_size=toy_tokenizer.VOCAB, eos_token_id=1))


@pytest.fixture(scope="module")
def llm(target: Target) -> LLM:
    """A target with a random EAGLE head: losslessness needs no good one."""
    drafter = Method.random(target)
    return LLM(target, drafter, toy_tokenizer.byte_tokenizer())


def plain(llm: LLM, prompt: object, new: int, **sampling: object) -> tuple[int, ...]:
    law = eyas.Sampling(**sampling)  # type: ignore[arg-type]
    return tuple(plain_decode(llm.target.model, Request(llm.ids(prompt), new, law, llm.eos)))  # type: ignore[arg-type]


def test_one_prompt_and_many(llm: LLM) -> None:
    """Guards the three kinds of prompts, alone and in lists, and their order."""
    text, tokenizer = "Hello there", llm.tokenizer
    prompts = [text, [{"role": "user", "content": text}], list(llm.ids(text)), "Another one, longer than that"]
    results = llm.generate(prompts, max_new_tokens=20, batch_size=3)
    assert isinstance(results, list)
    assert results[0].token_ids == results[1].token_ids == results[2].token_ids == plain(llm, prompts[0], 20)
    assert results[3].token_ids == plain(llm, prompts[3], 20)
    one = llm.generate(text, max_new_tokens=20)
    assert one.token_ids == results[0].token_ids
    assert one.text == tokenizer.decode(one.token_ids, skip_special_tokens=True)
    assert one.stats.tokens == len(one.token_ids) - 1
    assert sum(one.stats.accepted_lengths) + one.stats.cycles >= one.stats.tokens
    assert llm.generate(text, max_new_tokens=20, raw=True).token_ids == plain(llm, llm.ids(text, raw=True), 20)


@pytest.mark.parametrize("name", ["chat_template.json", "processor_config.json"])
def test_templates_in_the_files_of_a_processor(name: str, tmp_path: Path) -> None:
    """Models with images keep their chat template there alone (Llava, Idefics): prompts went without one."""
    zoo.tiny("llama", vocab_size=toy_tokenizer.VOCAB).save_pretrained(tmp_path)
    toy_tokenizer.byte_tokenizer(None).save_pretrained(tmp_path)
    bare = load(tmp_path, "vanilla", kernels="off")
    assert bare.ids("Hi") == bare.ids("Hi", raw=True)
    (tmp_path / name).write_text(json.dumps({"chat_template": toy_tokenizer.TEMPLATE}))
    llm = load(tmp_path, "vanilla", kernels="off")
    assert llm.ids("Hi") == tuple(render(toy_tokenizer.byte_tokenizer(), [{"role": "user", "content": "Hi"}]))
    for content, says in (
        ('{"chat_template": 5}', "chat template that is not text"),
        ('["chat_template"', r"tokenizer in .* cannot be loaded"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(ModelError, match=says):
            load(tmp_path, "vanilla", kernels="off")


@pytest.mark.slow
def test_several_answers_to_a_prompt(llm: LLM) -> None:
    """Bug: answers share a seed or reader, come in another order, or the prompt is read for each of them."""
    prompts = ("Hello there", "Another one")
    alone = [
        [llm.generate(prompt, max_new_tokens=15, temperature=1.0, seed=7 + k) for k in range(3)] for prompt in prompts
    ]
    for rows in (1, 2, 4):
        answers = llm.generate(prompts[0], n=3, max_new_tokens=15, temperature=1.0, seed=7, batch_size=rows)
        assert [(a.token_ids, a.text) for a in answers] == [(a.token_ids, a.text) for a in alone[0]]
        assert all(answer.stats.cached_tokens > 0 for answer in answers[1:])
    both = llm.generate(list(prompts), n=3, max_new_tokens=15, temperature=1.0, seed=7)
    assert [[a.token_ids for a in each] for each in both] == [[a.token_ids for a in each] for each in alone]  # type: ignore[attr-defined]


@pytest.mark.slow
def test_drafts_of_one_request(llm: LLM) -> None:
    """Bug: the keywords do not reach the engine, or change the answer; False and True are numbers to Python."""
    expected = plain(llm, "Hello there", 40)
    for drafting in ("auto", True, "off", False, 0, 3):
        result = llm.generate("Hello there", max_new_tokens=40, drafting=drafting)
        assert result.token_ids == expected
        assert (result.stats.cycles == 39) == (drafting in ("off", False, 0))
        assert max(result.stats.accepted_lengths) <= (3 if drafting == 3 else 40)
    for prediction in (expected, [*expected[:20], 7, *expected[22:]], llm.tokenizer.decode(expected), ""):  # type: ignore[union-attr]
        result = llm.generate("Hello there", max_new_tokens=40, prediction=prediction)
        assert result.token_ids == expected
        if prediction is expected or isinstance(prediction, list):
            assert result.stats.predicted_tokens > 20
    assert result.stats.predicted_tokens == 0


@pytest.mark.slow
def test_stream_is_generate(llm: LLM) -> None:
    """Guards streaming: pieces add up to generate's text and ids; `result` at any time changes nothing."""
    for temperature in (0.0, 1.0):
        whole = llm.generate("Tell me", max_new_tokens=40, temperature=temperature, seed=5)
        stream, text, pieces = llm.stream("Tell me", max_new_tokens=40, temperature=temperature, seed=5), "", []
        for piece in stream:
            pieces.append(piece)
            text += piece.text
            assert stream.result().text.startswith(text)
        assert text == stream.result().text == whole.text
        assert tuple(t for p in pieces for t in p.token_ids) == stream.result().token_ids == whole.token_ids
        assert [p.finish_reason for p in pieces[:-1]] == [None] * (len(pieces) - 1)
        assert pieces[-1].finish_reason == whole.finish_reason
        assert stream.result().stats.tau == whole.stats.tau


@pytest.mark.slow
def test_stop_strings(llm: LLM) -> None:
    """Guards stops: text ends before the stop string, ids with the token that completes it."""
    whole = llm.generate("Stop now", max_new_tokens=40, temperature=1.0, seed=3)
    for place in range(1, 30):
        stop = whole.text[place : place + 2]
        if len(stop) < 2 or "\ufffd" in whole.text[: place + 2]:
            continue
        cut = llm.generate("Stop now", max_new_tokens=40, temperature=1.0, seed=3, stop=[stop])
        assert cut.text == whole.text[: whole.text.index(stop)]
        assert cut.finish_reason == "stop"
        assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]


@pytest.mark.slow
def test_chat_keeps_the_conversation(llm: LLM) -> None:
    """Guards the kept row: every turn is answered as the whole conversation would be from scratch."""
    chat = llm.chat(system="Be brief.", max_new_tokens=12)
    for text in ("Hi.", "And then?", "Why?"):
        conversation = [*chat.messages, {"role": "user", "content": text}]
        assert chat.send(text).token_ids == plain(llm, conversation, 12)
    stream = chat.stream("More", max_new_tokens=30)
    next(stream)
    stream.close()
    assert chat.messages[-2] == {"role": "user", "content": "More"}
    conversation = [*chat.messages, {"role": "user", "content": "Go on"}]
    assert chat.send("Go on").token_ids == plain(llm, conversation, 12)


@pytest.mark.skipif(not kernels.available(), reason=f"no kernels here: {kernels.why_not()}")
@pytest.mark.parametrize("kv", ["bfloat16", "int8"])
def test_chats_go_on_from_rounded_keys(kv: str) -> None:
    """Guards kept keys that are rounded: later turns say what plain decoding says with the same rounding."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "max_position_embeddings": 1024}
    model = zoo.tiny("llama", vocab_size=toy_tokenizer.VOCAB, eos_token_id=1, **sizes)
    tokenizer = toy_tokenizer.byte_tokenizer()

    def rounded(method: str) -> LLM:
        return load(model, method=method, tokenizer=tokenizer, kernels="on", kv=kv)

    llm, plain_llm = rounded("prompt_lookup"), rounded("vanilla")
    for keywords in ({}, {"temperature": 0.8, "seed": 5}):
        chat = llm.chat(max_new_tokens=24, **keywords)  # type: ignore[arg-type]
        for text in ("Hi. Hi. Hi.", "And then? And then?", "Why? Hi."):
            conversation = [*chat.messages, {"role": "user", "content": text}]
            expected = plain_llm.generate(conversation, max_new_tokens=24, **keywords)  # type: ignore[call-overload]
            assert chat.send(text).token_ids == expected.token_ids


class Counting(LogitsProcessor):  # type: ignore[misc]
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


def test_processors_are_named_or_refused(llm: LLM) -> None:
    """Guards the slow path: it is said in the output; processors with a memory are refused by name."""
    assert llm.generate("Hi", max_new_tokens=4, logits_processor=[Counting()]).stats.slow_processors == ("Counting",)
    stateful = type("SynthIDTextWatermarkLogitsProcessor", (Counting,), {})
    with pytest.raises(InputError, match="SynthIDTextWatermarkLogitsProcessor keeps a memory"):
        llm.generate("Hi", max_new_tokens=4, logits_processor=[stateful()])


def test_bad_prompts(llm: LLM) -> None:
    """Guards what the user may get wrong, one line each."""
    robot = [{"role": "robot", "content": "x"}]
    for prompt, said in (("", "empty"), ("  ", "empty"), ([[]], "empty"), (robot, "role"), (5, "a prompt is")):
        with pytest.raises(InputError, match=said):
            llm.generate(prompt)  # type: ignore[call-overload]
    mute = LLM(llm.target, llm.drafter, None)
    assert mute.generate([5, 6, 7], max_new_tokens=5).token_ids == plain(llm, [5, 6, 7], 5)
    with pytest.raises(InputError, match="this target has no tokenizer: give token ids"):
        mute.generate("Hi")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, target: Target) -> tuple[Path, Path]:
    base = tmp_path_factory.mktemp("models")
    target.model.save_pretrained(base / "target")
    toy_tokenizer.byte_tokenizer().save_pretrained(base / "target")
    checkpoints.save(Method.random(target).weights(), base / "head")
    return base / "target", base / "head"


@pytest.mark.slow
def test_load(folders: tuple[Path, Path], llm: LLM) -> None:
    """Guards the front door: folders, methods, options, and what a head may not be combined with."""
    model, head = folders
    loaded = eyas.load(model, head, tree={"nodes": 9, "depth": 3})
    assert (loaded.method, loaded.drafter.options.tree.nodes, loaded.draft_name) == ("eagle2", 9, str(head))
    assert loaded.generate("Hello there", max_new_tokens=10).token_ids == plain(llm, "Hello there", 10)
    assert eyas.load(model, head, method="eagle1").method == "eagle1"
    assert eyas.load(model).method == "suffix"
    given = eyas.load(llm.target.model, head, tokenizer=toy_tokenizer.byte_tokenizer())
    assert given.generate("Hi", max_new_tokens=3).token_ids
    for arguments, options, kind, message in (
        ((model, head, "eagel2"), {}, OptionError, "unknown method 'eagel2'; did you mean eagle"),
        ((model, head, 5), {}, OptionError, "not int; known: cascade"),
        ((model, head), {"tree": {"nods": 4}}, OptionError, "unknown option 'tree.nods'; did you mean tree.nodes"),
        ((model, head), {"tree.nodes": 0}, OptionError, "tree.nodes must be a whole number, 1 or more, got 0"),
        ((model, head), {"weights": None}, OptionError, "unknown weights None"),
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
    other = zoo.tiny("llama", seed=9, vocab_size=toy_tokenizer.VOCAB)
    with pytest.warns(UserWarning, match="trained for another target"):
        eyas.load(other, folders[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        eyas.load(*folders)


def test_a_head_with_another_models_embeddings_warns(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Bug: a head of another model loaded without a word, and tau fell from 7.67 to 1.44."""
    weights = checkpoints.load(folders[1])
    config = {name: value for name, value in weights.config.items() if name != "eyas"}
    model = zoo.tiny("llama", vocab_size=toy_tokenizer.VOCAB, eos_token_id=1)
    table = model.get_input_embeddings().weight.detach()
    for other, warns in ((torch.randn_like(table), True), (table + 0.1 * table.std() * torch.randn_like(table), False)):
        tensors = {**weights.tensors, "embed.weight": other}
        checkpoints.save(checkpoints.Weights(weights.method, config, tensors, "memory"), tmp_path / f"{warns}")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            eyas.load(folders[0], tmp_path / f"{warns}")
        assert [one for one in said if "embeddings" in str(one.message)] != [] or not warns
        assert warns or not said


@pytest.mark.slow
def test_caches_that_are_small_serve_again(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards what an answer leaves in the caches: longer, shorter, sampled, several rows, broken off."""
    monkeypatch.setattr("eyas.core.cycle.SMALL_CACHE_BYTES", 1 << 30)
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
    monkeypatch.setattr("eyas.core.cycle.SMALL_CACHE_BYTES", 0)
    fresh.generate("Large", max_new_tokens=4)
    made.clear()
    assert tuple(fresh.generate("Short.", max_new_tokens=12).token_ids) == plain(llm, "Short.", 12)
    assert len(made) == 1, "large caches are given back"


@pytest.mark.slow
def test_prompts_as_people_write_them(llm: LLM) -> None:
    """Guards tensors, arrays, tokenizer output and numpy integers as prompts, and what an attention mask hides."""
    tokenizer, ids, text = llm.tokenizer, [20, 30, 40, 50], "Hello there"
    expected, of_text = plain(llm, ids, 5), plain(llm, tokenizer(text)["input_ids"], 5)
    masked = {"input_ids": [*ids, 5], "attention_mask": [1, 1, 1, 1, 0]}
    numbers = [[np.int64(token) for token in ids], list(torch.tensor(ids))]
    for prompt in (tuple(ids), torch.tensor(ids), np.array(ids), *numbers, masked):
        assert llm.generate(prompt, max_new_tokens=5).token_ids == expected  # type: ignore[call-overload]
    assert llm.generate(tokenizer(text), max_new_tokens=5).token_ids == of_text  # type: ignore[union-attr]
    assert llm.generate([], max_new_tokens=5) == []
    rows = llm.generate(torch.tensor([ids, ids]), max_new_tokens=5)
    assert [row.token_ids for row in rows] == [expected, expected]  # type: ignore[union-attr]
    several = llm.generate(tokenizer(["Hi", text], padding=True, return_tensors="pt"), max_new_tokens=5)
    assert [row.token_ids for row in several] == [plain(llm, tokenizer("Hi")["input_ids"], 5), of_text]  # type: ignore[union-attr]
    pieces = list(llm.stream(tokenizer(text, return_tensors="pt"), max_new_tokens=5))
    assert tuple(t for piece in pieces for t in piece.token_ids) == of_text
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": "there"}]}]
    whole = [{"role": "user", "content": "Hello\nthere"}]
    assert llm.generate(parts, max_new_tokens=5).token_ids == plain(llm, whole, 5)


@pytest.mark.slow
def test_keywords_as_people_write_them(llm: LLM) -> None:
    """Guards None for a default, numpy numbers, one value for a list, and names of other libraries."""
    ids, greedy = [20, 30, 40, 50], plain(llm, [20, 30, 40, 50], 6)
    drawn = llm.generate(ids, max_new_tokens=6, temperature=0.5, seed=3).token_ids
    for keywords in (
        {"stop": None, "seed": None, "temperature": None, "top_k": None, "top_p": None, "logits_processor": None},
        {"do_sample": False, "num_return_sequences": 1, "num_beams": 1, "pad_token_id": 0, "use_cache": True},
        {"stop": ["never to be said"], "logits_processor": Counting()},
        {"stop": ("never", "to be said"), "logits_processor": [Counting()]},
    ):
        assert llm.generate(ids, max_new_tokens=6, **keywords).token_ids == greedy  # type: ignore[arg-type]
    for keywords in (
        {"max_new_tokens": np.int64(6), "temperature": np.float32(0.5), "seed": np.int64(3)},
        {"max_tokens": 6, "temperature": 0.5, "seed": torch.tensor(3), "do_sample": True},
        {"max_length": 10, "temperature": 0.5, "seed": 3},
        {"max_completion_tokens": 6, "temperature": 0.5, "seed": 3, "stop_strings": "never to be said"},
    ):
        assert llm.generate(ids, **keywords).token_ids == drawn  # type: ignore[arg-type]


@pytest.mark.parametrize(("keywords", "message"), [
    ({"stop": 5}, "stop must be a string or a list of strings, it is of type int"),
    ({"max_new_tokens": 0}, "max_new_tokens must be a whole number, 1 or more, got 0"),
    ({"temperature": -1}, "temperature must be 0 or more, got -1"),
    ({"logits_processor": "none"}, "logits_processor must hold callables"),
    ({"do_sample": True}, r"do_sample=True needs a temperature above 0: write temperature=1.0"),
    ({"do_sample": False, "temperature": 0.7}, "do_sample=False contradicts temperature=0.7"),
    ({"max_tokens": 5, "max_new_tokens": 5}, "max_tokens is called max_new_tokens here: write only one of them"),
    ({"max_length": 3}, "max_length counts the prompt's 4 tokens too: write max_new_tokens"),
    ({"num_return_sequences": 3}, r"is not a keyword of eyas: write llm.generate\(prompt, n=...\)"),
    ({"drafting": "on"}, "drafting must be auto, off or a number of draft tokens, 1 or more; got 'on'"),
    ({"prediction": [4000]}, "prediction: token id 4000 is outside"),
    ({"num_beams": 4}, "without beams"),
    ({"tempurature": 1}, "unknown sampling parameter 'tempurature'; did you mean temperature"),
    ({"sampling_params": {"temperature": 1}}, "sampling_params is not a keyword of eyas: give its fields"),
    ({"presence_penalty": 3}, "presence_penalty must be from -2 to 2"),
    ({"logit_bias": {7: 200}}, "the bias of token 7 must be from -100 to 100"),
    ({"logit_bias": {4000: 1}}, "logit_bias: token id 4000 is outside the target's vocabulary"),
    ({"min_tokens": 9, "max_new_tokens": 8}, r"min_tokens must be from 0 to max_new_tokens \(8\), got 9"),
    ({"stop_token_ids": 7}, "stop_token_ids is a list of token ids"),
    ({"logprobs": 400}, "logprobs must be from 0 to the size of the vocabulary"),
    ({"top_logprobs": 5}, "top_logprobs is not a keyword of eyas: logprobs=5 lists"),
])  # fmt: skip
def test_bad_keywords(llm: LLM, keywords: dict[str, Any], message: str) -> None:
    """Guards one clear line, which says what to write, for values and names that have no meaning here."""
    with pytest.raises(EyasError, match=message) as caught:
        llm.generate([20, 30, 40, 50], **keywords)
    assert "\n" not in str(caught.value)


def test_log_probabilities(llm: LLM) -> None:
    """Guards results, pieces and batches: one entry for each new token, and none where nobody asks."""
    prompt = [5, 9, 100, 3, 77, 12]
    result = llm.generate(prompt, max_new_tokens=9, logprobs=2, prompt_logprobs=1)
    assert [entry.token for entry in result.logprobs] == list(result.token_ids)
    assert [len(entry.top) for entry in result.logprobs] == [2] * len(result.token_ids)
    assert [entry and entry.token for entry in result.prompt_logprobs] == [None, *prompt[1:]]
    with torch.no_grad():
        logits_TV = llm.target.model(torch.tensor([[*prompt, *result.token_ids]]), use_cache=False).logits[0]
    for entry, logp_V in zip([*result.prompt_logprobs[1:], *result.logprobs], logits_TV.log_softmax(-1), strict=False):
        assert entry.logprob == pytest.approx(float(logp_V[entry.token]), abs=1e-5)
    pieces = list(llm.stream(prompt, max_new_tokens=9, logprobs=2))
    assert [[entry.token for entry in piece.logprobs] for piece in pieces] == [list(p.token_ids) for p in pieces]
    free = llm.generate(prompt, max_new_tokens=9)
    assert (free.logprobs, free.prompt_logprobs, free.token_ids) == (None, None, result.token_ids)
    two = llm.generate([prompt, prompt[:3]], max_new_tokens=4, logprobs=0, batch_size=2)
    assert [[e.top for e in r.logprobs or ()] for r in two] == [[()] * 4, [()] * 4]


def test_a_processor_that_raises_names_itself(llm: LLM) -> None:
    """Guards `generate` and `stream` alike: one line, the exception behind it; the next request is served."""

    def fails(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise ValueError("y")

    for run in (llm.generate, lambda *args, **kw: list(llm.stream(*args, **kw))):
        with pytest.raises(InputError, match="processor fails raised ValueError: y") as told:
            run([5, 6], logits_processor=fails)
        assert isinstance(told.value.__cause__, ValueError)
        assert llm.generate([5, 6], max_new_tokens=3).token_ids


OF_TRANSFORMERS = "a target is a folder, a hub id or a causal language model of transformers, not Linear"


@pytest.mark.parametrize(("arguments", "message"), [
    ({"target": torch.nn.Linear(2, 2)}, OF_TRANSFORMERS),
    ({"draft": torch.nn.Linear(2, 2)}, "a draft is a folder, a hub id or a Drafter, not Linear"),
    ({"tokenizer": 5}, "a tokenizer is a folder, a hub id or a tokenizer of transformers, not int"),
    ({"target": None, "device_map": "auto"}, "together with the folder or hub id of a target"),
    ({"device_map": "cpu", "device": "cpu"}, "write one of them"),
    ({"torch_dtype": "float32", "dtype": "float32"}, "torch_dtype is called dtype here"),
    ({"dtype": torch.float64}, "unknown dtype 'float64'"),
    ({"dtype": 32}, "dtype must be a name such as 'float32' or a torch dtype, got 32"),
    ({"device": "gpu:0"}, "device 'gpu:0' cannot be used here"),
    ({"load_in_8bit": True}, "load_in_8bit belongs to transformers: load the model with it"),
    ({"kernel": "off"}, "unknown option 'kernel'; did you mean kernels"),
    ({"kernels": "fast"}, "unknown kernels 'fast'"),
])  # fmt: skip
def test_bad_loads(folders: tuple[Path, Path], arguments: dict[str, Any], message: str) -> None:
    """Guards `load`: values of another kind and names of transformers."""
    with pytest.raises(EyasError, match=message):
        eyas.load(**{"target": folders[0], **arguments})


def test_tools_and_variables_of_the_chat_template(target: Target) -> None:
    """Guards against tools and variables that change nothing: they are in the prompt, or refused."""
    tokenizer, tools = toy_tokenizer.byte_tokenizer(), [{"type": "function", "function": {"name": "now"}}]
    llm = LLM(target, Method.random(target), tokenizer)
    with pytest.raises(InputError, match="no place for tools"):
        llm.generate("Hi", tools=tools)
    tokenizer.chat_template = "{{ tools | tojson if tools }}{{ slow }}" + str(tokenizer.chat_template)
    asked = {"tools": tools, "chat_template_kwargs": {"slow": "slowly"}}
    request, _ = llm.request("Hi", **asked)  # type: ignore[arg-type]
    assert request.prompt == tuple(render(tokenizer, [{"role": "user", "content": "Hi"}], **asked))
    assert request.prompt != llm.ids("Hi")
    for prompt, raw in (("Hi", True), (llm.ids("Hi"), False)):
        for name in asked:
            with pytest.raises(InputError, match=f"{name} need"):
                llm.generate(prompt, raw=raw, **{name: asked[name]})

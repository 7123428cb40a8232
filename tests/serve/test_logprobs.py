"""Log-probabilities and echo, as lm-eval and OpenAI's client read them."""

import random
from itertools import chain
from typing import Any

import pytest
import torch

import eyas
from eyas.core.logprobs import TokenLogprobs
from eyas.serve.completions import Completion
from eyas.serve.fields import GenerationBody
from eyas.serve.logprobs import TokenTexts
from eyas.serve.records import Delta, Job
from serving import PROMPTS, Running
from test_text import TOKENIZERS
from toy_tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer(None)
EURO = "\N{EURO SIGN}"
A, B, E1, E2, E3 = TOKENIZER("ab" + EURO)["input_ids"]  # a token is a byte
VOCAB = len(TOKENIZER)
TEXTS = TokenTexts(TOKENIZER, VOCAB + 1)  # one id more than the tokenizer has, as in padded vocabularies


def value(token: int, logprob: float, *top: tuple[int, float]) -> TokenLogprobs:
    return TokenLogprobs(token, logprob, top)


def test_parts_of_a_character() -> None:
    """A third of a euro sign has a byte, and a replacement character as text; special and missing
    tokens have a text too."""
    made = TEXTS.chat([value(E1, -1.0, (A, -0.5), (E1, -1.0))], 1)
    (entry,) = made["content"]
    assert entry["bytes"] == [0xE2]
    assert entry["token"] == "\N{REPLACEMENT CHARACTER}"
    assert entry["top_logprobs"] == [{"token": "a", "logprob": -0.5, "bytes": [97]}]
    assert TEXTS.text_of(1) == TOKENIZER.convert_ids_to_tokens(1)
    assert TEXTS.text_of(VOCAB) == str(VOCAB)
    assert b"".join(map(TEXTS.bytes_of, (A, E1, E2, E3))).decode() == "a" + EURO


def test_a_completion() -> None:
    """Offsets count characters; the token itself is always among the top ones, as the same float;
    no value is infinite."""
    third = -1 / 3
    made = TEXTS.completion(
        [A, B, A], [None, value(B, third, (B, third), (A, -2.0)), value(A, float("-inf"), (B, -0.1))], [5, 6, 7]
    )
    assert made["tokens"] == ["a", "b", "a"]
    assert made["text_offset"] == [5, 6, 7]
    assert made["token_logprobs"] == [None, third, -9999.0]
    assert made["top_logprobs"] == [None, {"b": third, "a": -2.0}, {"b": -0.1, "a": -9999.0}]


@pytest.mark.parametrize("kind", ["byte_level", "llama", "gemma", "metaspace_bytes", "unigram"])
def test_offsets_are_places_in_the_text(kind: str) -> None:
    """Guards offsets after characters of several tokens, in a run of byte tokens, after special tokens,
    and where a decoder strips the text's first space: text[offset:] begins with each token that is
    whole text, but for that space."""
    tokenizer = TOKENIZERS[kind]
    texts, rng = TokenTexts(tokenizer, len(tokenizer)), random.Random(1)
    words = ["the cat", "日本語", "😀😀", " é", "<s>", "</s>", "ab", "\n", " sat"]
    for _ in range(30):
        prompt = "".join(rng.choices(words[:4] + words[6:] if kind != "unigram" else words[6:], k=6))
        parts = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in rng.choices(words, k=7))
        for tokens, before in ((tokenizer(prompt)["input_ids"], ""), ([*chain.from_iterable(parts)], prompt)):
            text = before + tokenizer.decode(tokens, skip_special_tokens=True)
            read = texts.offsets(before or text, len(before)).read
            offsets = [read(token) for token in tokens]
            assert offsets == sorted(offsets)
            for token, offset in zip(tokens, offsets, strict=True):
                own = texts.text_of(token)
                if texts.has_text(token) and "\ufffd" not in own:
                    assert text.startswith((own, own.lstrip()), offset), (text, own, offset)
            assert len(before) <= offsets[0] <= offsets[-1] <= len(text)


def test_a_stream_goes_on_where_it_was() -> None:
    """Offsets of a stream's chunks follow each other, each sequence for itself; the prompt comes
    with the first chunk."""
    dialect = Completion(Job(((A, B), (B,)), {}), "m", "x", GenerationBody(), TEXTS, logprobs=True, echoes=["ab", "b"])
    first = Delta(0, "a", (A,), prefill=True, logprobs=(value(A, -1.0),), prompt_logprobs=(None, value(B, -2.0)))
    other = Delta(1, "b", (B,), prefill=True, logprobs=(value(B, -1.0),), prompt_logprobs=(None,))
    second = Delta(0, "bb", (B, B), "length", logprobs=(value(B, -1.0), value(B, -1.5)))
    chunks = [choice for delta in (first, other, second) for choice in dialect.chunk_choices(delta)]
    assert [chunk["text"] for chunk in chunks] == ["aba", "bb", "bb"]
    assert [chunk["logprobs"]["text_offset"] for chunk in chunks] == [[0, 1, 2], [0, 1], [3, 4]]
    assert [chunk["logprobs"]["token_logprobs"] for chunk in chunks] == [[None, -2.0, -1.0], [None, -1.0], [-1.0, -1.5]]


def post(server: Running, **body: object) -> dict[str, object]:
    response = server.post("/v1/completions", {"temperature": 0, **body})
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return dict(choice)


def test_echo(server: Running, llm: eyas.LLM) -> None:
    """The prompt's text comes first; with max_tokens 0 it comes alone."""
    own = llm.generate(PROMPTS[0], raw=True, max_new_tokens=8).text
    assert post(server, prompt=PROMPTS[0], max_tokens=8, echo=True)["text"] == PROMPTS[0] + own
    alone = post(server, prompt=PROMPTS[0], max_tokens=0, echo=True)
    assert (alone["text"], alone["finish_reason"]) == (PROMPTS[0], "length")


def test_log_likelihoods_as_lm_eval_asks_for_them(server: Running, llm: eyas.LLM) -> None:
    """Ids with echo and one token: the values are the model's log-softmax, and equality with the
    largest says what is greedy."""
    ids = list(llm.ids("The weather today is nice.", raw=True))
    made = post(server, prompt=[ids], max_tokens=1, logprobs=1, echo=True, seed=1234)["logprobs"]
    assert isinstance(made, dict)
    assert len(made["tokens"]) == len(made["token_logprobs"]) == len(made["top_logprobs"]) == len(ids) + 1
    with torch.inference_mode():
        scores_TV = llm.target.model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    assert made["token_logprobs"][0] is None
    for i, token in enumerate(ids[1:], start=1):
        logprob, top = made["token_logprobs"][i], made["top_logprobs"][i]
        assert logprob == pytest.approx(float(scores_TV[i - 1, token]), abs=1e-3)
        assert (logprob == max(top.values())) == (int(scores_TV[i - 1].argmax()) == token)


def test_logprobs_of_a_chat(server: Running) -> None:
    """OpenAI's client reads them, whole and streamed, one entry for each token; greedy tokens are
    the most probable ones."""
    asked: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 12, "logprobs": True, "top_logprobs": 3}
    asked["messages"] = [{"role": "user", "content": PROMPTS[0]}]
    whole = server.client().chat.completions.create(**asked)
    entries = whole.choices[0].logprobs.content
    assert len(entries) == whole.usage.completion_tokens
    for entry in entries:
        first, _, _ = entry.top_logprobs
        assert (first.token, first.logprob) == (entry.token, entry.logprob)
    choices = [
        choice for chunk in server.client().chat.completions.create(stream=True, **asked) for choice in chunk.choices
    ]
    streamed = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    assert [(entry.token, entry.logprob) for entry in streamed] == [(entry.token, entry.logprob) for entry in entries]

"""The keywords of `generate` by which OpenAI's and vLLM's interfaces ask for laws and log-probabilities."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import eyas
import zoo
from eyas.core.engine import Request
from eyas.core.sampling import Sampling
from eyas.errors import InputError, OptionError
from reference import plain_decode

PROMPT = [5, 9, 100, 3, 77, 12]


@pytest.fixture(scope="module")
def llm() -> eyas.LLM:
    return eyas.load(zoo.FAMILIES["llama"](), method="suffix", kernels="off")


def test_laws(llm: eyas.LLM) -> None:
    """Guards the way of each keyword to the engine: texts are those of plain decoding, written out."""
    law = {"temperature": 0.8, "presence_penalty": 1.5, "frequency_penalty": -0.5, "seed": 3}
    sampling = Sampling(**law, logit_bias=((7, 9.0), (9, -100.0)))  # type: ignore[arg-type]
    expected = plain_decode(llm.target.model, Request(tuple(PROMPT), 16, sampling))
    asked: dict[str, Any] = {**law, "max_new_tokens": 16, "ignore_eos": True}
    for bias in ({7: 9, 9: -100.0}, {"9": -100, "7": 9.0}, [(9, -100), (7, 9)]):
        assert list(llm.generate(PROMPT, logit_bias=bias, **asked).token_ids) == expected
    for token in expected[3:6]:
        stops = {**asked, "stop_token_ids": [token], "logit_bias": {7: 9, 9: -100}}
        first = llm.generate(PROMPT, **stops)
        assert list(first.token_ids) == expected[: expected.index(token) + 1]
        assert first.finish_reason == "stop"
        later = llm.generate(PROMPT, min_new_tokens=len(first.token_ids), **stops)
        assert list(later.token_ids[: len(first.token_ids) - 1]) == expected[: len(first.token_ids) - 1]
        assert token not in later.token_ids[: len(first.token_ids)]


def test_log_probabilities(llm: eyas.LLM) -> None:
    """Guards results, pieces and batches: one entry for each new token, and none where nobody asks."""
    result = llm.generate(PROMPT, max_new_tokens=9, logprobs=2, prompt_logprobs=1)
    assert result.logprobs is not None
    assert result.prompt_logprobs is not None
    assert [entry.token for entry in result.logprobs] == list(result.token_ids)
    assert [len(entry.top) for entry in result.logprobs] == [2] * len(result.token_ids)
    assert [entry and entry.token for entry in result.prompt_logprobs] == [None, *PROMPT[1:]]
    with torch.no_grad():
        logits_TV = llm.target.model(torch.tensor([[*PROMPT, *result.token_ids]]), use_cache=False).logits[0]
    for entry, logp_V in zip([*result.prompt_logprobs[1:], *result.logprobs], logits_TV.log_softmax(-1), strict=False):
        assert entry is not None
        assert entry.logprob == pytest.approx(float(logp_V[entry.token]), abs=1e-5)
    pieces = list(llm.stream(PROMPT, max_new_tokens=9, logprobs=2))
    assert [entry.token for piece in pieces for entry in piece.logprobs] == list(result.token_ids)
    assert [len(piece.logprobs) for piece in pieces] == [len(piece.token_ids) for piece in pieces]
    free = llm.generate(PROMPT, max_new_tokens=9)
    assert (free.logprobs, free.prompt_logprobs, free.token_ids) == (None, None, result.token_ids)
    two = llm.generate([PROMPT, PROMPT[:3]], max_new_tokens=4, logprobs=0, batch_size=2)
    assert [[e.top for e in r.logprobs or ()] for r in two] == [[()] * 4, [()] * 4]


@pytest.mark.parametrize(("keywords", "message"), [
    ({"presence_penalty": 3}, "presence_penalty must be from -2 to 2"),
    ({"frequency_penalty": "much"}, "frequency_penalty must be from -2 to 2"),
    ({"logit_bias": {"a": 1}}, "logit_bias maps token ids to numbers"),
    ({"logit_bias": 7}, "logit_bias maps token ids to numbers"),
    ({"logit_bias": {7: 200}}, "the bias of token 7 must be from -100 to 100"),
    ({"logit_bias": {4000: 1}}, "logit_bias: token id 4000 is outside the target's vocabulary"),
    ({"min_tokens": 1.5}, "min_tokens must be a whole number, 0 or more"),
    ({"min_tokens": 9, "max_new_tokens": 8}, r"min_tokens must be from 0 to max_new_tokens \(8\), got 9"),
    ({"min_tokens": 1, "min_new_tokens": 1}, "min_new_tokens is called min_tokens here"),
    ({"stop_token_ids": 7}, "stop_token_ids is a list of token ids"),
    ({"stop_token_ids": "77"}, "stop_token_ids is a list of token ids"),
    ({"logprobs": True}, "logprobs must be a whole number"),
    ({"logprobs": 161}, "logprobs must be from 0 to the size of the vocabulary"),
    ({"prompt_logprobs": -1}, "prompt_logprobs must be a whole number, 0 or more"),
    ({"top_logprobs": 5}, "top_logprobs is not a keyword of eyas: logprobs=5 lists"),
])  # fmt: skip
def test_what_cannot_be_gets_one_line(llm: eyas.LLM, keywords: dict[str, Any], message: str) -> None:
    """Guards against tracebacks, and against values that are ignored."""
    with pytest.raises((OptionError, InputError), match=message) as told:
        llm.generate(PROMPT, **{"max_new_tokens": 8, **keywords})
    assert "\n" not in str(told.value)


def test_a_processor_that_raises_names_itself(llm: eyas.LLM) -> None:
    """Guards `generate` and `stream` alike: one line, the exception behind it; the next request is served."""

    def fails(ids: Tensor, scores: Tensor) -> Tensor:
        raise KeyError("x") if ids.shape[1] > len(PROMPT) + 1 else ValueError("y")

    for run in (llm.generate, lambda *args, **kw: list(llm.stream(*args, **kw))):
        with pytest.raises(InputError, match="processor fails raised ValueError: y") as told:
            run(PROMPT, logits_processor=fails)
        assert isinstance(told.value.__cause__, ValueError)
        assert llm.generate(PROMPT, max_new_tokens=3).token_ids

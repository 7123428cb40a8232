"""`suffix` of /v1/completions and llama.cpp's /infill: the middle of a text."""

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import eyas
from eyas.serve import middle
from serving import Running, events

BEFORE, AFTER = "I want to book a table", " in San Jose tonight."


def tokenizer(*marks: str, special: bool, begins: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer of words with these marks; `begins`: a first token for every text."""
    words = {name: number for number, name in enumerate(["<unk>", "<s>", "a", "b", "c", "x.py", "="])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_tokens([AddedToken(mark, special=special) for mark in marks])
    if begins:
        from tokenizers.processors import TemplateProcessing

        backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>")


@pytest.mark.parametrize("marks", middle.MARKS, ids=lambda marks: marks[0])
@pytest.mark.parametrize("special", [False, True])
def test_prompts(marks: tuple[str, ...], special: bool) -> None:
    """Guards the order of the parts for every family of marks. What ends the middle is cut off: tokens that are
    special have no text, others have one."""
    made = middle.middle_of(tokenizer(*marks, "<|file_sep|>", special=special, begins=True), "a b", "c")
    assert made.ids == (1, 7, 2, 3, 8, 4, 9)
    ends = {"<|file_sep|>", *marks}
    assert set(made.stop) == (set() if special else ends)
    assert made.stop_token_ids == (frozenset({7, 8, 9, 10}) if special else frozenset())


@pytest.fixture
def filling(server: Running, monkeypatch: pytest.MonkeyPatch) -> Running:
    """A server that takes three tokens of the embedded model for the marks."""
    monkeypatch.setattr(middle, "MARKS", (("<|system|>", "<|user|>", "<|assistant|>"),))
    return server


@pytest.mark.slow
def test_both_routes(filling: Running, llm: eyas.LLM) -> None:
    """The text is that of the whole prompt; streams add up to it."""
    assert llm.tokenizer is not None
    made = middle.middle_of(llm.tokenizer, BEFORE, AFTER)
    own = llm.generate(list(made.ids), max_new_tokens=12, stop_token_ids=sorted(made.stop_token_ids))
    asked = {"prompt": BEFORE, "suffix": AFTER, "max_tokens": 12, "temperature": 0}
    text = filling.post("/v1/completions", asked).json()["choices"][0]["text"]
    body = {
        "input_prefix": BEFORE,
        "input_suffix": AFTER,
        "n_predict": 12,
        "samplers": ["top_k"],
        "t_max_predict_ms": 9,
    }
    response = filling.post("/infill", {"temperature": 0, **body})
    whole = response.json()
    assert text == whole["content"] == own.text
    assert (whole["stop"], whole["stop_type"]) == (True, "limit" if own.finish_reason == "length" else "eos")
    assert response.headers["x-eyas-ignored-fields"] == "samplers,t_max_predict_ms"
    chunks = [
        one for one in events(filling.post("/infill", {"temperature": 0, "stream": True, **body})) if one != "[DONE]"
    ]
    assert "".join(chunk["content"] for chunk in chunks) == text
    assert [chunk["stop"] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]

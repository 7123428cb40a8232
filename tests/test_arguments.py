"""Sampling parameters in one object, as users of vLLM, SGLang and transformers write them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from transformers import GenerationConfig

import eyas
import zoo
from eyas import tiny
from eyas.arguments import GenerateKeywords, generate_keywords, with_objects
from eyas.errors import EyasError


class SamplingParams:
    """The fields and defaults of vLLM's, which is a struct of msgspec."""

    DEFAULTS: ClassVar[dict[str, Any]] = {
        "n": 1, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "temperature": 1.0, "top_p": 1.0, "top_k": 0,
        "min_p": 0.0, "seed": None, "stop": [], "stop_token_ids": [], "ignore_eos": False, "max_tokens": 16, "min_tokens": 0,
        "logprobs": None, "prompt_logprobs": None, "detokenize": True, "skip_special_tokens": True, "spaces_between_special_tokens": True,
        "include_stop_str_in_output": False, "output_kind": 0, "skip_clone": False, "structured_outputs": None, "logit_bias": None,
        "allowed_token_ids": None, "extra_args": None, "bad_words": [], "thinking_token_budget": None, "_all_stop_token_ids": set(),
    }  # fmt: skip
    __struct_fields__ = tuple(DEFAULTS)

    def __init__(self, **given: Any) -> None:
        self.__dict__.update({**self.DEFAULTS, **given})


@dataclass
class Params:
    temperature: float = 0.5
    max_new_tokens: int = 7
    stop: list[str] = field(default_factory=list)


CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"sampling_params": SamplingParams()}, {"temperature": 1.0, "max_new_tokens": 16}),
    (
        {"sampling_params": SamplingParams(temperature=0.0, top_k=-1, stop=["x"])},
        {"temperature": 0.0, "top_k": 0, "stop": ["x"]},
    ),
    (
        {"sampling_params": SamplingParams(seed=7, min_tokens=3, logit_bias={5: 2.0})},
        {"seed": 7, "min_tokens": 3, "logit_bias": ((5, 2.0),)},
    ),
    (
        {"sampling_params": SamplingParams(), "temperature": 0.25, "max_new_tokens": 3},
        {"temperature": 0.25, "max_new_tokens": 3},
    ),
    ({"sampling_params": Params()}, {"temperature": 0.5, "max_new_tokens": 7}),
    (
        {"sampling_params": {"max_new_tokens": 4, "top_k": 1 << 30, "sampling_seed": 5}},
        {"max_new_tokens": 4, "top_k": 0, "seed": 5},
    ),
    (
        {"sampling_params": {"json_schema": "{}", "temperature": 0}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": "{}"}}},
    ),
    ({"sampling_params": {"ebnf": 'root ::= "a"'}}, {"grammar": 'root ::= "a"'}),
    (
        {"sampling_params": SamplingParams(structured_outputs=SimpleNamespace(regex="[0-9]", choice=None))},
        {"regex": "[0-9]"},
    ),
    (
        {"sampling_params": SamplingParams(structured_outputs={"json_object": True})},
        {"response_format": {"type": "json_object"}},
    ),
    ({"generation_config": GenerationConfig()}, {"temperature": 0.0, "max_new_tokens": None}),
    ({"generation_config": GenerationConfig(temperature=0.6, top_p=0.9)}, {"temperature": 0.0, "top_p": 1.0}),
    ({"generation_config": GenerationConfig(do_sample=True)}, {"temperature": 1.0, "top_k": 50}),
    (
        {"generation_config": GenerationConfig(do_sample=True, top_k=0, min_p=0.1, min_new_tokens=2)},
        {"top_k": 0, "min_p": 0.1, "min_tokens": 2},
    ),
    (
        {"generation_config": GenerationConfig(eos_token_id=[3, 4], pad_token_id=0)},
        {"ignore_eos": True, "stop_token_ids": (3, 4)},
    ),
    (
        {"generation_config": GenerationConfig(max_new_tokens=9, max_length=20, stop_strings="x")},
        {"max_new_tokens": 9, "stop": "x"},
    ),
]


@pytest.mark.parametrize(("given", "expected"), CASES)
def test_objects_become_keywords(given: dict[str, Any], expected: dict[str, Any]) -> None:
    """A value that is lost, or a default of ours where the object says otherwise, would be another
    law than was asked for."""
    keywords = generate_keywords(given)
    assert {name: keywords[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"sampling_params": SamplingParams(bad_words=["x"])}, "sampling_params.bad_words has no equivalent"),
        ({"sampling_params": SamplingParams(include_stop_str_in_output=True)}, "include_stop_str_in_output"),
        ({"sampling_params": SamplingParams(allowed_token_ids=[1])}, "allowed_token_ids"),
        ({"sampling_params": {"temprature": 1}}, "temprature has no equivalent.*temperature"),
        (
            {"sampling_params": SamplingParams(structured_outputs={"structural_tag": "x"})},
            "structured_outputs.structural_tag",
        ),
        ({"sampling_params": 5}, "must be an object with fields"),
        ({"sampling_params": SamplingParams}, "not the class SamplingParams"),
        ({"generation_config": GenerationConfig(num_beams=2)}, "generation_config.num_beams has no equivalent"),
        ({"generation_config": GenerationConfig(no_repeat_ngram_size=3)}, "no_repeat_ngram_size"),
        ({"generation_config": GenerationConfig(), "sampling_params": {}}, "say the same"),
        ({"sampling_params": {"temperature": -1}, "stop_token_ids": "x"}, "stop_token_ids"),
    ],
)
def test_what_means_something_else_is_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(EyasError, match=reason) as caught:
        generate_keywords(given)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_answers_by_objects() -> None:
    """The same ids as by keywords, `n` included; and a generation config means to `LLM.generate`
    what it means to `model.generate`."""
    model, ids = zoo.tiny("llama"), [5, 6, 7, 5, 6]
    llm = eyas.load(model, tokenizer=False, tree="fixed")
    by_keywords = llm.generate(ids, n=2, temperature=0.9, top_p=0.8, seed=3, max_new_tokens=8)
    params = SamplingParams(n=2, temperature=0.9, top_p=0.8, seed=3, max_tokens=8)
    assert [one.token_ids for one in llm.generate(ids, sampling_params=params)] == [
        one.token_ids for one in by_keywords
    ]
    assert len(llm.generate([ids, ids], sampling_params=params, n=3)[0]) == 3
    config = GenerationConfig(max_new_tokens=12, eos_token_id=[40, 41], repetition_penalty=1.3, min_new_tokens=4)
    own = model.generate(torch.tensor([ids]), config)[0, 5:].tolist()
    assert list(llm.generate(ids, generation_config=config).token_ids) == own
    assert list(llm.stream(ids, generation_config=config))[-1].finish_reason is not None
    with pytest.raises(EyasError, match="several answers"):
        llm.stream(ids, sampling_params=params)
    assert with_objects({"temperature": None}) == {"temperature": None}


PAGE = (Path(__file__).parents[1] / "docs" / "names.md").read_text()


def test_the_table_of_names() -> None:
    """Every name of ours in the table of sampling is a keyword."""
    sampling = PAGE.split("## Sampling")[1].split("## Loading")[0]
    ours = [
        name
        for line in sampling.splitlines()[4:]
        if line[:1] == "|"
        for name in re.findall(r"`(\w+)`", line.split("|")[1])
    ]
    assert len(ours) > 20
    assert set(ours) - {"n"} <= GenerateKeywords.__annotations__.keys()


@pytest.mark.slow
@pytest.mark.skipif(
    not (tiny.FOLDER / tiny.PACKED).exists(), reason="the embedded model's weights are not in this checkout"
)
def test_the_page_runs() -> None:
    """A newcomer copies it. The three requests are one: those with a seed get the same text."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {}
    lines = [
        f"r{number} = {line}" if line.startswith("llm.generate") else line
        for number, line in enumerate(code.splitlines())
    ]
    exec(compile("\n".join(lines), "docs/names.md", "exec"), names)
    first, _, last = (value for name, value in names.items() if re.fullmatch(r"r\d+", name))
    assert first.token_ids == last.token_ids

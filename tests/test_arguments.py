"""Keywords of generate, and the names of other libraries."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from eyas.arguments import GenerateKeywords, as_logit_bias, generate_keywords
from eyas.errors import EyasError, OptionError
from golden import needs_weights


@pytest.mark.parametrize(("given", "expected"), [
    ({"max_tokens": 5, "min_new_tokens": 2}, {"max_new_tokens": 5, "min_tokens": 2}),
    ({"stop_strings": "x", "max_completion_tokens": 3}, {"stop": "x", "max_new_tokens": 3}),
    ({"temperature": None, "do_sample": False}, {"temperature": 0.0}),
])  # fmt: skip
def test_names_that_mean_the_same(given: dict[str, Any], expected: dict[str, Any]) -> None:
    """Guards people who come from transformers and vLLM."""
    assert generate_keywords(given).items() >= expected.items()


@pytest.mark.parametrize(("given", "reason"), [
    ({"sampling_params": {"temperature": 1}}, "sampling_params is not a keyword of eyas: give its fields"),
    ({"generation_config": object()}, "generation_config is not a keyword of eyas: give its fields"),
    ({"max_tokens": 3, "max_new_tokens": 3}, "max_tokens is called max_new_tokens here"),
    ({"do_sample": True}, "needs a temperature above 0"),
    ({"stop_token_ids": "x"}, "stop_token_ids"),
])  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(EyasError, match=reason) as caught:
        generate_keywords(given)
    assert "\n" not in str(caught.value)


PAGE = (Path(__file__).parents[1] / "docs" / "guide" / "coming_from.md").read_text()


def test_the_table_of_names() -> None:
    """Every name of ours in the table of sampling is a keyword."""
    sampling = PAGE.split("## Sampling")[1].split("## Loading")[0]
    cells = [line.split("|")[1] for line in sampling.splitlines()[4:] if line[:1] == "|"]
    ours = re.findall(r"`(\w+)`", "".join(cells))
    assert len(ours) > 20
    assert set(ours) - {"n"} <= GenerateKeywords.__annotations__.keys()


@pytest.mark.slow
@needs_weights
def test_the_page_runs() -> None:
    """A newcomer copies it. The two requests are one."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {}
    number = itertools.count()
    code = re.sub(r"^(?=llm\.generate)", lambda _: f"r{next(number)} = ", code, flags=re.MULTILINE)
    exec(compile(code, "docs/guide/coming_from.md", "exec"), names)
    first, last = (value for name, value in names.items() if re.fullmatch(r"r\d+", name))
    assert first.token_ids == last.token_ids


@pytest.mark.parametrize("key", ["5_0", " 5", "+5", "\u0665", "5.0", 5.7, True, None])
def test_keys_of_a_logit_bias_are_token_ids(key: object) -> None:
    """Bug: what `int` reads as a number of its own kind moves another token than was meant."""
    assert as_logit_bias({"50": 1, 7: 2}) == ((7, 2.0), (50, 1.0))
    with pytest.raises(OptionError, match="logit_bias maps token ids to numbers"):
        as_logit_bias({key: 1})

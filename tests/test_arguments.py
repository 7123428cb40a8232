"""Keywords of generate, and the names of other libraries."""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from eyas.arguments import as_logit_bias
from eyas.errors import OptionError
from golden import needs_weights

PAGE = (Path(__file__).parents[1] / "docs" / "guide" / "coming_from.md").read_text()


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

"""`eyas methods`: the ways to draft that this installation knows."""

from __future__ import annotations

import json
import shutil
import textwrap
from typing import Annotated

from cyclopts import Parameter

from eyas.cli._options import AS_JSON, Fields

GROUP = "Information"
OWN_METHOD = "A method of your own: --method mypackage.mymodule, a module that defines Method, a subclass of eyas.drafters.Drafter."
EXAMPLES = """
eyas methods  # all of them, with their options
eyas methods eagle3  # one of them, with its options
"""


def command(
    name: Annotated[str | None, "Method", Parameter(help="Only this method, with the help of its options.")] = None,
    /,
    *,
    as_json: AS_JSON = False,
) -> None:
    """List the methods, with their options."""
    from eyas import drafters

    described = [_describe(method) for method in ([name] if name else drafters.names())]
    if as_json:
        print(json.dumps({"methods": described}))
        return
    for method in described:
        print(_text(method, in_full=name is not None))
    if name is None:
        print(_fold(OWN_METHOD))


def _describe(name: str) -> Fields:
    from eyas import drafters
    from eyas.core.options import option_defaults

    method = drafters.find(name)
    return {
        "name": name,
        "summary": method.summary,
        "options": option_defaults(method.Options),
        "needs_head": method.needs_weights,
        "trainable": method.trainable,
    }


def _text(method: Fields, in_full: bool) -> str:
    from eyas import drafters
    from eyas.option_texts import list_options

    kind = "needs a draft head" if method["needs_head"] else "no draft head"
    trainable = "; trainable" if method["trainable"] else ""
    lines = [f"{method['name']}  ({kind}{trainable})", _fold(method["summary"], "    ")]
    options = list(list_options(drafters.find(method["name"]).Options))
    names = {o.name: f"--{o.name.replace('_', '-')} {o.shown_default}".replace(" ", "\0") for o in options}
    if in_full:
        for option in options:
            use = f"{option.use.capitalize()}: " if option.use else ""
            lines += [f"    {names[option.name]}", _fold(use + option.help, "        ")]
    elif options:
        lines.append(_fold("   ".join(names.values()), "    "))
    return "\n".join(lines).replace("\0", " ") + "\n"


def _fold(text: str, indent: str = "") -> str:
    width = max(30, shutil.get_terminal_size().columns)
    return textwrap.fill(
        text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )

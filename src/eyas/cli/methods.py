"""`eyas methods`: the ways to draft that this installation knows."""

from __future__ import annotations

import json
from typing import Any

import rich_click as click

from eyas.cli._options import Command, option

__all__ = ["command"]


@click.command("methods", cls=Command, panel="What is here")
@option("Output", "--json", "as_json", is_flag=True, help="One JSON object as the last line of stdout.")
def command(as_json: bool) -> None:
    """List the methods, with their options."""
    found = [_describe(name) for name in _names()]
    if as_json:
        click.echo(json.dumps({"methods": found}))
        return
    from rich.console import Console
    from rich.table import Column, Table

    table = Table(
        Column("method", no_wrap=True),
        "what it does",
        "options (defaults)",
        "draft head",
        "trainable",
        title="Methods",
        title_justify="left",
    )
    for method in found:
        options = "\n".join(f"--{name} {'' if value is None else value}" for name, value in method["options"].items())
        table.add_row(method["name"], method["summary"], options, *("yes" if method[key] else "no" for key in ("needs_head", "trainable")))
    Console().print(table)
    click.echo("A method of your own: --method mypackage.mymodule, a module that defines Method, a subclass of eyas.drafters.Drafter.")


def _names() -> list[str]:
    from eyas import drafters

    return drafters.names()


def _describe(name: str) -> dict[str, Any]:
    from eyas import drafters
    from eyas.core.drafter import flags

    method = drafters.find(name)
    return {
        "name": name,
        "summary": method.summary,
        "options": flags(method.Options),
        "needs_head": method.needs_weights,
        "trainable": method.trainable,
    }

"""The command line. One file of this folder is one command; its `command` is what runs.

    eyas --help  ->  the group below: finds the files, and turns what went wrong into one line and an exit status
    _options.py      flags that several commands share, and those that methods bring with them
    _load.py         from flags to an LLM; a result as JSON
    _files.py        prompts in, results out, line by line
    _show.py         answers as they come
    _errors.py       which exception becomes which exit status

Importing this module, `eyas --help` and `eyas --version` do not import torch.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any, cast

import rich_click as click

from eyas import __version__
from eyas.cli._errors import Interrupted, status_of
from eyas.cli._options import examples
from eyas.errors import near

__all__ = ["Eyas", "group", "main", "names"]

EXAMPLES = examples(
    ("eyas demo", "plain decoding beside the best method, nothing to download"),
    ('eyas generate "Why is the sky blue?"', "the embedded model"),
    ('eyas generate --target MODEL --draft HEAD "Why ..."', "folders or hub ids"),
    ("eyas doctor", "is everything in place?"),
)


def names() -> list[str]:
    """All commands that stand in this folder."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))


class Eyas(click.RichGroup):
    """A group whose commands are the files of this folder, imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return names()

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in names():
            return None
        return cast(click.Command, importlib.import_module(f"{__name__}.{cmd_name}").command)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if not args[0].startswith("-") and args[0] not in names():
            raise click.UsageError(f"unknown command {args[0]!r}; {near(args[0], names())}", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted() from None

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """As click's, with our own words and exit status when something goes wrong."""

        def run() -> Any:
            return super(Eyas, self).main(*args, standalone_mode=False, **extra)  # type: ignore[call-overload]

        if not standalone_mode:
            return run()
        raise SystemExit(status_of(run))


@click.group(
    cls=Eyas,
    epilog=EXAMPLES,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "rich_help_config": {"text_markup": "rich", "max_width": 140},
    },
)
@click.version_option(__version__, prog_name="eyas", message="%(prog)s %(version)s")
def group() -> None:
    """Makes a language model generate faster [bold]without changing what it says[/].

    A small draft head guesses a tree of next tokens; the untouched model checks all of them in one pass and keeps what it would have
    said itself.
    """


def main() -> None:
    """What the `eyas` command runs."""
    group(prog_name="eyas")

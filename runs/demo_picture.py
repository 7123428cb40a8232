"""Record `eyas demo` on this machine as an animated SVG, docs/pictures/demo.svg.

    python runs/demo_picture.py                          the demo as the README shows it, on an idle machine (a minute)
    python runs/demo_picture.py --output FILE -- --target embedded    other options of `eyas demo`

The picture replays the first prompt as it was, and then shows the last screen. It is refused when the demo says that the
machine was busy, or that texts differ (--anyway keeps it).
"""

from __future__ import annotations

import argparse
import sys
import time
from html import escape
from pathlib import Path
from unittest import mock

from rich.console import Console, Group, RenderableType
from rich.style import Style
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

from eyas.cli import main as eyas
from eyas.files import write_text

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "pictures" / "demo.svg"
WIDTH, HEIGHT = 100, 24  # of the terminal, in characters
CELL, LINE, MARGIN = 8.4, 18, 12  # of the picture, in its units: a character's width, a line's height
FRAME_SECONDS, LAST_SECONDS = 0.25, 8.0
MAX_FRAMES = 14  # of the first prompt
WARNINGS = ("other processes", "differs from plain decoding", "left out", "was slower")
SVG = """<svg viewBox="0 0 {width:.0f} {height:.0f}" xmlns="http://www.w3.org/2000/svg" role="img">
<title>eyas demo: plain decoding and EAGLE-3 answer the same prompts</title>
<style>
text {{ font: 14px Menlo, Consolas, "DejaVu Sans Mono", monospace; white-space: pre }}
.frame {{ visibility: hidden; animation: {seconds:.2f}s step-end infinite }}
@media (prefers-reduced-motion: reduce) {{ .frame {{ animation: none !important }} .last {{ visibility: visible }} }}
{rules}
</style>
<rect width="100%" height="100%" rx="8" fill="#292929"/>
{frames}
</svg>
"""


class Film:
    """Takes the place of rich's Live: keeps views of the first prompt, and prints the last one of every prompt."""

    def __init__(self, console: Console) -> None:
        self.console, self.frames, self.prompts, self.last = console, list[RenderableType](), 0, 0.0

    def __call__(self, **options: object) -> Film:
        self.prompts += 1
        return self

    def __enter__(self) -> Film:
        return self

    def update(self, view: RenderableType, refresh: bool) -> None:
        """Keep a view, below all that was printed before it."""
        self.view = view
        if self.prompts == 1 and time.monotonic() - self.last > FRAME_SECONDS and len(self.frames) < MAX_FRAMES:
            before = self.console.export_text(clear=False, styles=True).rstrip("\n")
            self.frames.append(Group(Text.from_ansi(before), view))
            self.last = time.monotonic()

    def __exit__(self, *error: object) -> None:
        self.console.print(self.view)


def recorded(options: list[str]) -> tuple[list[RenderableType], str]:
    """Run the demo; return views of its screen, and all that it printed."""
    console, real = Console(record=True, force_terminal=True, width=WIDTH, highlight=False), Console
    film = Film(console)

    def made(**given: bool) -> Console:
        return real(**given) if given.get("stderr") else console

    with (
        mock.patch.object(sys, "argv", ["eyas", "demo", *options]),
        mock.patch("rich.console.Console", made),
        mock.patch("rich.live.Live", film),
    ):
        try:
            eyas()
        except SystemExit as ended:
            if ended.code:
                raise
    return [*film.frames, Text.from_ansi(console.export_text(clear=False, styles=True))], console.export_text()


def drawn(view: RenderableType) -> str:
    """Return the text elements of the last lines of a view."""
    console, texts = Console(width=WIDTH, force_terminal=True, color_system="truecolor"), []
    for number, line in enumerate(console.render_lines(view)[-HEIGHT:]):
        column = 0
        for characters, style, _ in line:
            if characters.strip():
                texts.append(element(characters, column, number, style or Style.null()))
            column += len(characters)
    return "".join(texts)


def element(characters: str, column: int, line: int, style: Style) -> str:
    """Return one run of characters in the colours that rich exports a terminal with."""
    colour = style.color.get_truecolor(SVG_EXPORT_THEME) if style.color else SVG_EXPORT_THEME.foreground_color
    fill = "#{:02x}{:02x}{:02x}".format(*colour)
    more = (' font-weight="bold"' if style.bold else "") + (' opacity="0.6"' if style.dim else "")
    place = f'x="{MARGIN + column * CELL:g}" y="{MARGIN + (line + 1) * LINE - 5:g}"'
    length = f'textLength="{len(characters) * CELL:g}"'
    return f'<text {place} {length} fill="{fill}"{more}>{escape(characters)}</text>'


def picture(screens: list[str]) -> str:
    """Return the SVG that shows the screens one after the other, the last one for long."""
    seconds = FRAME_SECONDS * (len(screens) - 1) + LAST_SECONDS
    rules, frames = [], []
    for number, screen in enumerate(screens):
        begin, is_last = 100 * FRAME_SECONDS * number / seconds, number == len(screens) - 1
        end = 100 if is_last else 100 * FRAME_SECONDS * (number + 1) / seconds
        rules.append(
            f"@keyframes f{number} {{ 0% {{ visibility: {'hidden' if number else 'visible'} }} "
            f"{begin:.2f}% {{ visibility: visible }} {end:.2f}% {{ visibility: {'visible' if is_last else 'hidden'} }} "
            "100% { visibility: hidden } }"
        )
        kind = "frame last" if is_last else "frame"
        frames.append(f'<g class="{kind}" style="animation-name: f{number}">{screen}</g>')
    width, height = 2 * MARGIN + WIDTH * CELL, 2 * MARGIN + HEIGHT * LINE
    return SVG.format(width=width, height=height, seconds=seconds, rules="\n".join(rules), frames="\n".join(frames))


def main() -> None:
    """Record the demo and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=PICTURE)
    parser.add_argument("--anyway", action="store_true", help="write the picture of a busy machine, too")
    parser.add_argument("options", nargs="*", help="options of eyas demo, after --")
    args = parser.parse_args()
    views, said = recorded(args.options)
    if any(warning in said for warning in WARNINGS) and not args.anyway:
        sys.exit("no picture: the demo warns, see above")
    write_text(args.output, picture([drawn(view) for view in views]))
    print(f"{args.output}: {args.output.stat().st_size:,} bytes, {len(views)} screens")


if __name__ == "__main__":
    main()

"""Record `eyas demo` on this machine as an animated SVG, docs/pictures/demo.svg.

python runs/demo_picture.py                          the demo as the README shows it, on an idle machine (a minute)
python runs/demo_picture.py --output FILE -- --target embedded    other options of `eyas demo`

The demo runs in a pseudo terminal. The picture replays the screen of the first prompt as it was, and then the last
screen. It is refused when the demo says that the machine was busy, or that texts differ (--anyway keeps it).
"""

from __future__ import annotations

import argparse
import codecs
import fcntl
import os
import re
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from html import escape
from itertools import groupby
from pathlib import Path

from rich.style import Style
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

from eyas.files import write_text

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "pictures" / "demo.svg"
WIDTH, HEIGHT = 100, 24  # of the terminal, in characters
CELL, LINE, MARGIN = 8.4, 18, 12  # of the picture, in its units: a character's width, a line's height
FRAME_SECONDS, LAST_SECONDS = 0.25, 8.0
MAX_FRAMES = 14  # of the first prompt
PART = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)")
CUT = re.compile(r"\x1b(\[[?0-9;]*)?$")
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


@dataclass
class Screen:
    """A terminal that knows what rich writes: lines of (character, style), and a cursor."""

    lines: list[list[tuple[str, str]]] = field(default_factory=lambda: [[]])
    row: int = 0
    column: int = 0
    style: str = ""
    cut: str = ""  # the beginning of a code whose end has not come yet

    def feed(self, text: str) -> None:
        """Write characters and obey the codes among them; an unknown code changes nothing."""
        begun = CUT.search(self.cut + text)
        text, self.cut = (self.cut + text)[: begun and begun.start()], begun[0] if begun else ""
        for match in PART.finditer(text):
            numbers, code, control, characters = match.groups()
            if code == "m":
                self.style = "" if numbers in ("", "0") else f"{self.style}\x1b[{numbers}m"
            elif code == "A":
                self.row = max(0, self.row - int(numbers or 1))
            elif code == "K":
                del self.lines[self.row][0 if numbers == "2" else self.column :]
            elif control == "\r":
                self.column = 0
            elif control == "\n":
                self.row += 1
                self.lines += [[]] * (self.row == len(self.lines))
            for character in characters or "":
                self._put(character)

    def _put(self, character: str) -> None:
        if self.column == WIDTH:
            self.feed("\r\n")
        line = self.lines[self.row]
        line += [(" ", "")] * (self.column - len(line))
        line[self.column : self.column + 1] = [(character, self.style)]
        self.column += 1

    def shown(self) -> list[list[tuple[str, str]]]:
        """Return the last lines, as runs of (style, characters)."""
        last = self.lines[max(0, len(self.lines) - HEIGHT) :]
        return [
            [(style, "".join(c for c, _ in run)) for style, run in groupby(line, key=lambda cell: cell[1])]
            for line in last
        ]


def recorded(options: list[str]) -> Iterator[tuple[float, str]]:
    """Run the demo in a pseudo terminal; yield (seconds, its output so far since the last time)."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
    variables = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(WIDTH), "LINES": str(HEIGHT)}
    command = [sys.executable, "-m", "eyas", "demo", *options]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=variables) as demo:
        os.close(theirs)
        decoder = codecs.getincrementaldecoder("utf-8")()
        with suppress(OSError):  # Linux raises it once the program has ended
            while data := os.read(ours, 65536):
                yield time.monotonic(), decoder.decode(data)
    os.close(ours)
    if demo.returncode:
        raise SystemExit(f"eyas demo ended with status {demo.returncode}")


def drawn(lines: list[list[tuple[str, str]]]) -> str:
    """Return the text elements of a screen."""
    texts = []
    for number, line in enumerate(lines):
        column = 0
        for codes, characters in line:
            if characters.strip():
                spans = Text.from_ansi(f"{codes}{characters}\x1b[0m").spans
                style = Style.parse(str(spans[0].style)) if spans else Style.null()
                texts.append(element(characters, column, number, style))
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


def picture(screens: list[str], seconds: float) -> str:
    """Return the SVG that shows the screens one after the other, the last one for long."""
    total = seconds * (len(screens) - 1) + LAST_SECONDS
    rules, frames = [], []
    for number, screen in enumerate(screens):
        begin, is_last = 100 * seconds * number / total, number == len(screens) - 1
        end = 100 if is_last else 100 * seconds * (number + 1) / total
        rules.append(
            f"@keyframes f{number} {{ 0% {{ visibility: {'hidden' if number else 'visible'} }} "
            f"{begin:.2f}% {{ visibility: visible }} {end:.2f}% {{ visibility: {'visible' if is_last else 'hidden'} }} "
            "100% { visibility: hidden } }"
        )
        kind = "frame last" if is_last else "frame"
        frames.append(f'<g class="{kind}" style="animation-name: f{number}">{screen}</g>')
    width, height = 2 * MARGIN + WIDTH * CELL, 2 * MARGIN + HEIGHT * LINE
    return SVG.format(width=width, height=height, seconds=total, rules="\n".join(rules), frames="\n".join(frames))


def main() -> None:
    """Record the demo and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=PICTURE)
    parser.add_argument("--anyway", action="store_true", help="write the picture of a busy machine, too")
    parser.add_argument("options", nargs="*", help="options of eyas demo, after --")
    args = parser.parse_args()
    screen, taken, last, begun = Screen(), list[str](), 0.0, False
    for seconds, text in recorded(args.options):
        screen.feed(text)
        begun = begun or "1/" in text  # the first prompt
        if begun and seconds - last > FRAME_SECONDS and len(taken) < MAX_FRAMES:
            taken.append(drawn(screen.shown()))
            last = seconds
    said = "\n".join("".join(c for c, _ in line) for line in screen.lines)
    print(said)
    if any(warning in said for warning in WARNINGS) and not args.anyway:
        sys.exit("no picture: the demo warns, see above")
    write_text(args.output, picture([*taken, drawn(screen.shown())], FRAME_SECONDS))
    print(f"{args.output}: {args.output.stat().st_size:,} bytes, {len(taken) + 1} screens")


if __name__ == "__main__":
    main()

"""Sizes of the house: `make lint` prints them; `tests/test_house.py` holds the sizes to a table.

python tests/house.py            sizes beside the table and beside main
python tests/house.py --write    write the table, tests/house.toml, where sizes fell. A sum rises only with a line that
                                 says which issue asked for it: --write "issue 52: 120 lines for the guide"

The table lists every folder and every loose module of each distribution with its code lines (without
docstrings, comments and blank lines), and numbers of the whole that only fall.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from test_architecture import ROOTS, closure_of, imports_of_all, private_imports

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_name("house.toml")
LAYOUT = frozenset({tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT})


def parsed(file: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(file.read_text(encoding="utf-8"))


def code_lines(file: Path) -> tuple[int, int]:
    """Return (lines, tokens) of a file without docstrings, comments and blank lines."""
    text = file.read_text(encoding="utf-8")
    statements = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr))
    strings = [
        node for node in statements if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    prose = {line for node in strings for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    tokens = [
        token
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in LAYOUT and token.string.strip() and token.start[0] not in prose
    ]
    return len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)}), len(tokens)


@dataclass(frozen=True)
class House:
    """The table of sizes, or what the source measures now."""

    lines: Mapping[str, Mapping[str, int]]  # code lines by distribution and entry
    numbers: Mapping[str, float]  # what only falls
    start: int = 0  # code lines of all distributions when the table began, less what fell since
    raised: tuple[
        str, ...
    ] = ()  # "issue 52: 120 lines for the guide": what was added to the start, and who asked for it

    @property
    def total(self) -> int:
        """Return the code lines of all distributions."""
        return sum(sum(entries.values()) for entries in self.lines.values())

    @property
    def allowed(self) -> int:
        """Return how large the total may be."""
        return self.start + sum(raise_of(line) for line in self.raised)

    @classmethod
    def parse(cls, text: str) -> "House":
        """Return the table in this text of a TOML file."""
        table = tomllib.loads(text)
        return cls(table["lines"], table["numbers"], table["budget"]["start"], tuple(table["budget"]["raised"]))

    def text(self) -> str:
        """Return the text of a TOML file."""
        parts = [
            "# Code lines of every folder and loose module, and numbers that only fall. Written by tests/house.py."
        ]
        parts += ["", "[budget]", f"start = {self.start}", "raised = ["]
        parts += [*(f'    "{line}",' for line in self.raised), "]", "", "[numbers]"]
        parts += [f"{name} = {value}" for name, value in self.numbers.items()]
        for name, entries in self.lines.items():
            parts += [
                "",
                f"[lines.{name}] # {sum(entries.values())}",
                *(f'"{entry}" = {n}' for entry, n in entries.items()),
            ]
        return "\n".join(parts) + "\n"


def raise_of(line: str) -> int:
    """Return the number of lines that a line of the budget allows. Raise ValueError for one that names no issue."""
    match = re.fullmatch(r"issue \d+: (\d+) lines? for \S.*", line)
    if match is None:
        raise ValueError(f"not of the form 'issue 52: 120 lines for the guide': {line!r}")
    return int(match[1])


def measured() -> House:
    """Measure the source as it is."""
    lines: dict[str, dict[str, int]] = {}
    total = tokens = constants = 0
    for name, root in ROOTS.items():
        entries = lines.setdefault(name, {})
        for file in sorted(root.rglob("*.py")):
            folder = file.relative_to(root).parent.as_posix()
            entry = file.stem if folder == "." else f"{folder}/"
            count, parts = code_lines(file)
            entries[entry] = entries.get(entry, 0) + count
            total, tokens, constants = total + count, tokens + parts, constants + module_constants(file)
    numbers = {
        "private_imports": len(private_imports(imports_of_all())),
        "module_constants": constants,
        "tokens_per_line": round(tokens / total, 2),
    }
    return House(lines, numbers, total)


def answer_numbers() -> dict[str, int]:
    """Measure which files one answer passes (`answer_path.py`). Raise ValueError if it fails."""
    done = subprocess.run([sys.executable, TABLE.with_name("answer_path.py")], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"tests/answer_path.py fails: {done.stderr[-500:]}")
    files, lines = map(int, done.stdout.split())
    return {"answer_files": files, "answer_lines": lines}


def module_constants(file: Path) -> int:
    """Return how many names in capitals a module sets."""
    names = []
    for node in parsed(file).body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        names += [inner.id for target in targets for inner in ast.walk(target) if isinstance(inner, ast.Name)]
    return sum(re.fullmatch(r"_?[A-Z][A-Z0-9_]*", name) is not None for name in names)


def faults(table: House, now: House) -> list[str]:
    """Return what is larger than the table says, and what it does not list."""
    found = []
    for name, entries in now.lines.items():
        listed = table.lines.get(name, {})
        found += [f"{name}: {entry} is not in the table" for entry in entries.keys() - listed.keys()]
        found += [f"{name}: {entry} is gone" for entry in listed.keys() - entries.keys()]
        for entry in entries.keys() & listed.keys():
            if entries[entry] > listed[entry]:
                found.append(f"{name}: {entry} has {entries[entry]:,} code lines, the table {listed[entry]:,}")
    found += [f"{name} is gone" for name in table.lines.keys() - now.lines.keys()]
    for number, value in now.numbers.items():
        if value > table.numbers[number]:
            found.append(f"{number} is {value}, and was {table.numbers[number]}")
    if table.total > table.allowed:
        found.append(f"the table has {table.total:,} code lines, {table.allowed:,} are allowed")
    return sorted(found)


def written(table: House, now: House, why: str | None) -> House:
    """Return the new table. Raise ValueError if the total or a number rises without a line that allows it."""
    raised = table.raised if why is None else (*table.raised, why)
    allowed = table.start + sum(raise_of(line) for line in raised)
    if now.total > allowed:
        raise ValueError(
            f"{now.total:,} code lines, {allowed:,} are allowed: remove {now.total - allowed:,}, or name an issue"
        )
    risen = [name for name, value in now.numbers.items() if value > table.numbers.get(name, value)]
    if risen and why is None:
        raise ValueError(f"{', '.join(risen)}: numbers of the whole only fall, or name an issue")
    return House(now.lines, {**table.numbers, **now.numbers}, table.start - (allowed - now.total), raised)


def show(table: House, now: House) -> None:
    """Print sizes beside the table, and beside that of main."""
    text = subprocess.run(
        ["git", "show", f"main:{TABLE.relative_to(ROOT).as_posix()}"], cwd=ROOT, capture_output=True, text=True
    ).stdout
    main = House.parse(text) if text else table
    for name, entries in now.lines.items():
        total, before = sum(entries.values()), sum(main.lines.get(name, {}).values())
        print(f"{total:9,}  code lines in {len(entries)} entries of {name} (main {total - before:+,})")
    print(f"{now.total:9,}  code lines in all (main {now.total - main.total:+,}; {table.allowed:,} allowed)")
    for number, value in table.numbers.items():
        value = now.numbers.get(number, value)
        print(f"{value:>9,}  {number.replace('_', ' ')} (main {value - main.numbers.get(number, value):+.4g})")


def main() -> None:
    """Print sizes; with --write, write the table."""
    table, now = House.parse(TABLE.read_text(encoding="utf-8")), measured()
    now = replace(now, numbers={**now.numbers, **answer_numbers()})
    if "--write" in sys.argv:
        why = sys.argv[sys.argv.index("--write") + 1 :]
        try:
            table = written(table, now, why[0] if why else None)
        except ValueError as error:
            raise SystemExit(f"tests/house.toml is not written: {error}") from None
        TABLE.write_text(table.text(), encoding="utf-8")
    show(table, now)
    for module in ("eyas.core.engine", "eyas.api"):
        files = closure_of(module)
        lines = sum(code_lines(file)[0] for file in files.values())
        print(f"importing {module}: {len(files)} files, {lines:,} code lines")


if __name__ == "__main__":
    main()

"""`eyas demo`: plain decoding and the best method answer the same prompts side by side, and `transformers` does it once more.

Both sides are advanced a cycle at a time, always the one whose own clock is behind, so what is seen on the screen is the race as it is:
each clock runs only while its own side works. Everything is greedy, so all three must give the same tokens; where not, it is said.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import rich_click as click

from eyas.cli._errors import Interrupted
from eyas.cli._files import told
from eyas.cli._load import load, quiet
from eyas.cli._options import TREE, VERBOSE, MethodCommand, examples, method_options, option, stack
from eyas.cli._show import Painter, Tally
from eyas.errors import FitError, InputError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table

    from eyas.api import LLM, Result
    from eyas.core.target import Target

__all__ = ["command"]


class _Prompt(NamedTuple):
    """What is answered; `raw`: a text to go on with, not a message to reply to."""

    text: str
    raw: bool = False


PROMPTS = (
    _Prompt("Hi! I would like to book a table for two at an Italian restaurant in San Jose."),
    _Prompt("I had a long day at work and I am really tired. What do you do for fun?"),
    _Prompt("Once upon a time, there was a little girl named Lily. She lived in a small house with her mom and", raw=True),
    _Prompt("What will the weather be like in London on Friday?"),
    _Prompt("I need to find a train from Cambridge to London for Monday morning."),
)
WARM_UP_TOKENS = 8
FRAME_SECONDS = 1 / 15
BUDGET_SECONDS = 40.0  # after which no further prompt of ours is begun
EXAMPLES = examples(
    ("eyas demo", "the best method"),
    ("eyas demo --method eagle1 --tree.choices chain-3", "another one"),
    ("eyas demo --prompts mine.txt --max-new-tokens 128", "prompts of yours, one a line"),
)


@click.command("demo", cls=MethodCommand, epilog=EXAMPLES, panel="Answers")
@stack(
    option("Prompt", "--prompts", metavar="FILE", help="Prompts of yours, one a line."),
    option("Prompt", "--max-new-tokens", type=click.IntRange(min=2), default=64, metavar="N", help="For each prompt."),
    option("Method", "--method", metavar="NAME", help="Which method to show: see `eyas methods`."),
    TREE,
    option("Machine", "--threads", type=click.IntRange(min=1), metavar="N", help="CPU threads; default: as torch chooses."),
    VERBOSE,
)
@click.pass_context
def command(ctx: click.RichContext, /, **given: Any) -> None:
    """Show plain decoding beside the best method on the embedded model, live."""
    prompts = _prompts(given["prompts"])
    if given["threads"]:
        import torch

        torch.set_num_threads(given["threads"])
    from rich.console import Console

    demo = _Demo(_best(given, method_options(ctx)), given["max_new_tokens"], Console(highlight=False))
    rounds: list[_Round] = []
    began = time.monotonic()
    try:
        demo.warm_up(prompts[0])
        for number, prompt in enumerate(prompts, start=1):
            rounds.append(demo.round(prompt, f"{number}/{len(prompts)}"))
            if prompts is PROMPTS and time.monotonic() - began > BUDGET_SECONDS:
                break
    except KeyboardInterrupt:
        demo.report(rounds)
        raise Interrupted(f"the numbers are of the {len(rounds)} prompts that were finished") from None
    demo.report(rounds, left_out=len(prompts) - len(rounds))


def _prompts(path: str | None) -> Sequence[_Prompt]:
    if path is None:
        return PROMPTS
    with told(path, "prompts file"):
        prompts = [_Prompt(line.strip()) for line in Path(path).read_text("utf-8").splitlines() if line.strip()]
    if not prompts:
        raise InputError(f"prompts file {path!r} is empty: write one prompt a line")
    return prompts


GROWN_TREE = {"tree.nodes": 3, "tree.depth": 2, "tree.branch": 1}  # the fastest on these prompts, by the kernels


def _best(given: dict[str, Any], options: dict[str, Any]) -> LLM:
    """The embedded model with the method and, unless the user chose, a small tree: `auto` has too few cycles to measure."""
    from eyas import drafters, tiny
    from eyas.adaptive import mode_of
    from eyas.core.drafter import flags

    name = given["method"] or tiny.BEST
    mode, options = mode_of(options)
    usual = flags(drafters.find(name).Options)
    options = tiny.with_small_tree(options, usual)
    if mode == "auto" and given["tree"] is None and usual.get("tree.nodes") is not None:
        mode, options = "fixed", {**GROWN_TREE, **options}
    embedded = dict.fromkeys(("target", "draft", "tokenizer")) | {"dtype": "auto", "device": "auto", "trust_remote_code": False}
    return load({**embedded, "method": name, "verbose": given["verbose"], "tree": given["tree"] or mode}, options)


@dataclass(frozen=True)
class _Round:
    """One prompt, answered three times."""

    plain: Result
    best: Result
    other_ids: tuple[int, ...]  # transformers' generate
    other_seconds: float
    doubt: str  # what to say when the three differ; empty when they are equal


class _Demo:
    """Runs rounds, shows them, reports."""

    def __init__(self, best: LLM, new: int, console: Console) -> None:
        from eyas import drafters
        from eyas.api import LLM

        self.best, self.new, self.console = best, new, console
        self.plain = LLM(best.target, drafters.find("vanilla").load(None, best.target), best.tokenizer)
        self.sides = (self.plain, self.best)

    def warm_up(self, prompt: _Prompt) -> None:
        """First runs allocate and tune; they belong to nobody's numbers."""
        from eyas.bench.machine import snapshot

        for llm in self.sides:
            llm.generate(prompt.text, raw=prompt.raw, max_new_tokens=WARM_UP_TOKENS)
        self._transformers(self._ids(prompt), WARM_UP_TOKENS)
        self.before = snapshot()

    def round(self, prompt: _Prompt, place: str) -> _Round:
        ids = self._ids(prompt)
        room = self.best.target.context - len(ids)
        if room < 2:
            raise FitError(f"a prompt fills the context of {self.best.target.context} tokens: shorten it")
        new = min(self.new, room)
        lanes = [_Lane(llm, prompt, new) for llm in self.sides]
        self.console.print(f"\n[bold]{place}[/]  ", end="")
        self.console.print(prompt.text, markup=False, style="bold")
        if self.console.is_terminal:
            self._live(lanes)
        else:
            self._lines(lanes)
        other_ids, other_seconds = self._transformers(ids, new)
        plain, best = (lane.tally.result() for lane in lanes)
        return _Round(plain, best, other_ids, other_seconds, self._doubt(ids, plain, best, other_ids))

    def _live(self, lanes: Sequence[_Lane]) -> None:
        from rich.live import Live
        from rich.table import Table

        def frame() -> Table:
            grid = Table.grid(expand=True, padding=(0, 1))
            grid.add_column(ratio=1)
            grid.add_column(ratio=1)
            grid.add_row(*(lane.panel() for lane in lanes))
            return grid

        with Live(frame(), console=self.console, auto_refresh=False) as live:  # a thread of its own would take time from the sides
            shown = time.perf_counter()
            for _ in _race(lanes):
                if time.perf_counter() - shown > FRAME_SECONDS:
                    live.update(frame(), refresh=True)
                    shown = time.perf_counter()
            live.update(frame(), refresh=True)

    def _lines(self, lanes: Sequence[_Lane]) -> None:
        for _ in _race(lanes):
            pass
        for lane in lanes:
            self.console.print(f"{lane.title()}: {lane.tally.result().text.strip()}", markup=False, soft_wrap=True)

    def _ids(self, prompt: _Prompt) -> tuple[int, ...]:
        return self.best.ids(prompt.text, raw=prompt.raw)

    def _transformers(self, ids: Sequence[int], new: int) -> tuple[tuple[int, ...], float]:
        """`model.generate` on the very same model: (new ids, seconds)."""
        import torch

        model: Any = self.best.target.model
        ids_1T = torch.tensor([list(ids)], device=self.best.target.device)
        with quiet(), torch.inference_mode():
            began = time.perf_counter()
            out = model.generate(ids_1T, attention_mask=torch.ones_like(ids_1T), max_new_tokens=new, do_sample=False)
            seconds = time.perf_counter() - began
        return tuple(out[0, len(ids) :].tolist()), seconds

    def _doubt(self, prompt: Sequence[int], plain: Result, best: Result, other_ids: tuple[int, ...]) -> str:
        said = []
        for name, ids in ((self.best.method, best.token_ids), ("transformers' generate", other_ids)):
            if ids != plain.token_ids:
                at, margin = _margin(self.best.target, prompt, plain.token_ids, ids)
                said.append(f"{name} differs from plain decoding at token {at + 1}, where the two best logits are {margin:.1e} apart")
        return "; ".join(said)

    def report(self, rounds: Sequence[_Round], left_out: int = 0) -> None:
        """The table of this run's numbers, and what is to be said of them."""
        import torch

        from eyas.bench.machine import busy, used

        if not rounds:
            return
        others = busy(used(self.before), torch.get_num_threads())
        self.console.print()
        self.console.print(_table(rounds, self.best.method))
        tree = ", ".join(f"{name} {value}" for name, value in self.best.drafter.describe().items() if name != "kind")
        how = f"{self.best.method}{f' with tree {tree}' if tree else ''}; greedy, {self.best.target.dtype} on {self.best.target.device}"
        self.console.print(f"[dim]{how}. Whole answers, the prompt's pass included, after a warm-up.[/]")
        if others:
            self.console.print(f"[yellow]{others}[/]")
        if left_out:
            self.console.print(f"[yellow]{left_out} prompts were left out: this machine is slow or busy.[/]")
        for number, one in enumerate(rounds, start=1):
            if one.doubt:
                self.console.print(f"[yellow]prompt {number}: {one.doubt}[/]")
        if _rate([r.best for r in rounds]) < _rate([r.plain for r in rounds]):
            self.console.print(f"[yellow]{self.best.method} was slower than plain decoding in this run.[/]")


class _Lane:
    """One side of the race."""

    def __init__(self, llm: LLM, prompt: _Prompt, new: int) -> None:
        self.llm, self.painter = llm, Painter(llm)
        self.tally = Tally.of(llm, prompt.text, raw=prompt.raw, max_new_tokens=new)
        self.spans: list[tuple[str, bool]] = []
        self.running = True

    def advance(self) -> None:
        """One cycle."""
        piece = next(self.tally, None)
        self.running = piece is not None and piece.finish_reason is None
        if piece is not None:
            self.spans += self.painter.split(piece)

    def title(self) -> str:
        result = self.tally.result()
        name = "plain decoding" if self.llm.method == "vanilla" else self.llm.method
        return f"{name}, {len(result.token_ids)} tokens, {_rate([result]):.1f} tokens/s, tau {result.stats.tau:.2f}"

    def panel(self) -> Panel:
        from rich.panel import Panel
        from rich.text import Text

        text = Text()
        for span, drafted in self.spans:
            text.append(span, style="green" if drafted else "")
        return Panel(text, title=self.title(), title_align="left", border_style="dim" if self.running else "green")


def _race(lanes: Sequence[_Lane]) -> Iterator[None]:
    """One cycle of the side whose clock is behind, again and again."""
    while running := [lane for lane in lanes if lane.running]:
        min(running, key=lambda lane: lane.tally.seconds).advance()
        yield


def _margin(target: Target, prompt: Sequence[int], one: Sequence[int], other: Sequence[int]) -> tuple[int, float]:
    """(index of the first difference, distance of the two best logits there)."""
    from eyas.core.engine import Request
    from eyas.metrics import first_difference, margin

    at = first_difference(one, other) or 0
    return at, margin(target, Request(tuple(prompt), 1), one[:at]) or 0.0


def _table(rounds: Sequence[_Round], method: str) -> Table:
    """One row for each of the three, all prompts together."""
    from rich.table import Table

    plain, best = [r.plain for r in rounds], [r.best for r in rounds]
    other_tokens, other_seconds = sum(len(r.other_ids) for r in rounds), sum(r.other_seconds for r in rounds)
    speeds = {"plain": _rate(plain), method: _rate(best), "transformers": other_tokens / other_seconds}
    tokens = {"plain": _tokens(plain), method: _tokens(best), "transformers": other_tokens}
    equal = {
        method: [r.best.token_ids == r.plain.token_ids for r in rounds],
        "transformers": [r.other_ids == r.plain.token_ids for r in rounds],
    }
    table = Table(title=f"This run, {len(rounds)} prompt{'s' * (len(rounds) != 1)}", title_justify="left")
    for header in ("", "tokens", "tokens/s", "tau", "vs plain", "vs trans-\nformers", "equal\ntexts"):
        table.add_column(header, justify="right" if header else "left")
    for name, speed in speeds.items():
        tau = f"{_tau(best if name == method else plain):.2f}" if name != "transformers" else "-"
        ratios = [f"{speed / speeds[reference]:.2f}x" for reference in ("plain", "transformers")]
        said = "-" if name not in equal else "[green]yes[/]" if all(equal[name]) else f"[red]{sum(equal[name])} of {len(rounds)}[/]"
        table.add_row(name, str(tokens[name]), f"{speed:.1f}", tau, *ratios, said, style="bold" if name == method else "")
    return table


def _tokens(results: Sequence[Result]) -> int:
    return sum(len(result.token_ids) for result in results)


def _rate(results: Sequence[Result]) -> float:
    """Tokens a second of whole answers."""
    from eyas.metrics import tokens_per_second

    return tokens_per_second(_tokens(results), sum(result.stats.seconds for result in results))


def _tau(results: Sequence[Result]) -> float:
    from eyas.metrics import tau

    return tau(sum(result.stats.tokens for result in results), sum(result.stats.cycles for result in results))

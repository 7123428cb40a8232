"""`eyas demo`: plain decoding and the best method answer the same prompts side by side; then transformers does.

Both sides advance a cycle at a time, always the side with less time on its clock: each clock runs only while
its side works. Everything is greedy, so all three must give the same tokens; a difference is reported.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from cyclopts import Parameter
from cyclopts.validators import Number

from eyas.cli.tools import (
    TREE,
    VERBOSE,
    DraftOptions,
    Interrupted,
    MethodOptions,
    Painter,
    TargetOptions,
    TimedStream,
    load,
    note,
    option_group,
    plain_decoding,
    print_table,
    quiet,
)
from eyas.errors import EyasError, FitError
from eyas_lab.prompt_lines import prompt_lines

if TYPE_CHECKING:
    from rich.console import Console
    from rich.panel import Panel

    from eyas.api import LLM, Stats


MODEL = "smollm2"  # is shown where it can be had; else the embedded model
PROMPTS = (  # SmolLM2-135M answers these well
    "What is gravity?",
    "Give me three tips for better sleep.",
    "Explain photosynthesis in two sentences.",
    "What is machine learning?",
    "Write the first sentence of a mystery novel.",
)
EMBEDDED_PROMPTS = (  # it knows nothing but such dialogues
    "I want to book a table for two in San Jose tonight.",
    "I would like to see a movie tonight.",
    "I want to find events in New York.",
    "I need a doctor's appointment next Tuesday.",
    "I need to find a train from Cambridge to London for Monday morning.",
)
GROUP = "Answers"
WARM_UP_TOKENS = 8
FRAME_SECONDS = 1 / 15
SHOWN = {"transformers": "transformers' generate"}  # names of sides in a sentence
BUDGET_SECONDS = 40.0  # no further prompt of ours is begun after them
DYNAMIC_TREE = {"tree.nodes": 3, "tree.depth": 2, "tree.branch": 1}  # the fastest on EMBEDDED_PROMPTS, with kernels
EXAMPLES = """
eyas demo  # a real model, SmolLM2-135M-Instruct: 93 MB are fetched once
eyas demo --target embedded  # the model that comes with eyas
eyas demo --method suffix  # another method
eyas demo --prompts mine.txt --max-new-tokens 128  # your own prompts, one per line
"""


@option_group
class DemoOptions:
    """The options of `eyas demo`."""

    target: Annotated[str | None, "Model", "NAME|PATH|HUB"] = None
    """The model to show: smollm2, embedded, a folder or a hub id. Default: smollm2, or embedded where
    that cannot be had."""
    prompts: Annotated[str | None, "Prompt", "FILE"] = None
    """Your own prompts, one per line."""
    max_new_tokens: Annotated[int, "Prompt", Parameter(validator=Number(gte=2)), "N"] = 64
    """Tokens of each answer."""
    method: Annotated[str | None, "Method", "NAME"] = None
    """The method to show: see `eyas methods`."""
    tree: TREE = None
    verbose: VERBOSE = False


def command(*, job: DemoOptions, options: MethodOptions) -> None:
    """Show plain decoding and the best method side by side, live, on a real model."""
    own = prompt_lines(job.prompts)
    from rich.console import Console

    target = _target(job)
    prompts = own or (EMBEDDED_PROMPTS if target == "embedded" else PROMPTS)
    demo = Demo(_best(target, job, options), job.max_new_tokens, Console(highlight=False))
    began = time.monotonic()
    try:
        demo.warm_up(prompts[0])
        for number, prompt in enumerate(prompts, start=1):
            demo.round(prompt, f"{number}/{len(prompts)}")
            if not own and time.monotonic() - began > BUDGET_SECONDS:
                break
    except KeyboardInterrupt:
        demo.report()
        raise Interrupted(f"the numbers are of the {len(demo.rounds)} prompts that were finished") from None
    demo.report(left_out=len(prompts) - len(demo.rounds))


def _target(job: DemoOptions) -> str:
    """Return the model to show: the named one, SmolLM2, or the embedded one where SmolLM2 cannot be had."""
    from eyas import named

    if job.target is not None:
        return job.target
    try:
        with quiet(job.verbose):
            named.place_of(MODEL)
        return MODEL
    except EyasError as error:
        note(f"{error}; the embedded model is shown instead")
        return named.EMBEDDED


def _best(target: str, job: DemoOptions, options: dict[str, Any]) -> LLM:
    """Return the model with the method; the embedded one with a small tree: `auto` has too few cycles to measure."""
    from eyas import drafters, named, tiny
    from eyas.arguments import mode_of
    from eyas.core.options import option_defaults
    from eyas_lab.small_tree import with_small_tree

    model, draft = TargetOptions(target=target, verbose=job.verbose), DraftOptions(method=job.method, tree=job.tree)
    if target != named.EMBEDDED:
        return load(model, draft, options)
    name = job.method or tiny.BEST
    mode, options = mode_of(options)
    defaults = option_defaults(drafters.find(name).Options)
    options = with_small_tree(options, defaults)
    if mode == "auto" and job.tree is None and defaults.get("tree.nodes") is not None:
        mode, options = "fixed", {**DYNAMIC_TREE, **options}
    tree: Any = job.tree or mode
    return load(model, replace(draft, method=name, tree=tree), options)


class Answer(NamedTuple):
    """One side's answer to a prompt."""

    token_ids: tuple[int, ...]
    seconds: float
    stats: Stats | None = None  # None: transformers' generate, which drafts nothing


class Demo:
    """Plain decoding and a method, side by side over several prompts."""

    def __init__(self, best: LLM, max_new_tokens: int, console: Console) -> None:
        self.best = best
        self.max_new_tokens = max_new_tokens
        self.console = console
        self.sides = [plain_decoding(best), best]
        self.rounds: list[dict[str, Answer]] = []  # for each prompt, the answer of each side
        self.warnings: list[str] = []

    def warm_up(self, prompt: str) -> None:
        """Run once without measuring: first runs allocate and tune."""
        from eyas.hardware.machine import snapshot

        for llm in self.sides:
            llm.generate(prompt, max_new_tokens=WARM_UP_TOKENS)
        self._generate(self.best.ids(prompt), WARM_UP_TOKENS)
        self.before = snapshot()

    def round(self, prompt: str, place: str) -> None:
        """Show both sides answer a prompt. Raise FitError for a prompt that fills the context."""
        token_ids = self.best.ids(prompt)
        room = self.best.target.context - len(token_ids)
        if room < 2:
            raise FitError(f"a prompt fills the context of {self.best.target.context} tokens: shorten it")
        length = min(self.max_new_tokens, room)
        lanes = [Lane(llm, prompt, length) for llm in self.sides]
        self.console.print(f"\n[bold]{place}[/]  ", end="")
        self.console.print(prompt, markup=False, style="bold")
        self._race(lanes)
        plain, drafted = (lane.answer() for lane in lanes)
        answers = {self.best.method: drafted, "transformers": self._generate(token_ids, length)}
        self.rounds.append({"plain": plain, **answers})
        for name, answer in answers.items():
            self._compare(name, answer, plain, token_ids)

    def _race(self, lanes: Sequence[Lane]) -> None:
        """Run a cycle of the lane with less time on its clock, again and again; live on a terminal."""
        from rich.columns import Columns
        from rich.live import Live

        def frame() -> Columns:
            return Columns([lane.panel() for lane in lanes], width=self.console.width // 2 - 1)

        # no thread of its own: it would take time from the two sides
        with Live(console=self.console, auto_refresh=False) if self.console.is_terminal else nullcontext() as live:
            shown = time.perf_counter()
            while running := [lane for lane in lanes if lane.running]:
                min(running, key=lambda lane: lane.stream.seconds).advance()
                if live and (time.perf_counter() - shown > FRAME_SECONDS or not any(lane.running for lane in lanes)):
                    live.update(frame(), refresh=True)
                    shown = time.perf_counter()
        for lane in () if live else lanes:
            text = f"{lane.name}, {lane.figures()}: {lane.stream.result().text.strip()}"
            self.console.print(text, markup=False, soft_wrap=True)

    def _generate(self, token_ids: Sequence[int], length: int) -> Answer:
        """Run `model.generate` on the very same model."""
        from eyas.core.engine import Request
        from eyas_lab.bench.contestants import Question, Transformers

        question = Question("", "", 0, Request(tuple(token_ids), length, eos=frozenset(self.best.eos)))
        with quiet():
            answer = Transformers(self.best.target).answer(question)
        return Answer(answer.token_ids, answer.seconds)

    def _compare(self, name: str, answer: Answer, plain: Answer, prompt_ids: Sequence[int]) -> None:
        from eyas.core.engine import Request
        from eyas_lab.metrics import first_difference, margin

        if (place := first_difference(plain.token_ids, answer.token_ids)) is None:
            return
        apart = margin(self.best.target, Request(tuple(prompt_ids), 1), plain.token_ids[:place]) or 0.0
        self.warnings.append(
            f"prompt {len(self.rounds)}: {SHOWN.get(name, name)} differs from plain decoding at token {place + 1}, where "
            f"the two best logits are {apart:.1e} apart"
        )

    def report(self, left_out: int = 0) -> None:
        """Print the table of all rounds, and how far its times can be trusted."""
        import torch

        from eyas.hardware.machine import busy, used

        if not self.rounds:
            return
        load_of_others = busy(used(self.before), torch.get_num_threads())
        method, target = self.best.method, self.best.target
        rates = _print_table(self.rounds)
        size = ", ".join(f"{key} {value}" for key, value in self.best.drafter.describe().items() if key != "kind")
        limit = "a tree that adapts to this machine, at most" if self.best.policy is not None else "tree"
        drafts = f"{method} with {limit} {size}" if size else method
        setup = f"{target.name}, {drafts}; greedy, {target.dtype} on {target.device}"
        self.console.print(f"[dim]{setup}. Whole answers, the prompt's pass included, after a warm-up.[/]")
        count = "1 prompt was" if left_out == 1 else f"{left_out} prompts were"
        for warning in (
            load_of_others,
            f"{count} left out: this machine is slow or busy." if left_out else None,
            *self.warnings,
            f"{method} was slower than plain decoding in this run." if rates[method] < rates["plain"] else None,
        ):
            if warning:
                self.console.print(f"[yellow]{warning}[/]")


class Lane:
    """One side of the screen while it answers."""

    def __init__(self, llm: LLM, prompt: str, length: int) -> None:
        self.name = "plain decoding" if llm.method == "vanilla" else llm.method
        self.stream = TimedStream(llm.stream(prompt, max_new_tokens=length))
        self.painter = Painter(llm)
        self.spans: list[tuple[str, str]] = []  # text and style
        self.running = True

    def advance(self) -> None:
        """Take the next piece of the stream."""
        piece = next(self.stream, None)
        self.running = piece is not None and piece.finish_reason is None
        if piece is not None:
            self.spans += [(text, "green" if drafted else "") for text, drafted in self.painter.split(piece)]

    def answer(self) -> Answer:
        """Return the answer so far."""
        result = self.stream.result()
        return Answer(result.token_ids, result.stats.seconds, result.stats)

    def figures(self) -> str:
        """Return tokens, speed and tau as one line."""
        tokens, rate, tau = _figures([self.answer()])
        return f"{tokens} tokens, {rate:.1f} tokens/s, tau {tau}"

    def panel(self) -> Panel:
        """Return the side as a panel of rich."""
        from rich.panel import Panel
        from rich.text import Text

        style = "dim" if self.running else "green"
        figures = self.figures().replace(" tokens/s", "/s")  # fits a panel of half of 80 columns
        title = Text(self.name)
        return Panel(Text.assemble(*self.spans), title=title, subtitle=figures, title_align="left", border_style=style)


def _print_table(rounds: Sequence[dict[str, Answer]]) -> dict[str, float]:
    """Print one row for each side, all prompts together; returns their tokens a second."""
    sides = {name: [answers[name] for answers in rounds] for name in rounds[0]}
    figures = {name: _figures(answers) for name, answers in sides.items()}
    rates = {name: rate for name, (_, rate, _) in figures.items()}
    rows = []
    for name, (tokens, rate, tau) in figures.items():
        ratios = [f"{rate / rates[reference]:.2f}x" for reference in ("plain", "transformers")]
        pairs = zip(sides[name], sides["plain"], strict=True)
        equal = sum(answer.token_ids == plain.token_ids for answer, plain in pairs)
        texts = "-" if name == "plain" else "yes" if equal == len(rounds) else f"{equal} of {len(rounds)}"
        rows.append((name, str(tokens), f"{rate:.1f}", tau, *ratios, texts))
    heads = ("", "tokens", "tokens/s", "tau", "vs plain", "vs transformers", "equal texts")
    print_table(heads, rows, f"This run, {len(rounds)} prompt{'s' * (len(rounds) != 1)}", bold=1)
    return rates


def _figures(answers: Sequence[Answer]) -> tuple[int, float, str]:
    """Return the tokens, tokens a second of whole answers, and tau; "-" for a side without one."""
    from eyas.core.totals import tau, tokens_per_second

    tokens = sum(len(answer.token_ids) for answer in answers)
    rate = tokens_per_second(tokens, sum(answer.seconds for answer in answers))
    stats = [answer.stats for answer in answers if answer.stats is not None]
    emitted, cycles = sum(each.tokens for each in stats), sum(each.cycles for each in stats)
    return tokens, rate, f"{tau(emitted, cycles):.2f}" if stats else "-"

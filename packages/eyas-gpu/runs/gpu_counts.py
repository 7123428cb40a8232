"""Count what a recorded cycle launches on a GPU, without one: by method, temperature and precision of the draft.

    python packages/eyas-gpu/runs/gpu_counts.py                   the table, as Markdown
    python packages/eyas-gpu/runs/gpu_counts.py --write           write the table into docs/lab/gpu_plan.md, which describes it

The cycle is run on tensors without memory (_fake_cuda.py), with two numbers of layers, so that the launches of a layer
are known apart.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[3] / "runs"))  # what scripts share
import _markdown
from _common import parser, words
from _fake_cuda import CUDA, fake_cuda, logged_by_stage
from _gpu_lab import SHAPES
from torch._subclasses.fake_tensor import DataDependentOutputException
from transformers import AutoConfig, AutoModelForCausalLM

from eyas.core.cycle import CycleRunner
from eyas.core.drafter import CycleInput
from eyas.core.features import TextEnd
from eyas.core.options import build_options
from eyas.core.sampling import GumbelNoise, Sampling
from eyas.core.target import Target
from eyas.core.verify import verify
from eyas.drafters import Drafter, find
from eyas.drafters._grow import _Static
from eyas.files import write_text
from eyas.timing import StageTimer
from eyas_gpu.cycle import GpuOps
from eyas_gpu.graphs import GraphRunner
from eyas_gpu.layers import GpuModelLayers
from eyas_gpu.operators import available
from eyas_gpu.runner import TORCH
from eyas_lab.bench.simulate import simulated

PAGE = Path(__file__).parents[3] / "docs" / "lab" / "gpu_plan.md"
BEGIN, END = "<!-- counts: python packages/eyas-gpu/runs/gpu_counts.py --write -->", "<!-- end of counts -->"
LAYERS, ALL_LAYERS = (8, 9), 32  # traced (EAGLE-3 reads three of them), and shown
CONTEXT, NEW = 1024, 128
SLACK = 0.05  # the page is renewed when a cycle launches so much less than it says


@dataclass(frozen=True)
class Case:
    """A cycle to be counted."""

    method: str
    temperature: float = 0.0
    precision: str = "bf16"  # of the draft's weights: bf16, fp8
    verify: str = "real"  # real, simulated
    rows: int = 1
    context: int = CONTEXT
    options: tuple[tuple[str, Any], ...] = ()
    top_p: float = 1.0
    kernels: bool = True  # eyas' own; False: the model's and the draft's own code, in graphs as well

    @property
    def name(self) -> str:
        more = [f"{key.removeprefix('tree.')} {value}" for key, value in self.options]
        more += [f"top-p {self.top_p:g}"] if self.top_p < 1 else []
        more += ["simulated acceptance"] if self.verify == "simulated" else []
        more += [f"{self.rows} rows"] if self.rows > 1 else []
        more += [f"{self.context:,} tokens"] if self.context != CONTEXT else []
        return ", ".join([self.method, *more])

    @property
    def key(self) -> tuple[str, ...]:
        """The cells of the table that name the case."""
        return self.name, f"{self.temperature:g}", self.precision, "kernels" if self.kernels else "model's code"


CASES = [
    Case("vanilla", kernels=False), Case("vanilla", 1.0, kernels=False),
    *(Case("eagle3", t, p, kernels=False) for t in (0.0, 1.0) for p in ("bf16", "fp8")),
    Case("vanilla"), Case("vanilla", 1.0),
    *(Case("eagle3", t, p) for t in (0.0, 1.0) for p in ("bf16", "fp8")),
    Case("eagle3", 1.0, top_p=0.9), Case("eagle3", verify="simulated"),
    *(Case("seagle", t, p) for t in (0.0, 1.0) for p in ("bf16", "fp8")),
    *(Case("eagle2", t, p) for t in (0.0, 1.0) for p in ("bf16", "fp8")),
    Case("eagle1"), Case("eagle1", precision="fp8"), Case("eagle1", 1.0, options=(("tree.noise", "coupled"),)),
    *(Case(m, t, p) for m in ("medusa", "hydra") for t in (0.0, 1.0) for p in ("bf16", "fp8")),
    Case("vanilla", rows=4), Case("eagle3", rows=4), Case("vanilla", context=16384), Case("eagle3", context=16384),
    Case("seagle", context=16384, options=(("window.size", 2048),)),
]  # fmt: skip


class ShapedTarget(Target):
    """A target without values: what `Target` learns from a forward is told."""

    def _probe(self) -> Any:
        config: Any = self.model.config
        heads, width = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
        return ((heads, width, width),) * config.num_hidden_layers, config.vocab_size, True


def traced(case: Case, layers: int) -> Counter[str]:
    """The launches of the cycle by stage, and its "bytes", with so many layers of the target."""
    sizes = {**SHAPES["llama-8b"], "num_hidden_layers": layers}
    with fake_cuda() as mode, logged_by_stage(mode) as capture:
        with CUDA:
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes), dtype=torch.bfloat16).eval()
        base = ShapedTarget(model)
        base.draft_weights = "fp8" if case.precision == "fp8" else "auto"
        fused = GpuModelLayers(base, join_weights=True) if case.kernels else None
        runner = GraphRunner(base, capture, fused=fused, ops=GpuOps() if case.kernels else TORCH)
        target = base.run_with(runner)
        kind = find(case.method)
        drafter = kind.random(target, build_options(kind.Options, dict(case.options)))
        try:
            _cycle(case, drafter, drafter.target)
        finally:
            _Static.from_choices.cache_clear()  # its tensors belong to this trace
            available.cache_clear()  # there is no GPU in truth
        (log,) = capture.logs  # type: ignore[attr-defined]
    assert not log.faults, f"{case}: {dict(log.faults)}"
    counts = Counter[str]()
    for launch in log.launches:
        counts.update({launch.stage: launch.kernels, "bytes": launch.bytes})
    return counts


def _cycle(case: Case, drafter: Drafter, target: Target) -> None:
    """Record one cycle of a decoder whose rows hold so many tokens."""
    rows, sampling = case.rows, (Sampling(case.temperature, top_p=case.top_p),) * case.rows
    session, draft_session = target.open(rows, drafter.feature_layers), drafter.open(rows)
    decide = simulated((0.8, 0.7)) if case.verify == "simulated" else verify
    cycle = target.runner.wrap_cycle(CycleRunner(session, draft_session, decide))
    session.reserve(case.context + NEW + cycle.extra_slots)
    session.lengths, session.length_B = [case.context] * rows, torch.full((rows,), case.context, device=CUDA)
    noise = GumbelNoise(
        torch.zeros(rows, dtype=torch.long, device=CUDA),
        torch.full((rows,), sampling[0].greedy, device=CUDA),
        sampling[0].greedy,
    )
    text = [5, 6, 7, 8] * (case.context // 4) + [5]
    cycle_input = CycleInput(
        tokens_B=torch.zeros(rows, dtype=torch.long, device=CUDA), position_B=session.length_B,
        active_B=torch.ones(rows, dtype=torch.bool, device=CUDA), sampling=sampling, noise=noise, max_position=case.context,
        active_rows=tuple(range(rows)), row_tokens=(text,) * rows, ends=(TextEnd(remaining=NEW),) * rows,
    )  # fmt: skip
    # methods that read text see the result on the host, after the recording
    with suppress(DataDependentOutputException):
        cycle(cycle_input, StageTimer())


KEYS = 4  # leading cells that name a row
HEADER = (
    "method", "T", "draft", "by", "draft: launches", "target: a layer", "target: rest", "verify", "commit", "all, 32 layers", "GB",
)  # fmt: skip


def row(case: Case) -> list[str]:
    """The line of the table."""
    few, more = (traced(case, n) for n in LAYERS)
    layers = LAYERS[1] - LAYERS[0]
    per_layer = {name: (more[name] - few[name]) / layers for name in more}
    counts = {name: few[name] + (ALL_LAYERS - LAYERS[0]) * per_layer[name] for name in more}
    size, launches, layer = counts.pop("bytes"), Counter(counts), per_layer["target"]
    rest = launches["target"] - ALL_LAYERS * layer + launches["rest"]
    numbers = (launches["draft"], layer, rest, launches["verify"], launches["commit"], launches.total())
    return [*case.key, *(f"{n:,.0f}" for n in numbers), f"{size / 1e9:.2f}"]


def table(rows: Sequence[Sequence[str]]) -> str:
    """The rows as Markdown."""
    return _markdown.table(HEADER, rows, numbers=len(HEADER) - KEYS)


def written(page: str) -> dict[tuple[str, ...], list[float]]:
    """The numbers of the table on the page, by the cells that name a row."""
    body = page.partition(BEGIN)[2].partition(END)[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in body.strip().splitlines()[2:]]
    return {tuple(cells[:KEYS]): [float(cell.replace(",", "")) for cell in cells[KEYS:]] for cells in lines}


def difference(counted_row: Sequence[str], page: dict[tuple[str, ...], list[float]]) -> str | None:
    """Why the page does not hold for this row: it launches more than is written, or much less."""
    key, numbers = tuple(counted_row[:KEYS]), [float(cell.replace(",", "")) for cell in counted_row[KEYS:]]
    if key not in page:
        return f"{', '.join(key)}: not on the page"
    for name, now, before in zip(HEADER[KEYS:], numbers, page[key], strict=True):
        if now > before:
            return f"{', '.join(key)}: {name} is {now:g}, the page says {before:g}"
    now, before = numbers[-2], page[key][-2]
    if now < (1 - SLACK) * before:
        return f"{', '.join(key)}: {now:g} launches, the page says {before:g}: renew it"
    return None


def main(arguments: Sequence[str] | None = None) -> None:
    args = parser(
        __doc__,
        output=None,
        write=(False, "write the table into docs/lab/gpu_plan.md"),
        methods=("", "some of the methods, separated by commas"),
    ).parse_args(arguments)
    cases = [case for case in CASES if not args.methods or case.method in words(args.methods)]
    rows = list(map(row, cases))
    if args.write:
        head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        write_text(PAGE, f"{head}{BEGIN}\n{table(rows)}\n{END}{rest.partition(END)[2]}")
    print(table(rows))


if __name__ == "__main__":
    main()

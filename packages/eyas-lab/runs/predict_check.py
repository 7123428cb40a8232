"""Predictions of `eyas predict` for this CPU against measurements: docs/results/predict.json, and the tables of
docs/lab/predict.md.

    python packages/eyas-lab/runs/predict_check.py --nestling models/nestling --output docs/results/predict.json
    python packages/eyas-lab/runs/predict_check.py --output docs/results/predict.json --tables      # the tables of a record, into the page

The CPU is measured by reference models (`eyas_lab.predict.measure`), then passes of real models and of a random LLaMA of
1.1B weights, by turns and several times, so that what else runs on the machine meets both sides alike. No constant of
a prediction comes from a model that it is compared with. With --cpu-time all clocks, of both sides, count the
processor's seconds of this process: on one thread that is the time of an idle machine, but for the caches and the memory
that other programs use.
"""

from __future__ import annotations

import copy
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import _markdown
import torch

sys.path.append(str(Path(__file__).resolve().parents[3] / "runs"))  # what scripts share
from _common import bundled_prompts, drafter, machine, parser, progress, run, tree, write
from transformers import AutoConfig, AutoModelForCausalLM

import eyas
from eyas import passes, tiny
from eyas.api import LLM
from eyas.core.drafter import TreeSize
from eyas.core.totals import tau
from eyas.files import write_text
from eyas.passes import CONTEXT, time_passes
from eyas_lab.bench.contestants import Drafting
from eyas_lab.bench.run import Bench
from eyas_lab.predict import MACHINES, Head, Machine, Model, Prediction, Settings, read_head
from eyas_lab.predict.heads import Acceptance
from eyas_lab.predict.measure import measure
from eyas_lab.predict.models import model_of

PAGE = Path(__file__).resolve().parents[3] / "docs" / "lab" / "predict.md"
BEGIN, END = "<!-- tables: python packages/eyas-lab/runs/predict_check.py --tables -->", "<!-- end of tables -->"
TOKENS = (1, 2, 4, 8, 16, 32)
TREES = ((4, 3, 1), (8, 4, 2), (12, 4, 4))
ALLOWED = 0.20
RANDOM_1B = {
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
    "num_key_value_heads": 4, "vocab_size": 32_000, "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip


# Llama-3.1-8B in bfloat16, EAGLE-3: figures that others published, of GPUs that we do not have.
LLAMA_8B = {
    "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128_256, "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip
EAGLE3_PAPER = "EAGLE-3's paper, SGLang 0.4.4 on an H100"
SPEC_BUNDLE = "SpecForge's SpecBundle, SGLang with CUDA graphs, GPU not named"
PUBLISHED = (  # (who, what, rows, tree, published figure)
    (EAGLE3_PAPER, "plain tokens/s", 1, None, 158.3),
    (SPEC_BUNDLE, "plain tokens/s", 1, None, 187.0),
    (SPEC_BUNDLE, "c", 1, (4, 3, 1), 1.35),
    (SPEC_BUNDLE, "c", 1, (6, 5, 1), 1.49),
    (SPEC_BUNDLE, "c", 1, (8, 7, 1), 1.62),
    (SPEC_BUNDLE, "c", 1, (6, 5, 3), 1.64),
    (SPEC_BUNDLE, "c", 1, (8, 7, 4), 1.80),
    *((EAGLE3_PAPER, "speed-up", rows, (4, 3, 1), s) for rows, s in ((2, 1.81), (8, 1.62), (24, 1.39), (64, 1.38))),
)


class Case(NamedTuple):
    """A target in a format, and its heads by method."""

    name: str
    load: Callable[..., LLM]
    weights: str  # as `eyas predict` names the format
    activations: str = "exact"
    rounded: bool = False  # the kernels round the weights to it
    heads: Mapping[str, Path] = {}


def random_1b(**options: Any) -> LLM:
    """A LLaMA of 1.1B random weights, whose layers share theirs until the kernels copy them into their format."""
    config: Any = AutoConfig.for_model("llama", **RANDOM_1B)
    one = copy.deepcopy(config)
    one.num_hidden_layers = 1
    model: Any = AutoModelForCausalLM.from_config(one).eval()
    first, config.dtype = model.model.layers[0], torch.float32
    for index in range(1, config.num_hidden_layers):
        layer = copy.deepcopy(first, {id(weight): weight for weight in first.parameters()})
        layer.self_attn.layer_idx = index
        model.model.layers.append(layer)
    model.config.num_hidden_layers = config.num_hidden_layers
    model.config.layer_types = None
    return eyas.load(model, method="vanilla", tokenizer=False, kernels="on", tree="fixed", **options)


def cases(nestling: str, smollm2: str) -> list[Case]:
    """All of them, small ones first."""

    def named(source: str) -> Callable[..., LLM]:
        return lambda **options: eyas.load(source, "vanilla", tree="fixed", **options)

    smollm2_head = {"eagle3": tiny.FOLDER / "smollm2_eagle3"}
    found = [Case("embedded", named("embedded"), "int8", heads={m: tiny.HEADS[m] for m in ("mtp", "eagle3")})]
    if nestling:
        found.append(Case("nestling", named(nestling), "bfloat16"))
    if smollm2:
        found += [
            Case("SmolLM2-135M", named(smollm2), "float32", heads=smollm2_head),
            Case("SmolLM2-135M", named(smollm2), "int8", "int16", True, smollm2_head),
            Case("SmolLM2-135M", named(smollm2), "int4", "int16", True, smollm2_head),
        ]
    formats = (("bfloat16", "exact"), ("int8", "exact"), ("int8", "int8"))
    return found + [Case("random 1.1B", random_1b, *form, rounded=True) for form in formats]


def loaded(case: Case) -> LLM:
    """The case's target."""
    return case.load(weights=case.weights if case.rounded else "exact", activations=case.activations)


def passes_of(case: Case, llm: LLM, model: Model, rounds: int) -> tuple[dict[str, Any], Machine]:
    """Measured and predicted passes, by turns; and the last measurement of the machine."""
    measured, predicted = ({n: list[float]() for n in TOKENS} for _ in range(2))
    for _ in range(rounds):
        cpu = measure(case.weights, case.activations)
        prediction = Prediction(model, cpu, NO_HEAD, Settings(case.weights, context=CONTEXT))
        timings = time_passes(llm.target, CONTEXT, TOKENS, ())
        for n in TOKENS:
            measured[n].append(timings.fastest[n])
            predicted[n].append(prediction.pass_of(n).seconds)
    lines = [
        {"tokens": n, "measured_ms": 1e3 * median(measured[n]), "predicted_ms": 1e3 * median(predicted[n]),
         "measured_ratio": ratio(measured, n), "predicted_ratio": ratio(predicted, n)}
        for n in TOKENS
    ]  # fmt: skip
    about = {"model": case.name, "weights": case.weights, "activations": case.activations}
    return {**about, "millions": round(model.weights / 1e6), "passes": [rounded(line) for line in lines]}, cpu


NO_HEAD = Head("none", "suffix", 0, 0, 0, 0, 0.0, Acceptance((0.5,), 0.0, ""))


def ratio(seconds: Mapping[int, Sequence[float]], tokens: int) -> float:
    """The median of a pass over one token of the same round."""
    return median(many / one for many, one in zip(seconds[tokens], seconds[1], strict=True))


def trees_of(case: Case, llm: LLM, model: Model, cpu: Machine, limit: int, new: int) -> Iterator[dict[str, Any]]:
    """Measured and predicted trees of each head, greedy answers to the bundled prompts."""
    prompts = bundled_prompts(limit)
    for method, head in case.heads.items():
        named = {"/".join(map(str, shape)): shape for shape in TREES}
        entered = [Drafting("vanilla", llm.drafter)]
        entered += [Drafting(name, drafter(llm.target, method, tree(*shape), head)) for name, shape in named.items()]
        with tempfile.TemporaryDirectory() as folder, progress() as on_prompt:
            answers = Bench(llm, entered, prompts, (0.0,), new, {}).run(Path(folder), on_prompt)
        cycles = {name: [c for a in answers if a.method == name for c in a.cycles] for name in ("vanilla", *named)}
        length = round(sum(a.prompt_tokens for a in answers) / len(answers) + new / 2)
        known = read_head(str(head), method, model)
        settings = Settings(case.weights, context=length)
        prediction = Prediction(model, cpu, known, settings)
        plain = median(cycle.seconds for cycle in cycles["vanilla"])
        for name, shape in named.items():
            tokens = sum(cycle.emitted for cycle in cycles[name])
            measured_tau, count = tau(tokens, len(cycles[name])), len(cycles[name])
            c = median(cycle.seconds for cycle in cycles[name]) / plain
            expected = prediction.of_tree(TreeSize(*shape))
            stages = {
                f"measured_{stage}_ms": 1e3 * median(getattr(cycle, stage) or 0.0 for cycle in cycles[name])
                for stage in ("draft", "target")
            }
            yield {
                "model": case.name, "weights": case.weights, "method": method, "tree": name, "cycles": count,
                **rounded({"measured_c": c, "predicted_c": expected.c, "measured_tau": measured_tau,
                           "predicted_tau": expected.tau, "measured_speedup": measured_tau / c,
                           "predicted_speedup": expected.speedup, "speedup_given_tau": measured_tau / expected.c,
                           "low": expected.low, "high": expected.high, **stages,
                           "predicted_draft_ms": 1e3 * expected.draft_seconds,
                           "predicted_target_ms": 1e3 * expected.pass_seconds}),
            }  # fmt: skip


def rounded(line: Mapping[str, Any]) -> dict[str, Any]:
    """Figures with four digits."""
    return {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in line.items()}


# --- tables ------------------------------------------------------------------------------------------


def off(predicted: float, measured: float) -> str:
    """How far a prediction is off; in bold where it is more than allowed."""
    miss = predicted / measured - 1
    return f"**{miss:+.0%}**" if abs(miss) > ALLOWED else f"{miss:+.0%}"


def tables(record: Mapping[str, Any]) -> str:
    """The tables of the page."""
    heads = ("model", "weights, activations", "pass(1), ms", "predicted", *(f"pass({n})" for n in TOKENS[1:]))
    lines = []
    for each in record["passes"]:
        one, *others = each["passes"]
        figures = (f"{p['measured_ratio']:.2f} ({off(p['predicted_ratio'], p['measured_ratio'])})" for p in others)
        form = f"{each['weights']}, {each['activations']}"
        one_off = off(one["predicted_ms"], one["measured_ms"])
        lines.append([each["model"], form, f"{one['measured_ms']:.2f}", one_off, *figures])
    found = [_markdown.table(heads, lines, numbers=len(TOKENS) + 1)]
    heads = ("model", "weights", "head", "tree", "c", "predicted", "tau", "predicted", "speed-up", "predicted")
    lines = []
    for each in record["trees"]:
        figures = []
        for name in ("c", "tau", "speedup"):
            measured, predicted = each[f"measured_{name}"], each[f"predicted_{name}"]
            figures += [f"{measured:.2f}", f"{predicted:.2f} ({off(predicted, measured)})"]
        lines.append([each["model"], each["weights"], each["method"], each["tree"], *figures])
    found.append(_markdown.table(heads, lines, numbers=6))
    return "\n\n".join([*found, summary(record), published()])


def published() -> str:
    """The table of figures of others, beside predictions for the H100."""
    model = model_of(AutoConfig.for_model("llama", **LLAMA_8B), "Llama-3.1-8B")
    lines = []
    for who, what, rows, shape, figure in PUBLISHED:
        prediction = Prediction(model, MACHINES["h100"], read_head(None, "eagle3", model), Settings(rows=rows))
        if shape is None:
            predicted = rows / prediction.plain()
        else:
            outcome = prediction.of_tree(TreeSize(*shape))
            predicted = outcome.c if what == "c" else outcome.speedup
        tree = "" if shape is None else "/".join(map(str, shape))
        digits = 0 if shape is None else 2
        cells = f"{figure:.{digits}f}", f"{predicted:.{digits}f} ({off(predicted, figure)})"
        lines.append([who, what, str(rows), tree, *cells])
    return _markdown.table(("published by", "figure", "rows", "tree", "published", "h100"), lines, numbers=2)


def summary(record: Mapping[str, Any]) -> str:
    """How many figures are within what is allowed."""
    pairs = {
        "pass(1)": [(p["passes"][0]["predicted_ms"], p["passes"][0]["measured_ms"]) for p in record["passes"]],
        "ratios of passes": [
            (line["predicted_ratio"], line["measured_ratio"]) for p in record["passes"] for line in p["passes"][1:]
        ],
        **{
            name: [(each[f"predicted_{key}"], each[f"measured_{key}"]) for each in record["trees"]]
            for name, key in (("c", "c"), ("tau", "tau"), ("speed-up", "speedup"))
        },
        "speed-up, given the measured tau": [
            (each["speedup_given_tau"], each["measured_speedup"]) for each in record["trees"]
        ],
    }
    lines = []
    for name, both in pairs.items():
        misses = [abs(predicted / measured - 1) for predicted, measured in both]
        within = sum(miss <= ALLOWED for miss in misses)
        lines.append([name, f"{within} of {len(misses)}", f"{median(misses):.0%}", f"{max(misses):.0%}"])
    return _markdown.table(("figure", f"within {ALLOWED:.0%}", "median miss", "largest miss"), lines, numbers=3)


def main() -> None:
    made = parser(
        __doc__,
        nestling=("", "folder of nestling; without it, that model is left out"),
        smollm2=("smollm2-q4_1", "SmolLM2's name; '' leaves it out"),
        rounds=(3, "measurements of the machine and of each model"),
        limit=(8, "bundled prompts"),
        new_tokens=(48, "of an answer"),
        only=("", "only models whose name holds this"),
        cpu_time=(False, "count the processor's seconds, on one thread"),
        tables=(False, "write the record's tables into docs/lab/predict.md"),
    )
    args = made.parse_args()
    if args.tables:
        record = json.loads(args.output.read_text(encoding="utf-8"))
        head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        write_text(PAGE, f"{head}{BEGIN}\n{tables(record)}\n{END}{rest.partition(END)[2]}")
        return
    if args.cpu_time:
        torch.set_num_threads(1)
        time.perf_counter = time.process_time
    passes.REPEATS, passes.MAX_SECONDS = 25, 8.0  # other processes disturb some of them
    before, record = machine(), {"passes": [], "trees": [], "machines": []}
    for case in cases(args.nestling, args.smollm2):
        if args.only not in case.name:
            continue
        llm = loaded(case)
        model = replace(model_of(llm.target.model.config, case.name), dtype=case.weights)
        passed, cpu = passes_of(case, llm, model, args.rounds)
        record["passes"].append(passed)
        record["machines"].append({**asdict(cpu), "activations": case.activations})
        record["trees"] += trees_of(case, llm, model, cpu, args.limit, args.new_tokens)
        write(args.output, record, before, quiet=True)  # after each model: what is done is kept
        print(tables(record), flush=True)
        del llm
        gc.collect()  # one model at a time


if __name__ == "__main__":
    run(main)

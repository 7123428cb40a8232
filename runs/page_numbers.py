"""Check the numbers that README and the guide tell from records: each must stand in its page as the record has it.

python runs/page_numbers.py    exit status 1, and each line that a page lacks, when a record and a page differ

A page's own words may stand around a number. Tables are compared row by row.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence

from _records import DOCS, Record, record

ROOT = DOCS.parent
BENCH = (
    "vanilla", "transformers", "transformers_prompt_lookup", "mtp", "eagle3", "eagle2", "eagle1", "suffix", "prompt_lookup",
)  # fmt: skip
SERVERS = {
    "eyas, drafts auto": "eyas, drafts auto",
    "eyas, drafts on (4/3/1)": "eyas, a fixed chain of three drafts",
    "eyas, drafts off": "eyas, drafts off",
    "llama.cpp, f32": "llama.cpp's server",
    "vLLM, CPU": "vLLM's CPU build",
    "transformers serve, continuous batching": "`transformers serve`, continuous batching",
    "transformers serve": "`transformers serve`",
}


def row_of(name: str, temperature: float, method: str = "eagle3") -> Record:
    """Return the row of a method over all tasks of a bench."""
    rows = (row for row in record(name)["rows"] if row["task"] == "all" and row["temperature"] == temperature)
    return next(row for row in rows if row["method"] == method)


def front() -> Iterator[str]:
    """Yield the statements of README below its table."""
    head, sums = row_of("smollm2_general", 0), record("exact_bits")["sums"]
    yield f"the head gains {head['speedup']:.1f}x"
    yield f"compared {sums['logits']['compared']:,} logits and {sums['answers']['compared']:,} answers"
    assert not sums["logits"]["different"] + sums["answers"]["different"], "the README says that none differs"


def quality() -> Iterator[str]:
    """Yield the table of rounded weights."""
    labels = {"int8": "eyas int8", "q8_0": "llama.cpp q8_0", "int4": "eyas int4", "q4_0": "llama.cpp q4_0"}
    labels |= {f"kv {form}": f"eyas, `--kv {form}`" for form in ("bfloat16", "int8")}
    for row in record("quality_smollm2")["rows"][1:]:
        digits, (ratio, low, high) = 2 if "4" in row["weights"] else 3, row["over_exact"]
        interval = f"{ratio:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"
        yield line(labels[row["weights"]], [interval, f"{100 * row['same_token']:.0f} %"])


def choose() -> Iterator[str]:
    """Yield the gains, and the memory and times of 8B, on the page of models and machines."""
    yield from quality()
    for weights in ("float32", "int8", "int4"):
        for processor, suffix in {"AVX2": "", "AVX-512": "_avx512"}.items():
            name = f"smollm2_{weights}{suffix}"
            ratios = [row_of(name, 0, "vanilla")["speedup_vs_transformers"]]
            ratios += [row_of(name, temperature)["speedup"] for temperature in (0, 1)]
            yield line(weights, [processor, *(f"{ratio:.1f}x" for ratio in ratios)])
    sizes = record("real_sizes")["files"]["8b-q4_k_m.gguf"]
    exact, int8 = (sizes[f"eyas, inputs {kind}"] for kind in ("exact", "int8"))
    yield f"{exact['ratio']:.1f} times, or {int8['ratio']:.1f} times with `--activations int8`"
    yield f"the peak was {int8['gigabytes_cold']:.1f} GB at the first load, {int8['gigabytes']:.1f} GB later"
    yield f"The first token came after {int8['first_token_cold']:.1f} s, later after {int8['first_token']:.1f} s"


def bench() -> Iterator[str]:
    """Yield the rows of the bench's example."""
    rows = {row["method"].partition(":")[0]: row for row in record("bench_bundled")["rows"] if row["task"] == "all"}
    for name in BENCH:
        row = rows[name]
        interval = f"{row['speedup']:.2f} [{row['speedup_low']:.2f}, {row['speedup_high']:.2f}]"
        figures = f"{row['speedup_vs_transformers']:.2f} {row['tau']:.2f} {row['c']:.2f} {row['first_token_ms']:.1f}"
        yield f"{name} {row['tokens_per_second']:.1f} {interval} {figures} {'equal' if row['equal'] else 'differ'}"


def under_load() -> Iterator[str]:
    """Yield the rows of both tables of servers."""
    full, epyc, xeon = (record(name)["closed"] for name in ("serve_load_full", "serve_load_epyc", "serve_load"))
    for label, name in {"drafts (auto)": "eyas, drafts auto", "no drafts": "eyas, drafts off"}.items():
        yield line(label, [f"{cell[name]['tokens_per_second']:.0f}" for cell in full.values()])
    ratios = [cell["auto over off"]["tokens_per_second"] for cell in full.values()]
    yield line("ratio, round by round", ["{:.2f}x [{:.2f}, {:.2f}]".format(*ratio) for ratio in ratios])
    yield f"one client {full['1']['eyas, drafts on (4/3/1)']['tokens_per_second']:.0f}"
    for name, label in SERVERS.items():
        yield line(label, [f"{cell[name]['tokens_per_second']:.0f}" for cell in epyc.values()])
    for name in ("eyas, drafts auto", "eyas, drafts off", "llama.cpp, f32", "vLLM, CPU"):
        yield line(SERVERS[name], [f"{cell[name]['tokens_per_second']:.0f}" for cell in xeon.values()])


def line(label: str, cells: Sequence[str]) -> str:
    """Return a row of a table in Markdown."""
    return f"| {' | '.join((label, *cells))} |"


PAGES: dict[str, Callable[[], Iterator[str]]] = {
    "README.md": front,
    "docs/start/choose.md": choose,
    "docs/guide/benchmark.md": bench,
    "docs/guide/serve.md": under_load,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print each statement that a page lacks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(arguments)
    lacking = 0
    for page, statements in PAGES.items():
        text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
        for statement in statements():
            if statement not in text:
                print(f"{page} lacks: {statement}")
                lacking += 1
    return int(lacking > 0)


if __name__ == "__main__":
    sys.exit(main())

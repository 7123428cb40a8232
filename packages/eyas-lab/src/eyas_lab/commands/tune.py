"""`eyas tune`: measures passes and drafts on this machine, and shows the tree that makes most
tokens a second."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from eyas.cli.tools import (
    AS_JSON,
    DRAFT_WEIGHTS,
    DraftOptions,
    MethodOptions,
    TargetOptions,
    load,
    note,
    option_group,
    print_table,
)
from eyas.errors import OptionError

if TYPE_CHECKING:
    from eyas.adaptive.cost import Costs
    from eyas.adaptive.goodput import Plan
    from eyas.api import LLM

GROUP = "Information"
SHOWN = 6  # trees, each the best of its number of nodes
EXAMPLES = """
eyas tune  # the embedded model
eyas tune --target MODEL --draft HEAD  # your model with its head
eyas tune --force  # measure again, as the machine was busy or has changed
"""
NOTES = (
    "Costs are measured when they are first needed, and kept in $XDG_CACHE_HOME/eyas or ~/.cache/eyas.",
    "The expected tokens are a guess, as nothing was drafted yet; --tree auto corrects it while it decodes.",
)


@option_group
class TuneOptions:
    """The options of `eyas tune`."""

    draft: Annotated[str | None, "Model", "PATH|HUB"] = None
    """The draft head: a folder or a hub id."""
    method: Annotated[str | None, "Method", "NAME"] = None
    """A method with dynamic trees. Default: the best for the head."""
    draft_weights: DRAFT_WEIGHTS = "auto"
    force: Annotated[bool, "Machine"] = False
    """Measure everything again."""
    as_json: AS_JSON = False


def command(*, job: TuneOptions, model: TargetOptions, options: MethodOptions) -> None:
    """Measure the cost of trees on this machine and show the fastest one."""
    from eyas.adaptive.cost import cost_key, cost_path, load_costs
    from eyas.adaptive.goodput import Acceptance, Plan, sizes
    from eyas.adaptive.memory import first_chance

    draft = DraftOptions(draft=job.draft, method=job.method, draft_weights=job.draft_weights, tree="auto")
    llm = load(model, draft, options)
    limit = llm.drafter.max_tree
    if limit is None:
        raise OptionError(
            f"{llm.method} has no dynamic trees: there is nothing to tune; use another --method, like eagle3"
        )
    costs, known = load_costs(llm.drafter, job.force)
    guess = Acceptance(limit, first_chance(llm.drafter))
    plans = [Plan(s, guess(s), costs.cycle(s)) for s in sizes(limit)]
    chosen, place = max(plans, key=lambda plan: plan.rate), str(cost_path(cost_key(llm.drafter)))
    if job.as_json:
        setting = {"target": llm.target.name, "method": llm.method, "measured": not known, "file": place}
        tree = {**chosen.size._asdict(), "accepted": chosen.accepted, "tokens_per_second": chosen.rate}
        measured = {"costs": asdict(costs), "doubtful": costs.doubtful}
        print(json.dumps({**setting, **measured, "plain": {"tokens_per_second": 1 / costs.plain()}, "tree": tree}))
        return
    _print(llm, costs, plans)
    note(f"{'measured before; --force measures again' if known else 'measured now'}: {place}")
    note(f"quality of the measurement: {costs.quality}")


def _print(llm: LLM, costs: Costs, plans: Sequence[Plan]) -> None:
    print(f"{llm.target.name} with {llm.method}, {costs.context} tokens of context, milliseconds")
    passes = zip(costs.nodes, costs.verify, strict=True)
    rows = [(str(nodes), f"{1e3 * seconds:.2f}", f"{seconds / costs.verify[0]:.2f}x") for nodes, seconds in passes]
    print_table(("nodes", "pass", "vs 1"), rows)
    drafts = zip(costs.branches, costs.first, costs.deeper, strict=True)
    rows = [(str(branch), f"{1e3 * first:.2f}", f"{1e3 * deeper:.2f}") for branch, first, deeper in drafts]
    print_table(("branch", "first level", "each further"), rows)
    print(f"rest of a cycle with a draft {1e3 * costs.rest:.2f}, without one {1e3 * costs.plain_rest:.2f}")
    plain = 1 / costs.plain()
    best = {plan.size.nodes: plan for plan in sorted(plans, key=lambda plan: plan.rate)}  # the best of each size
    shown = sorted(sorted(best.values(), key=lambda plan: -plan.rate)[:SHOWN])
    trees = [("plain", costs.plain(), 1.0, plain)]
    trees += [("nodes {} depth {} branch {}".format(*p.size), p.seconds, 1 + p.accepted, p.rate) for p in shown]
    lines = [(name, f"{1e3 * s:.2f}", f"{n:.2f}", f"{rate:.1f}", f"{rate / plain:.2f}x") for name, s, n, rate in trees]
    heads = ("tree", "ms a cycle", "tokens a cycle", "tokens/s", "vs plain")
    bold = 1 + max(range(len(shown)), key=lambda n: shown[n].rate)
    print_table(heads, lines, title="Expected, before anything was drafted", bold=bold)

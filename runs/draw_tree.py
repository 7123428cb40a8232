"""Draw one cycle's tree in words, as in the README: what was drafted, and what the target made of it.

python runs/draw_tree.py "I want to book a table for two in San Jose tonight." --cycle 2
"""

from __future__ import annotations

import argparse

import eyas
from eyas.core.engine import Decoder, Step


def draw(step: Step, words: list[str], bonus: str) -> list[str]:
    """One line a node: accepted nodes are marked with *, the target's own next token follows the last of them."""
    parents = step.draft.tree.parents_BN[step.row].tolist()
    children = {n: [m for m, p in enumerate(parents) if p == n] for n in range(len(parents))}
    lines = []

    def visit(node: int, lead: str, last: bool) -> None:
        mark = "*" if node in step.path else " "
        tail = f"   -> {bonus}" if node == step.path[-1] else ""
        lines.append(f"{mark} {lead}{'' if node == 0 else '`-- ' if last else '|-- '}{words[node]}{tail}")
        below = "" if node == 0 else lead + ("    " if last else "|   ")
        for i, child in enumerate(children[node]):
            visit(child, below, i == len(children[node]) - 1)

    visit(0, "", True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt")
    parser.add_argument("--cycle", type=int, default=1)
    parser.add_argument("--nodes", type=int, default=10)
    args = parser.parse_args()
    llm = eyas.load(tree={"nodes": args.nodes, "depth": 5, "branch": 4})
    request, _ = llm.request(args.prompt)
    decoder = Decoder(llm.target, llm.drafter)
    decoder.add(request)
    steps: list[Step] = []
    while not decoder.finished and len(steps) <= args.cycle:
        steps += decoder.step()
    step = steps[args.cycle]
    words = [repr(llm.tokenizer.decode([t])) for t in step.draft.tokens_BN[step.row].tolist()]
    print("\n".join(draw(step, words, repr(llm.tokenizer.decode([step.tokens[-1]])))))
    print(f"\n{len(step.tokens)} tokens from one forward of the target")


if __name__ == "__main__":
    main()

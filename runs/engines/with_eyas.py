"""eyas, for runs/peers.py: with_eyas.py '{"target": FOLDER, "threads": N, ...}', the rest as
`eyas.load` takes it."""

import json
import sys

import torch
from _lines import redirect, talk

import eyas
from eyas import hardware


def main() -> None:
    redirect()
    options = json.loads(sys.argv[1])
    torch.set_num_threads(options.pop("threads"))
    llm = eyas.load(options.pop("target"), **options)
    cycles, accepted = 0, 0

    def answer(ids: list[int], max_tokens: int) -> dict[str, object]:
        nonlocal cycles, accepted
        result = llm.generate(ids, raw=True, max_new_tokens=max_tokens)
        stats = result.stats
        cycles, accepted = cycles + stats.cycles, accepted + sum(stats.accepted_lengths)
        return {"ids": list(result.token_ids), "first": stats.prefill_seconds, "seconds": stats.seconds}

    talk(
        hardware.versions(),
        {"answer": answer, "counts": lambda: {"drafts": cycles, "accepted": accepted}},
    )


if __name__ == "__main__":
    main()

"""AMD PACE, for runs/peers.py: with_pace.py '{"target": FOLDER, "threads": N, "dtype": "float32" or
"bfloat16"}'.

It needs a processor with AVX512_BF16. Its drafts are PARD's, which eyas reads and does not train, so that it decodes plainly here.
"""

import json
import sys
import time
from importlib.metadata import version
from typing import Any

import torch
from _lines import redirect, talk


class Times:
    """A streamer that keeps the time of each token; the prompt comes first."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def put(self, _: torch.Tensor) -> None:
        """Note when tokens arrive."""
        self.seen.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing: the last token has its time."""


def main() -> None:
    redirect()
    options = json.loads(sys.argv[1])
    torch.set_num_threads(options["threads"])
    # its operators use the threads that are set when it is imported
    from pace.llm import LLMModel, SamplingConfig

    llm = LLMModel(options["target"], dtype=getattr(torch, options["dtype"]), disable_tqdm=True)

    def answer(ids: list[int], max_tokens: int) -> dict[str, Any]:
        times = Times()
        start = time.perf_counter()
        output = llm.generate(torch.tensor([ids]), SamplingConfig(max_new_tokens=max_tokens, do_sample=False), times)
        new = output.output_token_ids[0].tolist()[len(ids) :]
        return {"ids": new, "first": times.seen[-len(new)] - start, "seconds": times.seen[-1] - start}

    talk({"amd-pace": version("amd-pace"), "torch": torch.__version__}, {"answer": answer})


if __name__ == "__main__":
    main()

"""transformers' generate, for runs/peers.py: with_transformers.py '{"target": FOLDER, "threads": N,
"mode": "plain|compiled"}'."""

import json
import sys
import time
from typing import Any

import torch
import transformers
from _lines import redirect, talk
from transformers import AutoModelForCausalLM, CompileConfig, StaticCache

LONGEST = 640  # of a static cache: one for all prompts, so that it is compiled once


class Clock:
    """A streamer that notes when the first token comes."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def main() -> None:
    redirect()
    options = json.loads(sys.argv[1])
    torch.set_num_threads(options["threads"])
    model = AutoModelForCausalLM.from_pretrained(options["target"], dtype=torch.float32).eval()
    more: dict[str, Any] = {}
    static = StaticCache(config=model.config, max_cache_len=LONGEST) if options["mode"] == "compiled" else None
    if static is not None:
        more["past_key_values"] = static
        model.generation_config.compile_config = CompileConfig(mode="default", fullgraph=False)
        model.generation_config.compile_config._compile_all_devices = True  # otherwise nothing is compiled on a CPU

    @torch.no_grad()
    def answer(ids: list[int], max_tokens: int) -> dict[str, Any]:
        clock, prompt = Clock(), torch.tensor([ids])
        if static is not None:
            static.reset()
        start = time.perf_counter()
        limits: dict[str, Any] = {"max_new_tokens": max_tokens, "do_sample": False}
        text = model.generate(prompt, attention_mask=torch.ones_like(prompt), streamer=clock, **limits, **more)
        end = time.perf_counter()
        return {"ids": text[0, len(ids) :].tolist(), "first": clock.times[1] - start, "seconds": end - start}

    talk({"transformers": transformers.__version__, "torch": torch.__version__}, {"answer": answer})


if __name__ == "__main__":
    main()

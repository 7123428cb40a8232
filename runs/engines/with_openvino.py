"""OpenVINO GenAI, for runs/peers.py: with_openvino.py '{"target": FOLDER, "threads": N, "head": FOLDER or null,
"tokens": N, "dflash": whether the head is DFlash's}'."""

import json
import sys
import time
from typing import Any

import numpy as np
import openvino
import openvino_genai
from _lines import redirect, talk


def main() -> None:
    redirect()
    options = json.loads(sys.argv[1])
    settings = {"INFERENCE_NUM_THREADS": options["threads"], "INFERENCE_PRECISION_HINT": "f32"}
    more: dict[str, Any] = {}
    if options.get("head"):
        more["draft_model"] = openvino_genai.draft_model(options["head"], "CPU", **settings)
    if options.get("dflash"):  # refuses the pipeline's own settings: they keep the cache of earlier prompts
        more["scheduler_config"] = scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching, scheduler.max_num_batched_tokens = False, 2**30
    pipeline = openvino_genai.LLMPipeline(options["target"], "CPU", **settings, **more)
    limits = pipeline.get_generation_config()
    limits.do_sample = False
    if more:
        limits.num_assistant_tokens = options["tokens"]
    drafted, accepted, cycles = bool(options.get("head")), 0, 0

    def answer(ids: list[int], max_tokens: int) -> dict[str, Any]:
        nonlocal accepted, cycles
        limits.max_new_tokens = max_tokens
        prompt = openvino.Tensor(np.array([ids], dtype=np.int64))
        start = time.perf_counter()
        result = pipeline.generate(prompt, limits)
        seconds = time.perf_counter() - start
        if drafted:  # its own count of accepted tokens leaves some of the last cycle out
            # the target's passes without the prompt's
            steps = len(result.extended_perf_metrics.main_model_metrics.raw_metrics.m_durations) - 1
            accepted, cycles = accepted + len(result.tokens[0]) - 1 - steps, cycles + steps
        return {"ids": list(result.tokens[0]), "first": result.perf_metrics.get_ttft().mean / 1000, "seconds": seconds}

    def counts() -> dict[str, Any]:
        return {"drafts": cycles, "accepted": accepted} if drafted else {}

    versions = {"openvino": openvino.__version__, "openvino_genai": openvino_genai.__version__}
    talk(versions, {"answer": answer, "counts": counts})


if __name__ == "__main__":
    main()

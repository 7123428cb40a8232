"""vLLM's CPU build, for runs/peers.py: with_vllm.py '{"target": FOLDER, "threads": N, "speculative":
what vLLM calls speculative_config, or null}'."""

import json
import os
import sys
import time
from typing import Any

from _lines import redirect, talk

OPTIONS = json.loads(sys.argv[1])
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "OMP_NUM_THREADS": str(OPTIONS["threads"]),
}


def main() -> None:
    redirect()
    import torch  # behind the settings above
    import vllm

    llm = vllm.LLM(
        OPTIONS["target"],
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=1024,
        distributed_executor_backend="uni",
        disable_log_stats=False,
        speculative_config=OPTIONS["speculative"],
    )

    def answer(ids: list[int], max_tokens: int) -> dict[str, Any]:
        start = time.perf_counter()
        limits = vllm.SamplingParams(temperature=0, max_tokens=max_tokens)
        (result,) = llm.generate([{"prompt_token_ids": ids}], limits, use_tqdm=False)
        seconds, times = time.perf_counter() - start, result.metrics
        decoding = times.last_token_ts - times.first_token_ts
        return {"ids": list(result.outputs[0].token_ids), "first": seconds - decoding, "seconds": seconds}

    def counts() -> dict[str, Any]:
        values = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
        names = {"drafts": "num_drafts", "accepted": "num_accepted_tokens"}
        return {count: values.get(f"vllm:spec_decode_{name}", 0) for count, name in names.items()}

    talk({"vllm": vllm.__version__, "torch": torch.__version__}, {"answer": answer, "counts": counts})


if __name__ == "__main__":
    main()

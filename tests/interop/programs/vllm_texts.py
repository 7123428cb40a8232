"""Run by vLLM's Python: answers of vLLM with drafts, and how many of them it accepted.

Reads from stdin {"target", "speculative": what vLLM calls speculative_config, "max_tokens", "prompts":
[[ids]]}; prints, as the last line, {"ids": [[ids]], "drafts", "accepted", "versions"}. All prompts
are in one batch; greedy, in float32. The target needs no tokenizer.
"""

import json
import os
import sys
from pathlib import Path

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}

import torch
import transformers
import vllm


def main() -> None:
    asked = json.load(sys.stdin)
    plain = not (Path(asked["target"]) / "tokenizer_config.json").exists()
    llm = vllm.LLM(
        asked["target"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        distributed_executor_backend="uni",
        disable_log_stats=False,
        speculative_config=asked["speculative"],
        skip_tokenizer_init=plain,
    )
    limits = vllm.SamplingParams(temperature=0, max_tokens=asked["max_tokens"], detokenize=not plain)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in asked["prompts"]], limits, use_tqdm=False)
    counts = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    found = {
        "ids": [list(output.outputs[0].token_ids) for output in outputs],
        "drafts": counts.get("vllm:spec_decode_num_drafts", 0),
        "accepted": counts.get("vllm:spec_decode_num_accepted_tokens", 0),
        "versions": {"vllm": vllm.__version__, "torch": torch.__version__, "transformers": transformers.__version__},
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()

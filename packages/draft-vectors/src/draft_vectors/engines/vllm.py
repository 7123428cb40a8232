"""vLLM, by its CPU build, in this process: `python -m draft_vectors draft_vectors.engines.vllm:Vllm --only eagle3-chain`.

It runs chains, greedily here: its random numbers are its own. `make interop` of eyas installs it in .venv-interop.
"""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draft_vectors.decode import Case
from draft_vectors.runner import Answer, Engine, head_folder

__all__ = ["Vllm"]

METHODS = {"eagle1": "eagle", "eagle3": "eagle3", "peagle": "eagle3", "dflash": "dflash"}  # ours -> vLLM's
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


class Vllm(Engine):
    """vLLM's engine, one model at a time."""

    name = "vLLM"

    def __init__(self, data: Path, dtype: str = "float32") -> None:
        super().__init__(data, dtype)
        os.environ.update(SETTINGS)
        self.loaded = ""  # the case of the engine
        self.engine: Any = None
        self.requests = 0

    def load(self, case: Case) -> None:
        """Load the engine of a case."""
        import vllm

        self.engine = None
        gc.collect()  # the old engine ends its groups of processes, before the new one begins its own
        speculative = {"method": METHODS[case.method], "model": str(head_folder(self.data, case))}
        self.engine = vllm.LLM(
            str(self.data / "target"),
            dtype=self.dtype,
            enforce_eager=True,
            max_model_len=128,
            distributed_executor_backend="uni",
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            speculative_config={
                **speculative,
                "num_speculative_tokens": case.depth,
                **({"parallel_drafting": True} if case.method == "peagle" else {}),
            },
        ).llm_engine
        self.loaded = case.name

    def generate(self, case: Case, prompt: Sequence[int]) -> Answer | None:
        if case.tree != "chain" or case.rule != "greedy" or case.method not in METHODS:
            return None
        import vllm

        if self.loaded != case.name:
            self.load(case)
        limits = vllm.SamplingParams(temperature=0, max_tokens=case.new_tokens, ignore_eos=True, detokenize=False)
        self.requests += 1
        self.engine.add_request(str(self.requests), {"prompt_token_ids": list(prompt)}, limits)
        ids, sizes = list[int](), list[int]()
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                ids = list(output.outputs[0].token_ids)
                sizes.append(len(ids))
        # the first output is the prompt's token, each further one a cycle's
        return Answer(ids, [new - old - 1 for old, new in itertools.pairwise(sizes)])

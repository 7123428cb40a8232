"""ik_llama.cpp by the bindings of ik-llama-cpp-python, for runs/peers.py: with_ik_llama.py
'{"target": GGUF FILE, "threads": N}'.

Tokens are read as ids, and the next one is the largest logit by NumPy: the bindings' own sampler walks over the vocabulary in Python.
Without flash attention, which the bindings' own class leaves out too on processors that it does not know: with it longer prompts abort.
"""

import ctypes
import json
import sys
import time
from importlib.metadata import version
from typing import Any

import numpy as np
from _lines import median_seconds, redirect, talk

CONTEXT = 1024


def main() -> None:
    redirect()
    options = json.loads(sys.argv[1])
    from ik_llama_cpp import _ctypes_api as api
    from ik_llama_cpp._internals import IkContext, IkModel, make_batch_range

    model = IkModel(options["target"])
    context = IkContext(model, n_ctx=CONTEXT, n_threads=options["threads"], flash_attn=False)

    def read(ids: list[int], begin: int) -> None:
        batch = make_batch_range(ids, pos_start=begin)
        failed = context.decode(batch)
        api.llama_batch_free(batch)
        if failed:
            raise RuntimeError(f"llama_decode returned {failed}")

    def best() -> int:
        return int(np.ctypeslib.as_array(context.get_logits(-1), (model.n_vocab,)).argmax())

    def answer(ids: list[int], max_tokens: int) -> dict[str, Any]:
        context.kv_cache_clear()
        start = time.perf_counter()
        read(ids, 0)
        new, times = [best()], [time.perf_counter()]
        while len(new) < max_tokens and not api.llama_token_is_eog(model.model, new[-1]):
            read(new[-1:], len(ids) + len(new) - 1)
            new.append(best())
            times.append(time.perf_counter())
        return {"ids": new, "first": times[0] - start, "seconds": times[-1] - start}

    def passes(tokens: list[int], context: int, repeats: int) -> dict[str, Any]:
        def run(n: int) -> None:
            read(list(range(20, 20 + n)), context)
            best()

        return {"seconds": [median_seconds(lambda n=n: run(n), lambda: fill(context), repeats) for n in tokens]}

    def fill(tokens: int) -> None:
        context.kv_cache_clear()
        read([7] * tokens, 0)

    api._lib.llama_print_system_info.restype = ctypes.c_char_p  # "AVX2 = 1 | AVX512 = 0 | ..."
    told = (part.strip() for part in api._lib.llama_print_system_info().decode().split("|"))
    instructions = ", ".join(part.removesuffix(" = 1") for part in told if part.endswith(" = 1"))
    versions = {"ik-llama-cpp-python": version("ik-llama-cpp-python"), "compiled with": instructions}
    talk(versions, {"answer": answer, "passes": passes})


if __name__ == "__main__":
    main()

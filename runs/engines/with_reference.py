"""SafeAILab's package eagle-llm, which is EAGLE-1 with its static tree, for runs/peers.py: with_reference.py
'{"target": FOLDER, "head": FOLDER, "threads": N, "plain": whether to decode without the head}'.

Their loop ends after a whole cycle, so an answer may be a few tokens longer than asked for; these
are cut off, and their time stays.
"""

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from _lines import redirect, talk


def main() -> None:
    redirect()
    options = json.loads(sys.argv[1])
    torch.set_num_threads(options["threads"])
    from eagle.model.ea_model import EaModel  # type: ignore[import-not-found]

    places = {"base_model_path": options["target"], "ea_model_path": options["head"]}
    model = EaModel.from_pretrained(**places, torch_dtype=torch.float32).eval()
    use_rope_theta(model)
    end_of_text, base = model.tokenizer.eos_token_id, model.base_model

    def plain(ids: torch.Tensor, temperature: float, max_new_tokens: int) -> torch.Tensor:
        """Their decoding without a head, which is a generator, as a function."""
        steps: Iterator[torch.Tensor] = model.naive_generate(ids, temperature=temperature)
        return next(text for n, text in enumerate(steps, 1) if n > max_new_tokens or text[0, -1] == end_of_text)

    generate = plain if options["plain"] else model.eagenerate
    cycles, accepted = 0, 0
    ends: list[float] = []  # when each forward of the target ended; the first one is the prompt's
    base.model.register_forward_hook(lambda *_: ends.append(time.perf_counter()))

    @torch.no_grad()
    def answer(ids: list[int], max_tokens: int) -> dict[str, Any]:
        nonlocal cycles, accepted
        ends.clear()
        start = time.perf_counter()
        # they end behind more than that
        text = generate(torch.tensor([ids]), temperature=0.0, max_new_tokens=max_tokens - 1)
        seconds = time.perf_counter() - start
        new = text[0, len(ids) :].tolist()
        cycles, accepted = cycles + len(ends) - 1, accepted + len(new) - len(ends) + 1
        if end_of_text in new:
            new = new[: new.index(end_of_text) + 1]
        return {"ids": new[:max_tokens], "first": ends[0] - start, "seconds": seconds}

    handlers: dict[str, Any] = {"answer": answer}
    if not options["plain"]:
        handlers["counts"] = lambda: {"drafts": cycles, "accepted": accepted}
    talk({"transformers": transformers.__version__, "torch": torch.__version__}, handlers)


def use_rope_theta(model: Any) -> None:
    """Rotate by the target's `rope_theta`; eagle-llm 1.2.1 reads it nowhere and takes 10,000."""
    theta = float(model.base_model.config.rope_theta)
    for module in model.modules():
        if getattr(module, "base", theta) != theta and hasattr(module, "_set_cos_sin_cache"):
            module.base = theta
            module.inv_freq = theta ** (-torch.arange(0, module.dim, 2).float() / module.dim)
            module._set_cos_sin_cache(module.max_seq_len_cached, module.inv_freq.device, torch.float32)


if __name__ == "__main__":
    main()

"""A fuzz over what other code does to the process and to the model: default dtypes and devices, pruned and edited layers, Ctrl-C.

python tests/state_fuzz.py SEED ROUNDS prints a line for each round, and ends with 1 after the first wrong id. A child process:
a kernel that reads past a matrix ends it.
"""

import random
import sys
import warnings

import torch
from transformers import PreTrainedModel

import eyas
import zoo
from edited import EDITS, NEW, PROMPT, plain
from eyas.errors import EyasError
from interrupts import interrupt, lines_of
from test_defaults import DEFAULTS, default, llama

HYBRIDS = ("mamba", "falcon_h1", "qwen3_next")
METHODS = ("suffix", "prompt_lookup", "lookahead", "vanilla")


def play(rng: random.Random) -> str:
    """One round; return what was done. An AssertionError tells a wrong id."""
    edit, family = rng.choice([*EDITS]), rng.choice(HYBRIDS) if rng.random() < 0.2 else "llama"
    model: PreTrainedModel = llama() if family == "llama" else zoo.HYBRIDS[family]()
    if family == "llama":
        torch.manual_seed(rng.randrange(2**31))
        EDITS[edit](model)
    wanted, what = plain(model), rng.choice([*DEFAULTS, None])
    method = "vanilla" if "quantised" in edit else rng.choice(METHODS)
    done = f"{family}, {edit if family == 'llama' else 'as it is'}, {what}, {method}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if what is None:
            return f"{done}: {_answers(rng, model, method, wanted)}"
        if rng.random() < 0.5:  # loaded before, used after
            llm = eyas.load(model, tokenizer=False, kernels="on", method=method)
            with default(what):
                assert _ids(llm) == wanted, done
        with default(what):
            return f"{done}: {_answers(rng, model, method, wanted)}"


def _answers(rng: random.Random, model: PreTrainedModel, method: str, wanted: list[int]) -> str:
    """Answer, and answer again after each of some interruptions."""
    llm = eyas.load(model, tokenizer=False, kernels=rng.choice(["on", "off"]), method=method)
    assert _ids(llm) == wanted, (method, wanted)
    lines = lines_of(lambda: _ids(llm))  # of a later answer: the first one prepares more
    struck = 0
    for _ in range(3):
        point = rng.randrange(1, lines)
        struck += interrupt(lambda: _ids(llm), point)
        got = _ids(llm)
        assert got == wanted, f"after Ctrl-C at line {point}: {got} instead of {wanted}"
    return f"{struck} interruptions of {lines} lines"


def _ids(llm: eyas.LLM) -> list[int]:
    return list(llm.generate(PROMPT, max_new_tokens=NEW, ignore_eos=True).token_ids)


def main() -> int:
    seed, rounds = int(sys.argv[1]), int(sys.argv[2])
    for number in range(rounds):
        try:
            print(seed, number, play(random.Random(f"{seed} {number}")), flush=True)
        except (AssertionError, EyasError) as error:
            print(seed, number, "WRONG:", error, flush=True)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

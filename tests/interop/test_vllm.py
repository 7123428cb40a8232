"""vLLM's CPU build serves the embedded model with our heads: the texts are those of plain decoding,
and as much is accepted as in eyas.

Loading proves little: vLLM leaves tensors that it does not find as they are, and a head that
computes something else only makes it slow.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import eyas
from interop_engines import asked, ours

sys.path.append(str(Path(__file__).parents[2] / "runs"))
from _peers import SUFFIX

pytestmark = pytest.mark.slow
TOKENS = 3
LIMIT = 128
CASES = [
    *(("eagle3", name) for name in ("vllm", "sglang", "safeailab", "speculators")),
    *((head, name) for head in ("eagle3 of two layers", "peagle") for name in ("vllm", "speculators")),
    ("eagle1", "vllm"),
    ("dflash", "vllm"),
]
BLOCKS = ("dflash",)  # DSpark needs vLLM's newer model runner, which its CPU build does not have
SHORT = 180  # tokens of a prompt that fits, with its answer, the length that the block heads were trained on


@pytest.fixture(scope="module")
def expected(
    prompts: list[list[int]], heads: dict[str, Path], trained: Callable[[str], Path]
) -> Callable[[str], tuple[list[list[int]], float]]:
    """By head: ids, and the mean acceptance length."""
    known: dict[str, tuple[list[list[int]], float]] = {}

    def made(head: str) -> tuple[list[list[int]], float]:
        if head not in known:
            place = heads.get(head) or trained(head)
            known[head] = ours(asked_of(head, prompts), place, method_of(head), TOKENS, LIMIT)
        return known[head]

    return made


def method_of(head: str) -> str:
    return head.split()[0]


def asked_of(head: str, prompts: list[list[int]]) -> list[list[int]]:
    """The prompts for this head: vLLM does not draft behind `max_position_embeddings`, which is the trained length."""
    return [ids for ids in prompts if head not in BLOCKS or len(ids) <= SHORT]


@pytest.mark.parametrize(("head", "name"), CASES)
def test_texts_and_acceptance(
    head: str,
    name: str,
    interop: Path,
    folder: Path,
    prompts: list[list[int]],
    exported: Callable[[str, str], Path],
    expected: Callable[[str], tuple[list[list[int]], float]],
) -> None:
    """Guards against a head that vLLM loads and computes otherwise: without `"bias": false` nothing
    of EAGLE-1 is accepted. Block heads are small ones that have learnt the answers by heart.

    False alarm: batches round otherwise, so a near-tie may turn one answer; none of 24 does with
    these versions, and the mean lengths are equal to the last digit. 1 % leaves room for a near-tie
    in a draft.
    """
    ids, mean = expected(head)
    kind = {"eagle1": "eagle", "peagle": "eagle3"}.get(method_of(head), method_of(head))
    speculative = {"method": kind, "model": str(exported(head, name)), "num_speculative_tokens": TOKENS}
    speculative |= {"parallel_drafting": True} if head == "peagle" else {}
    limits = {"max_tokens": LIMIT, "prompts": asked_of(head, prompts)}
    found = asked("vllm_texts.py", interop, {"target": str(folder), "speculative": speculative, **limits})
    equal = sum(one == other for one, other in zip(found["ids"], ids, strict=True))
    length = 1 + found["accepted"] / found["drafts"]
    print(
        f"{head} as {name}: {equal} of {len(ids)} texts equal; mean acceptance length {length:.4f}, eyas {mean:.4f}; {found['versions']}"
    )
    assert equal == len(ids)
    assert length == pytest.approx(mean, rel=0.01)


def test_suffix_decoding(interop: Path, folder: Path, llm: eyas.LLM, prompts: list[list[int]]) -> None:
    """Guards the row of runs/peers.py: vLLM finds the library that `make interop` compiles, drafts by it, and the texts are
    those of plain decoding. No earlier answer helps: each text has its own tree only."""
    if not any(interop.parents[1].glob("lib/*/site-packages/arctic_inference")):
        pytest.skip("arctic-inference could not be compiled: see the output of make interop")
    question = {
        "target": str(folder),
        "speculative": {"method": "suffix", **SUFFIX},
        "max_tokens": LIMIT,
        "prompts": prompts,
    }
    found = asked("vllm_texts.py", interop, question)
    expected = [list(llm.generate(ids, raw=True, max_new_tokens=LIMIT).token_ids) for ids in prompts]
    print(f"suffix decoding: {found['accepted']} drafts accepted in {found['drafts']} cycles; {found['versions']}")
    assert found["ids"] == expected
    assert found["accepted"]

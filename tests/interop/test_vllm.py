"""vLLM's CPU build serves the embedded model with our heads: the texts are those of plain decoding,
and as much is accepted as in eyas.

Loading proves little: vLLM leaves tensors that it does not find as they are, and a head that
computes something else only makes it slow.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import eyas
import zoo
from eyas import checkpoints
from eyas.core.target import Target
from eyas.drafters import Batch, mtp
from eyas.nn import Documents
from eyas_train import exports
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
GLM: dict[str, Any] = {  # vLLM's attention on CPUs has no heads smaller than 32
    "hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "max_position_embeddings": 1024, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 64, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
SHORT_LIMIT = 48
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
    print(f"{head} as {name}: {equal} of {len(ids)} texts equal; {found['versions']}")
    print(f"mean acceptance length {length:.4f}, eyas {mean:.4f}")
    assert equal == len(ids)
    assert length == pytest.approx(mean, rel=0.01)


def test_suffix_decoding(interop: Path, folder: Path, llm: eyas.LLM, prompts: list[list[int]]) -> None:
    """Guards the row of runs/peers.py: vLLM finds the library that `make interop` compiles, drafts by it, and the texts are
    those of plain decoding. No earlier answer helps: each text has its own tree only."""
    if not any(interop.parents[1].glob("lib/*/site-packages/arctic_inference")):
        pytest.skip("arctic-inference could not be compiled: see the output of make interop")
    question: dict[str, Any] = {"target": str(folder), "max_tokens": LIMIT, "prompts": prompts}
    question["speculative"] = {"method": "suffix", **SUFFIX}
    found = asked("vllm_texts.py", interop, question)
    expected = [list(llm.generate(ids, raw=True, max_new_tokens=LIMIT).token_ids) for ids in prompts]
    print(f"suffix decoding: {found['accepted']} drafts accepted in {found['drafts']} cycles; {found['versions']}")
    assert found["ids"] == expected
    assert found["accepted"]


def test_a_module_stitched_into_its_target(interop: Path, tmp_path: Path) -> None:
    """Guards against a tensor of an exported MTP module that vLLM does not find, or takes for another. The target is a small
    random GLM-4 MoE, and the module has learnt its answers by heart.

    vLLM's class accepts less than eyas (3.2 tokens a cycle beside 3.6): it zeroes the embedding at position 0, and hands the state
    before the last norm on to the next step, where transformers' does neither. Changed in both, it accepts as much to the last digit.
    """
    prompts = [list(range(3 + 5 * i, 10 + 6 * i)) for i in range(8)]
    model = zoo.tiny("glm4_moe", **GLM)
    model.save_pretrained(tmp_path / "target")
    plain = eyas.load(model, method="vanilla", tokenizer=False, kernels="off")
    expected = [list(plain.generate(ids, raw=True, max_new_tokens=SHORT_LIMIT).token_ids) for ids in prompts]
    texts = [ids + answer for ids, answer in zip(prompts, expected, strict=True)]
    drafter = by_heart(plain.target, texts)
    place = tmp_path / "stitched"
    exports.export(drafter.weights(), "checkpoint", place, checkpoints.ExportTarget(str(tmp_path / "target")))
    tree: Any = {"tree.nodes": TOKENS + 1, "tree.depth": TOKENS, "tree.branch": 1}
    drafting = eyas.load(place, method="mtp", tokenizer=False, kernels="off", **tree)
    stats = [drafting.generate(ids, raw=True, max_new_tokens=SHORT_LIMIT).stats for ids in prompts]
    mean = 1 + sum(sum(one.accepted_lengths) for one in stats) / sum(one.cycles for one in stats)
    speculative = {"method": "mtp", "num_speculative_tokens": TOKENS}
    question = {"target": str(place), "speculative": speculative, "max_tokens": SHORT_LIMIT, "prompts": prompts}
    found = asked("vllm_texts.py", interop, question)
    length = 1 + found["accepted"] / found["drafts"]
    print(f"MTP in a GLM-4 MoE: mean acceptance length {length:.4f}, eyas {mean:.4f}; {found['versions']}")
    assert found["ids"] == expected
    assert length > 0.8 * mean > 2


def by_heart(target: Target, texts: list[list[int]]) -> mtp.Method:
    """Return an MTP module that has learnt these texts."""
    lengths = tuple(map(len, texts))
    features = torch.cat([target.encode(torch.tensor([text]), (target.num_layers,))[0] for text in texts])
    tokens = torch.tensor([token for text in texts for token in text])
    batch = Batch(tokens, features, torch.ones(len(tokens), dtype=torch.bool), Documents(lengths))
    drafter = mtp.Method.random(target, seed=5)
    weights = [weight.requires_grad_(True) for weight in drafter.net.parameters()]
    optimiser = torch.optim.AdamW(weights, 2e-3)
    for _ in range(120):
        optimiser.zero_grad()
        drafter.loss(batch).total.backward()
        optimiser.step()
    for weight in weights:
        weight.requires_grad_(False)
    return drafter

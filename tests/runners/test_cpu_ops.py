"""The seam of fast operations: who uses the kernels', and that they compute what the reference computes."""

import pytest
import torch

import zoo
from eyas import kernels
from eyas.core.cache import commit_path
from eyas.core.engine import Decoder, Request
from eyas.core.ops import REFERENCE
from eyas.core.sampling import Sampling
from eyas.core.target import Target
from eyas.core.tree import Draft, Tree
from eyas.drafters import find
from eyas.runners import with_fastest_runner
from eyas.runners.cpu_ops import CpuCycleOps
from reference import plain_decode, run

needs = pytest.mark.skipif(not kernels.available(), reason=f"no kernels here: {kernels.why_not()}")
REQUESTS = [Request((5, 9, 5, 9, 5), 12), Request((7, 3, 7, 3), 12, Sampling(temperature=0.8, seed=3))]


def forbidden(*arguments: object, **keywords: object) -> None:
    raise AssertionError("a kernel ran although kernels are off")


@pytest.mark.quick("eagle2")
@pytest.mark.parametrize("method", ["vanilla", "suffix", "eagle2"])
def test_off_is_off(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: draws, paths and commits were made by C++ wherever a compiler was, whatever `kernels` said."""
    target = with_fastest_runner(Target(zoo.FAMILIES["llama"]()), kernels="off")
    drafter = find(method).random(target, seed=1)
    decoder = Decoder(target, drafter, 2)
    for name in ("draw", "follow", "commit", "gumbel", "grow", "linear", "head", "rms_norm", "pack"):
        monkeypatch.setattr(kernels, name, forbidden)
    assert run(decoder, REQUESTS)[0] == [plain_decode(target.model, request) for request in REQUESTS]


@needs
def test_kernels_follow_and_commit_as_the_reference() -> None:
    """Random trees of 1 to 12 nodes, 40 times: the same path, tokens, lengths and bonus; the same
    slots after the commit."""
    generator = torch.Generator().manual_seed(0)
    fast = CpuCycleOps()
    for turn in range(40):
        B, N, V = 3, 1 + turn % 12, 50
        parents = [-1] + [int(torch.randint(0, n, (1,), generator=generator)) for n in range(1, N)]
        tree = Tree.build(torch.tensor([parents] * B), max(N - 1, 0))
        tokens_BN = torch.stack([torch.randperm(V, generator=generator)[:N] for _ in range(B)])
        hits_BN = torch.zeros(B, N, dtype=torch.long)
        for n in range(N):
            children = [m for m in range(N) if parents[m] == n]
            hits_BN[:, n] = tokens_BN[:, children[turn % len(children)]] if children and turn % 3 else V
        draft = Draft(tree, tokens_BN)
        ours, reference = fast.accept_path(draft, hits_BN), REFERENCE.accept_path(draft, hits_BN)
        for name in ("path_BP", "tokens_BP", "length_B", "bonus_B"):
            assert torch.equal(getattr(ours, name), getattr(reference, name)), name
        store = torch.randn(4, B, 2, 64, 8, generator=torch.Generator().manual_seed(turn))
        store = store.to((torch.float32, torch.bfloat16)[turn % 2])
        stores = [store.clone(), store.clone()]
        length_B = torch.tensor([3, 0, 20])
        fast.commit(stores[0], length_B, ours.path_BP)
        commit_path(stores[1], length_B, reference.path_BP)
        for b in range(B):
            used = int(length_B[b] + reference.length_B[b])
            assert torch.equal(stores[0][:, b, :, :used], stores[1][:, b, :, :used])

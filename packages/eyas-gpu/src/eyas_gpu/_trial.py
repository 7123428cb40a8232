"""Tries the GPU kernels on small inputs before they are used, against the same operation in torch.

Another compiler or generation of GPUs may refuse or miscompute one. So a machine tries them itself, in a second or
two: a kernel that fails costs a warning and its speed, not the text. A target's layers are compared as a whole
(`layers.check`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from eyas.core.cache import commit_path
from eyas.core.ops import REFERENCE, Ops
from eyas.core.sampling import GumbelNoise, Sampling
from eyas.core.tree import Draft, Tree
from eyas.errors import one_line
from eyas.nn import DecoderLayer, DraftKVCache, LayerShape, RMSNorm, join_normed
from eyas_gpu._draft_net import with_gpu_kernels

__all__ = ["fault_of_kernels"]

TOLERANCE = 1e-3  # float32 sums in another order; on a GPU also approximated functions
SHAPE = LayerShape(hidden_size=96, intermediate_size=200, num_heads=4, num_kv_heads=2, head_dim=64)
LENGTHS = (190, 70)  # committed slots of two rows


def fault_of_kernels(device: torch.device, ops: Ops) -> str:
    """Return the first kernel that fails on this device, and how; "" if all work.

    Args:
        ops: the kernels' implementation of draws, paths and commits.
    """
    with torch.no_grad():
        for trial in (_draws, _paths, _filters, _commits, _draft_layers):
            try:
                if name := trial(device, ops):
                    return f"{name} gives other numbers"
            except Exception as error:  # whatever a compiler or a driver raises
                return f"{type(error).__name__}: {one_line(error, 200)}"
    return ""


def _random(device: torch.device, *shape: int) -> Tensor:
    """Return the same numbers on every device."""
    return torch.randn(shape, dtype=torch.float32, generator=torch.Generator().manual_seed(len(shape))).to(device)


def _same(name: str, *pairs: tuple[Tensor, Tensor]) -> str:
    """Return the name if two tensors of a pair differ; else ""."""
    alike = all(
        torch.allclose(found.double(), expected.double(), rtol=TOLERANCE, atol=TOLERANCE) for found, expected in pairs
    )
    return "" if alike else name


def _tree(device: torch.device) -> Tree:
    return Tree.build(torch.tensor([[-1, 0, 0, 1, 1, 3], [-1, 0, 1, 2, 0, 3]], device=device), 4)


def _draws(device: torch.device, ops: Ops) -> str:
    """Draw with noise and without."""
    position, scores = torch.tensor([11, 2**20], device=device), _random(device, 2, 6, 3000)
    pairs = []
    for greedy in (True, False):
        noise = GumbelNoise(torch.tensor([3, 4], device=device), torch.full((2,), greedy, device=device), greedy)
        found, expected = (kind.draw(scores, _tree(device), position, noise)[0] for kind in (ops, REFERENCE))
        pairs.append((found, expected))
    return _same("a draw", *pairs)


def _paths(device: torch.device, ops: Ops) -> str:
    """Follow draws that children have, and one that no child has."""
    tokens = torch.arange(12, device=device).view(2, 6)
    draft, position = Draft(_tree(device), tokens), torch.tensor([11, 2**20], device=device)
    scores = nn.functional.one_hot(tokens[:, [1, 3, 0, 5, 0, 0]], 3000).to(torch.bfloat16)
    noise = GumbelNoise(tokens[:, 0], torch.ones(2, dtype=torch.bool, device=device), True)
    found, expected = (kind.verify_deterministic(draft, scores, position, noise) for kind in (ops, REFERENCE))
    names = ("path_BP", "tokens_BP", "length_B", "bonus_B")
    return _same("a path", *((getattr(found, name), getattr(expected, name)) for name in names))


def _filters(device: torch.device, ops: Ops) -> str:
    """Compare the probabilities in order: which of several equal tokens are excluded depends on how a device sorts."""
    sampling, scores = (Sampling(0.7, top_k=40, top_p=0.8, min_p=0.01),) * 2, _random(device, 2, 6, 3000)
    pairs = []
    for logits in (scores[..., :300], scores.to(torch.bfloat16)):
        found, expected = (kind.scores(logits, sampling, None).softmax(-1) for kind in (ops, REFERENCE))
        pairs.append((found.sort(-1).values, expected.sort(-1).values))
    return _same("top-k, top-p or min-p", *pairs)


def _commits(device: torch.device, ops: Ops) -> str:
    store, length = _random(device, 4, 2, 2, 30, 64), torch.tensor([5, 9], device=device)
    expected, path = store.clone(), torch.tensor([[0, 2, 3, 7], [0, 1, 4, 5]], device=device)
    commit_path(expected, length, path)
    ops.commit(store, length, path)
    return _same("commit", *((store[:, b, :, : n + 4], expected[:, b, :, : n + 4]) for b, n in enumerate((5, 9))))


class _Net(nn.Module):
    """One layer with norms before and after it, as in a draft net of EAGLE-3."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        with torch.device("meta"):  # no random numbers are drawn from torch's own generator
            self.norms = nn.ModuleList(RMSNorm(SHAPE.hidden_size, SHAPE.rms_eps) for _ in range(3))
            self.layer = DecoderLayer(SHAPE, 2 * SHAPE.hidden_size)
        self.to_empty(device=device).requires_grad_(False)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, dtype=torch.float32, generator=generator))

    def forward(self, a_RND: Tensor, b_RND: Tensor, position_RN: Tensor, cache: DraftKVCache) -> Tensor:
        a_norm, b_norm, last_norm = self.norms
        normed = join_normed(a_norm, a_RND, b_norm, b_RND)  # type: ignore[arg-type]
        output_RND: Tensor = last_norm(self.layer.decode(normed, b_RND, position_RN, cache))
        return output_RND


def _draft_layers(device: torch.device, ops: Ops) -> str:
    """Run one node over several parts of the keys, and many nodes over one part; keep keys unrotated, for a window."""
    net = _Net(device)
    by_kernels = with_gpu_kernels(net, "exact")
    pairs = list[tuple[Tensor, Tensor]]()
    for nodes in (1, 6, 90):
        pairs += zip(_layer_output(by_kernels, nodes, device), _layer_output(net, nodes, device), strict=True)
    return _same("a draft's layer", *pairs)


def _layer_output(net: _Net, nodes: int, device: torch.device) -> tuple[Tensor, ...]:
    """Return the net's output for so many nodes of two rows, and the stores of its cache."""
    inputs, length = _random(device, 2, nodes, SHAPE.hidden_size), torch.tensor(LENGTHS, device=device)
    slot = length[:, None] + torch.arange(nodes, device=device)
    cache = DraftKVCache(SHAPE.num_kv_heads, SHAPE.head_dim, 2, torch.float32, device, window=(2, 400))
    cache.reserve(max(LENGTHS) + nodes)
    for store in cache.stores:
        store.copy_(_random(device, *store.shape))
    cache.prepare(range(2), lambda: slot, max(LENGTHS) + nodes)
    cache.set_mask(length, torch.ones(nodes, nodes, dtype=torch.bool, device=device).tril().expand(2, nodes, nodes))
    return net(inputs, inputs.flip(0), slot, cache), *cache.stores

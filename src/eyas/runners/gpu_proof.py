"""Tries every GPU kernel on small inputs before it is used, against the same operation in torch;
then a CUDA graph of the model.

They have run on one H200 so far, and another compiler or generation of GPUs may refuse or miscompute
one. So a machine proves them itself, in a second or two: a kernel that fails costs a warning and its
speed, not the text.

Letters: R rows, Q nodes, T nodes in slots, H heads, K key-value heads, W slots, h head size, V
vocabulary, X drafted nodes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eyas import gpu
from eyas.core.cache import commit_path, slot_mask
from eyas.core.ops import REFERENCE, Ops
from eyas.core.sampling import GumbelNoise, Sampling
from eyas.core.target import Runner, Target
from eyas.core.tree import Draft, Tree
from eyas.errors import EyasError, one_line
from eyas.nn import grouped_attention, rope
from eyas.runners._comparison import compare

__all__ = ["fault_of_kernels", "fault_of_runner"]

TOLERANCE = 1e-3  # float32 sums in another order; on a GPU also approximated functions


def fault_of_kernels(device: torch.device, ops: Ops) -> str:
    """Return the first kernel that fails on this device, and how; "" if all do what they should.

    Args:
        ops: the kernels' implementation of draws, paths and commits.
    """
    with torch.inference_mode():
        for trial in (
            _attention,
            _norms,
            _rotation,
            _gate,
            lambda d: _draws(d, ops),
            lambda d: _commits(d, ops),
            _children,
            _trees,
        ):
            try:
                if name := trial(device):
                    return f"{name} gives other numbers"
            except Exception as error:  # whatever a compiler or a driver raises
                return f"{type(error).__name__}: {one_line(error, 200)}"
    return ""


def fault_of_runner(target: Target, runner: Runner) -> str:
    """Return the failure of a runner: it raises something, or gives other numbers than the model's own
    forward; "" if it does neither."""
    try:
        compare(target, runner)
    except EyasError:
        raise
    except Exception as error:  # whatever a capture, a compiler or a driver raises
        return " ".join(f"{type(error).__name__}: {error}".split())[:200]
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


def _attention(device: torch.device) -> str:
    """One node over several parts of the keys, and many nodes over one."""
    length_R, pairs = torch.tensor([190, 70], device=device), list[tuple[Tensor, Tensor]]()
    for Q in (1, 6, 90):
        key, value, q = (_random(device, 2, heads, width, 64) for heads, width in ((2, 320), (2, 320), (4, Q)))
        visible = torch.ones(Q, Q, dtype=torch.bool, device=device).tril().expand(2, Q, Q)
        position = length_R[:, None] + torch.arange(Q, device=device)
        found = gpu.attention(q.transpose(1, 2).contiguous(), key, value, length_R, visible, position, 0.125)
        mask = slot_mask(length_R, visible, 320)[:, None]
        pairs.append((found.transpose(1, 2), grouped_attention(q, key, value, mask, 0.125)))
    return _same("attention", *pairs)


def _norms(device: torch.device) -> str:
    x, residual, weight = _random(device, 2, 3, 96), _random(device, 2, 3, 96).flip(0), _random(device, 96)

    def norm(y: Tensor) -> Tensor:
        return weight * y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5)

    summed, normed = gpu.add_norm(x, residual, weight, 1e-5)
    joined, alone = gpu.join_norms(x, residual, weight, weight, 1e-5), gpu.rms_norm(x, weight, 1e-5)
    both = torch.cat([norm(x), norm(residual)], -1)
    return _same("a norm", (summed, x + residual), (normed, norm(x + residual)), (joined, both), (alone, norm(x)))


def _rotation(device: torch.device) -> str:
    qkv, length_R = _random(device, 2, 3, 8 * 64), torch.tensor([7, 20], device=device)
    q, k, v = torch.split(qkv, [256, 128, 128], -1)
    position, frequency = length_R[:, None] + torch.arange(3, device=device), 0.9 ** torch.arange(32, device=device)
    angle = torch.arange(40, device=device)[:, None] * frequency
    key, value = (torch.zeros(2, 2, 40, 64, dtype=torch.float32, device=device) for _ in range(2))
    found = gpu.rotate_and_store(
        q, k, v, angle.cos(), angle.sin(), position, length_R, 1, key, value, None, None, 0.0, None
    )
    row, slot = torch.arange(2, device=device)[:, None], position + 1
    q_RQHh, k_RQKh, v_RQKh = (x.reshape(2, 3, -1, 64) for x in (q, k, v))
    stored = (key[row, :, slot], rope(k_RQKh, position, frequency)), (value[row, :, slot], v_RQKh)
    return _same("rotation", (found, rope(q_RQHh, position, frequency)), *stored)


def _gate(device: torch.device) -> str:
    gate, up = _random(device, 2, 3, 200).chunk(2, -1)
    return _same("SwiGLU", (gpu.swiglu(gate, up), torch.nn.functional.silu(gate) * up))


def _draws(device: torch.device, ops: Ops) -> str:
    """Scores by all filters, draws with noise and without, and the paths that follow."""
    tree, position, pairs = _tree(device), torch.tensor([11, 2**20], device=device), list[tuple[Tensor, Tensor]]()
    scores = _random(device, 2, 6, 3000)
    tokens = torch.arange(12, device=device).view(2, 6)
    for greedy in (True, False):
        noise = GumbelNoise(torch.tensor([3, 4], device=device), torch.full((2,), greedy, device=device), greedy)
        pairs.append((ops.draw(scores, tree, position, noise)[0], REFERENCE.draw(scores, tree, position, noise)[0]))
    wanted = torch.nn.functional.one_hot(tokens[:, [1, 3, 0, 5, 0, 0]], 3000).to(torch.bfloat16)
    certain = GumbelNoise(tokens[:, 0], torch.ones(2, dtype=torch.bool, device=device), True)
    found, expected = (
        kind.verify_deterministic(Draft(tree, tokens), wanted, position, certain) for kind in (ops, REFERENCE)
    )
    names = ("path_BP", "tokens_BP", "length_B", "bonus_B")
    paths = _same("a path", *((getattr(found, name), getattr(expected, name)) for name in names))
    sampling = (Sampling(0.7, top_k=40, top_p=0.8, min_p=0.01),) * 2
    kinds = scores[..., :300], scores.to(torch.bfloat16)
    filtered = [
        (_kept(ops.scores(logits, sampling, None)), _kept(REFERENCE.scores(logits, sampling, None))) for logits in kinds
    ]
    return _same("a draw", *pairs) or paths or _same("top-k, top-p or min-p", *filtered)


def _kept(scores: Tensor) -> Tensor:
    """Return the probabilities in order: which of several equal tokens are excluded depends on how a
    device sorts."""
    return scores.softmax(-1).sort(-1).values


def _commits(device: torch.device, ops: Ops) -> str:
    store, length = _random(device, 4, 2, 2, 30, 64), torch.tensor([5, 9], device=device)
    expected, path = store.clone(), torch.tensor([[0, 2, 3, 7], [0, 1, 4, 5]], device=device)
    commit_path(expected, length, path)
    ops.commit(store, length, path)
    return _same("commit", *((store[:, b, :, : n + 4], expected[:, b, :, : n + 4]) for b, n in enumerate((5, 9))))


def _children(device: torch.device) -> str:
    """Return the best children of nodes, by log q and confidence."""
    logits, zeros, flags = (
        _random(device, 2, 3, 2500),
        torch.zeros(2, dtype=torch.long, device=device),
        torch.ones(2, dtype=torch.float32, device=device),
    )
    index, log_q, log_confidence = gpu.best_children(
        logits, None, zeros, flags.bool(), zeros, 0, 1.0, 0.5, False, True, 4
    )
    expected = logits.topk(4).indices
    all_log_q, all_log_confidence = logits.log_softmax(-1), (logits / 0.5).log_softmax(-1)
    return _same(
        "a draft",
        (index, expected),
        (log_q, all_log_q.gather(-1, expected)),
        (log_confidence, all_log_confidence.gather(-1, expected)),
    )


def _trees(device: torch.device) -> str:
    """One level, the choice of the best nodes, and their tree."""
    B, K, X = 2, 3, 13
    tokens, parents = (torch.zeros(B, X, dtype=torch.long, device=device) for _ in range(2))
    log_q, values = (torch.zeros(B, X, dtype=torch.float32, device=device) for _ in range(2))
    drafted, roots = (tokens, log_q, values, parents), torch.tensor([50, 60], device=device)
    nodes = (
        torch.zeros(B, 1, dtype=torch.float32, device=device),
        roots[:, None],
        torch.zeros(B, 1, 0, dtype=torch.bool, device=device),
    )
    for first, Q in ((1, 1), (1 + K, K)):
        log_confidence = -_random(device, B, Q, K).abs()
        index = torch.arange(Q * K, device=device).view(1, Q, K).expand(B, -1, -1).contiguous()
        _, value, number, _, visible = gpu.grow_step(
            index, log_confidence, log_confidence, None, *nodes, *drafted, roots, first, float("-inf"), True
        )
        nodes = value, number, visible
    keep = gpu.keep_best(values, 7)
    made_tokens, _, _, made_parents, _, depth, mask = gpu.build_tree(keep, *drafted, 2)
    expected = Tree.build(made_parents, 2)
    best = 1 + values[:, 1:].sort(descending=True, stable=True).indices[:, :7].sort().values
    kept = torch.cat([roots[:, None], tokens.gather(1, keep)], 1)
    return _same("a tree", (keep, best), (made_tokens, kept), (depth, expected.depth_BN), (mask, expected.mask_BNN))

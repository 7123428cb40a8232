"""A frozen target that no device holds whole: FSDP2 with CPU offload.

    each process   its share of every layer, in the CPU's memory
    a forward      for each layer: the share goes to the device, the processes exchange their shares, the layer
                   computes, its weights are given up
    whole          embeddings, final norm and LM head, on the device of each process

All processes must run the target equally often, and together. So it cannot decode for one of them. This module knows
no method.
"""

from __future__ import annotations

import torch

from eyas.core.target import Target
from eyas.errors import OptionError
from eyas.targets import quantised
from eyas.targets.fingerprints import remember_fingerprint
from eyas.targets.placement import has_offloaded_weights, has_several_devices
from eyas_train.dist import connect

__all__ = ["share_layers"]


def share_layers(target: Target, device: torch.device) -> None:
    """Divide the layers of a target, which is on the CPU, among the processes of this run; `device` then is where it
    computes.

    Raises:
        OptionError: the processes cannot be reached, or the target is quantised or has a device map.
    """
    if quantised.library_of(target.model) or has_offloaded_weights(target.model) or has_several_devices(target.model):
        raise OptionError(
            "share_target: the target must have its weights whole and not quantised; leave one of the two out"
        )
    connect(device)
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    remember_fingerprint(target)
    target.model.requires_grad_(False)
    layers = {id(value) for layer in target.family.layers for value in (*layer.parameters(), *layer.buffers())}
    outside = [value for value in (*target.model.parameters(), *target.model.buffers()) if id(value) not in layers]
    for value in outside:
        value.data = value.data.to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    for layer in target.family.layers:
        fully_shard(layer, mesh=mesh, offload_policy=policy)
    # a common root, so that a layer is fetched while the one before computes
    fully_shard(
        target.family.base, mesh=mesh, ignored_params={one for one in outside if isinstance(one, torch.nn.Parameter)}
    )
    target.device = device

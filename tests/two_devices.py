"""Devices that are not there: tensors of a CPU that say they lie on cuda:0 or cuda:1, with their numbers.

Within `two_gpus()` each tensor has a device of its own, which `.device` gives and `.to` changes.
Where torch refuses an operation on tensors of several devices, an AssertionError is raised, which
nothing in eyas catches; the CPU counts as a device. Numbers are computed on the CPU, so texts can
be compared. It does not see what happens inside of torch's own functions and in other threads.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import accelerate.hooks
import torch
from accelerate import dispatch_model
from accelerate.utils import named_module_tensors
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

__all__ = ["CPU", "FIRST", "SECOND", "Devices", "dispatched", "halves", "place_of", "two_gpus"]

CPU, FIRST, SECOND = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)
ANYWHERE = ("copy_", "_has_compatible_shallow_copy_type")  # what takes tensors of several devices
LAST_NORMS = ("norm", "norm_f", "ln_f", "final_layernorm", "final_layer_norm")
HOST = ("numpy", "__array__")  # operations that a tensor of a GPU does not have


def place_of(tensor: Tensor) -> torch.device:
    """The device that a tensor says it lies on."""
    return getattr(tensor, "_place", CPU)


class Devices(TorchFunctionMode):
    """Gives each tensor a device. Attributes: moved: number of moves, by (from, to)."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = Counter[tuple[str, str]]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if func == Tensor.device.__get__:
            return place_of(args[0])
        if func == Tensor.data.__set__:  # nn.Module.to
            args[0]._place = place_of(args[1])
            return func(*args)
        if func in (Tensor.to, Tensor.cpu, Tensor.cuda):
            return self._moved(func, *args, **kwargs)
        if name == "_parse_to":  # a device is read from arguments, nothing is made
            return func(*args, **kwargs)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        here = self._common(name, given)
        if (asked := kwargs.get("device")) is not None:
            kwargs["device"], here = CPU, torch.device(_gpu(asked))
        if name in HOST and here.type == "cuda":
            raise TypeError(f"can't convert {here} device type tensor to numpy")
        made = func(*args, **kwargs)
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor) and not any(leaf is one for one in given):
                leaf._place = here
        return made

    def _moved(self, func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        device = {Tensor.cpu: CPU, Tensor.cuda: FIRST}.get(func)
        dtype = None
        if device is None and args and isinstance(args[0], Tensor):
            device, dtype = place_of(args[0]), args[0].dtype
        elif device is None:
            device, dtype, *_ = torch._C._nn._parse_to(
                *map(_gpu, args), **{name: _gpu(value) for name, value in kwargs.items()}
            )
        here = place_of(x)
        goal, dtype = device or here, dtype or x.dtype
        if goal == here and dtype == x.dtype:
            return x
        if goal != here:
            self.moved[str(here), str(goal)] += 1
        made = x.to(dtype, copy=True)
        made._place = goal
        return made

    def _common(self, name: str, given: list[Tensor]) -> torch.device:
        """The device that all tensors lie on; those without dimensions may lie on the CPU."""
        if name in ANYWHERE:
            return place_of(given[0])
        if name in ("__getitem__", "__setitem__"):  # numbers of the host may index, and be stored
            given = given[:1] + [one for one in given[1:] if place_of(one) != CPU]
        places = {place_of(one) for one in given if one.dim() or place_of(one) != CPU}
        if len(places) > 1:
            shapes = ", ".join(f"{place_of(one)}{list(one.shape)}" for one in given)
            raise AssertionError(f"Expected all tensors to be on the same device: {name} of {shapes}")
        return next(iter(places), CPU)


def _gpu(value: Any) -> Any:
    """The device that a number stands for; other arguments as they are."""
    return torch.device("cuda", value) if type(value) is int else value


def halves(model: Any) -> dict[str, int]:
    """A map that puts the second half of the layers, the norm behind them and the LM head on cuda:1."""
    lists = [name for name, part in model.named_modules() if isinstance(part, nn.ModuleList)]
    # not those of a model that reads images
    path = next((name for name in lists if "language_model" in name), lists[0])
    layers = model.get_submodule(path)
    parts = {f"{path}.{k}": int(2 * k >= len(layers)) for k in range(len(layers))}
    outer = path.split(".")[:-1]
    for depth in range(len(outer) + 1):
        around = ".".join(outer[:depth])
        names = (f"{around}.{name}".lstrip(".") for name, _ in model.get_submodule(around).named_children())
        parts |= {
            name: int(name.split(".")[-1] in LAST_NORMS) for name in names if not f"{path}.".startswith(f"{name}.")
        }
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    return parts | {"lm_head": int(not tied)}


def dispatched(model: Any, device_map: Mapping[str, int]) -> Any:
    """The model with accelerate's hooks, as `from_pretrained` sets them; to be called within `two_gpus`."""
    model.set_experts_implementation("eager")  # the other ones ask a real GPU what it can do
    return dispatch_model(model, dict(device_map), skip_keys=model._skip_keys_device_placement, main_device=0)


def _put(module: nn.Module, name: str, device: Any, **_: Any) -> None:
    """accelerate's function that puts a weight or a buffer of a module on a device."""
    tensor = dict(named_module_tensors(module, recurse=True))[name]
    tensor._place = torch.device(_gpu(device))


_new_parameter = nn.Parameter.__new__


def _parameter(cls: Any, data: Any = None, requires_grad: bool = True) -> nn.Parameter:
    made = _new_parameter(cls, data, requires_grad)
    made._place = CPU if data is None else place_of(data)
    return made


@contextmanager
def two_gpus() -> Iterator[Devices]:
    """Within this context tensors have devices, and accelerate's hooks know two GPUs."""
    with (
        mock.patch.object(accelerate.hooks, "set_module_tensor_to_device", _put),
        mock.patch("accelerate.big_modeling.check_cuda_p2p_ib_support", return_value=True),
        mock.patch.object(nn.Parameter, "__new__", _parameter),
        mock.patch("torch.random.fork_rng", return_value=nullcontext()),
        mock.patch("torch.cuda.get_device_name", return_value="a device that is played"),
        mock.patch("torch.cuda.synchronize"),
        Devices() as mode,
    ):
        yield mode

"""Checks of the module to enable: its kind, its parameters, its device, and other enabled modules."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lmswap.errors import OptionError
from lmswap.options import Options
from lmswap.torch_compat.dynamo import OptimizedModule

_MAX_NAMES = 4  # in a message


def check_module(model: object) -> None:
    """Raise OptionError if ``model`` is no module whose code can be captured."""
    if not isinstance(model, nn.Module):
        raise OptionError(f"enable takes a torch.nn.Module, not {type(model).__name__}")
    if isinstance(model, OptimizedModule):
        raise OptionError(
            "torch.compile made this module, and lmswap has to see the one inside: enable that, and do not compile it; "
            'compiler="inductor" gives it Inductor\'s kernels'
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise OptionError(
            f"{type(model).__name__} is TorchScript, whose code can neither be traced nor be seen: enable the module "
            "that was scripted or traced"
        )
    if isinstance(model, nn.DataParallel) and len(model.device_ids) > 1:
        raise OptionError(
            f"nn.DataParallel copies the model to {len(model.device_ids)} devices in each call, lmswap manages one; "
            "use torch.nn.parallel.DistributedDataParallel, with a process for each device, or device_ids of one"
        )


def check_apart(model: nn.Module, enabled: Sequence[weakref.ref[nn.Module]]) -> None:
    """Raise OptionError if one of the ``enabled`` modules is inside of ``model`` or contains it."""
    for reference in enabled:
        other = reference()
        if other is None:
            continue
        for outer, inner in ((model, other), (other, model)):
            path = next((path for path, module in outer.named_modules() if module is inner and path), None)
            if path is not None:
                name = type(outer).__name__
                first = name if inner is model else f"its module '{path}'"
                raise OptionError(
                    f"{name} and its module '{path}' cannot both be enabled, as two plans would move the same tensors: "
                    f"call lmswap.disable on {first} first"
                )


def parameters_of(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of ``model``; raise OptionError if it has none, or one has no shape yet."""
    name = type(model).__name__
    parameters = list(model.parameters())
    if not parameters:
        raise OptionError(f"{name} has no parameters, so there is no device to plan for")
    lazy = [path for path, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise OptionError(f"parameter '{lazy[0]}' of {name} has no shape yet: call the model once, then enable it")
    return parameters


def check_has_values(model: nn.Module) -> None:
    """Raise OptionError, which names them, if parameters or buffers of ``model`` are on 'meta', without values."""
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    without = [path for path, tensor in tensors if tensor.is_meta]
    if without:
        saved = model.state_dict()
        computed = [path for path in without if path not in saved]
        and_compute = f"; compute {_quoted(computed)}, which checkpoints lack and to_empty leaves undefined"
        raise OptionError(
            f"{type(model).__name__} has no values for {_quoted(without)}, on 'meta': load the checkpoint, file by "
            "file, with load_state_dict(tensors, strict=False, assign=True), then tie what shares a parameter again"
            f"{and_compute * bool(computed)}"
        )


def list_optimizers(given: object, parameters: Sequence[nn.Parameter], name: str) -> list[torch.optim.Optimizer]:
    """Return ``given``, one optimizer or several, as a list; none if it is None.

    Raises:
        OptionError: one is none of torch's, wraps one, or trains none of ``parameters`` of model ``name``.
    """
    optimizers = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    own = {id(parameter) for parameter in parameters}
    for optimizer in optimizers if given is not None else ():
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise OptionError(
                f"optimizer= takes a torch.optim.Optimizer, or several, not {type(optimizer).__name__}; one that wraps "
                "a torch optimizer has that in an attribute, which can be given"
            )
        if isinstance(wrapped := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
            raise OptionError(
                f"optimizer=: {type(optimizer).__name__} wraps {type(wrapped).__name__}, its attribute `optimizer`: "
                "give that before it is wrapped, as Accelerate's prepare does"
            )
        if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            raise OptionError(f"optimizer=: {type(optimizer).__name__} trains no parameter of {name}")
    return [optimizer for optimizer in optimizers if isinstance(optimizer, torch.optim.Optimizer)]


def check_swappable(parameters: Sequence[nn.Parameter], name: str) -> None:
    """Raise OptionError if `fully_shard` has sharded one of ``parameters`` of model ``name``: it moves them itself."""
    if any(type(parameter).__name__ == "DTensor" for parameter in parameters):
        raise OptionError(
            f"weights='swap': fully_shard has sharded the parameters of {name}, and gathers and frees them itself; "
            "leave weights out, or wrap the model in DistributedDataParallel"
        )


def alive_parameters(references: Sequence[weakref.ref[nn.Parameter]]) -> dict[str, nn.Parameter]:
    """Return those that exist, by numbers as names."""
    alive = ((number, reference()) for number, reference in enumerate(references))
    return {str(number): parameter for number, parameter in alive if parameter is not None}


def one_device(tensors: Sequence[torch.Tensor]) -> torch.device:
    """Return the device of all ``tensors``; raise OptionError if they are on several, or on one not supported."""
    devices = {tensor.device for tensor in tensors}
    if len(devices) != 1:
        raise OptionError(f"the model must be on one device, it is on {sorted(map(str, devices))}")
    (device,) = devices
    if device.type not in ("cpu", "cuda"):
        raise OptionError(f"lmswap works on CPU and CUDA devices, the model is on '{device}'")
    return device


def target_device(requested: str | torch.device | None, lies_on: torch.device, options: Options) -> torch.device:
    """Return the device that ``requested`` names, or else that of the model; raise OptionError if it cannot go there.

    Only from the CPU, and only where the options allow for swapped weights.
    """
    if requested is None:
        return lies_on
    try:
        target = torch.device(requested)
    except (RuntimeError, TypeError) as error:
        raise OptionError(f"device={requested!r}: {error}") from None
    if target.type == "cuda" and (target.index or 0) >= torch.cuda.device_count():
        raise OptionError(f"device={str(target)!r}: torch can use {torch.cuda.device_count()} GPUs here")
    if str(target) == "cuda":
        target = torch.device("cuda", torch.cuda.current_device())
    if target == lies_on:
        return target
    if lies_on.type != "cpu" or target.type != "cuda":
        raise OptionError(
            f"device={str(target)!r}: a model on {lies_on} cannot be moved there; from 'cpu' to a GPU it can"
        )
    if options.weights == "keep" or options.compiler != "fx" or options.tier not in ("auto", "host"):
        raise OptionError(
            f"device={str(target)!r} swaps weights, which needs weights='swap' or 'auto', compiler='fx' and "
            f"tier='host'; not weights='{options.weights}', compiler='{options.compiler}' and tier='{options.tier}'"
        )
    return target


def _quoted(names: Sequence[str]) -> str:
    """Return the first of ``names`` in quotes, and how many there are more."""
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(f"'{name}'" for name in names[:_MAX_NAMES]) + more

"""One expert at a time, and of it only what the next piece of its forward reads."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .trace import Trace

__all__ = ["ExpertPath", "Weights", "tensor_of"]

Weights = Mapping[str, Tensor]
"""Parameters and persistent buffers by their name in the merged model; may be read lazily."""


@dataclass(frozen=True)
class _Holder:
    """A module that holds tensors itself, and when in the forward it may read them."""

    module: str
    intervals: tuple[tuple[int, int], ...]


class ExpertPath:
    """A model with the structure of the merged one and no weights of its own.

    All experts run through it in turn. :meth:`resident` puts in place the tensors of the modules
    that run between two events of the traced forward, and takes them away again; at no time does
    the device hold more of an expert. Absent tensors are NaN of the right shape, one number in
    memory, so that a read too early or too late shows up as NaN instead of as a wrong result.

    Args:
        merged: The model whose structure, device and dtype the experts share.
        trace: A traced forward of it.
    """

    def __init__(self, merged: nn.Module, trace: Trace) -> None:
        self._buffers = {  # tables computed by the model, in no checkpoint
            name: buffer
            for name, buffer in merged.named_buffers(remove_duplicate=False)
            if buffer.is_floating_point() and name not in merged.state_dict()
        }
        tensors = [*merged.parameters(), *merged.buffers()]
        # deepcopy takes the placeholders for the tensors already copied
        memo: dict[int, Tensor] = {id(p): _absent(p) for p in tensors if p.is_floating_point()}
        memo |= {id(buffer): buffer.clone() for buffer in self._buffers.values()}
        self.model = copy.deepcopy(merged, memo).eval()
        self._holders = tuple(_holders(merged, trace))
        self._names = {
            holder.module: tuple(_own_tensors(merged, holder.module, self._buffers))
            for holder in self._holders
        }

    @contextmanager
    def resident(self, weights: Weights, start: int, stop: int) -> Iterator[nn.Module]:
        """Hold the tensors that the forward reads after event ``start`` and before ``stop``."""
        placed: list[tuple[str, Tensor]] = []
        try:
            for holder in self._holders:
                if any(end > start and begin < stop for begin, end in holder.intervals):
                    for name in self._names[holder.module]:
                        before = tensor_of(self.model, name)
                        value = weights[name].detach().to(before.device, before.dtype)
                        placed.append((name, before))
                        _set(self.model, name, value)
            yield self.model
        finally:
            for name, before in placed:
                _set(self.model, name, before)


def _absent(tensor: Tensor) -> Tensor:
    """NaN of the tensor's shape, dtype and device that takes up one number."""
    value = torch.full((), torch.nan, dtype=tensor.dtype, device=tensor.device)
    value = value.expand(tensor.shape)
    return nn.Parameter(value, requires_grad=False) if isinstance(tensor, nn.Parameter) else value


def _holders(model: nn.Module, trace: Trace) -> Iterator[_Holder]:
    """The modules with tensors of their own and the intervals in which they are read.

    A module that is never called (its weight is read by its parent) is read while its nearest
    called ancestor runs; what has none may be read at any time. A module that is never called and
    shares all its tensors with modules that are (T5's ``shared`` embedding) only lends them.
    """
    intervals: dict[str, list[tuple[int, int]]] = {}
    for call in trace.calls:
        intervals.setdefault(call.module, []).append((call.enter, call.exit))
    for name, module in model.named_modules():
        if not [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            continue
        called = name
        while called and called not in intervals:
            called = called.rpartition(".")[0]
        if not called and _only_lends(module, [model.get_submodule(n) for n in intervals]):
            continue
        yield _Holder(name, tuple(intervals.get(called, [(-1, trace.events + 1)])))


def _only_lends(module: nn.Module, called: Iterable[nn.Module]) -> bool:
    held = {id(p) for other in called for p in other.parameters(recurse=False)}
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return all(id(tensor) in held for tensor in own)


def _own_tensors(model: nn.Module, module: str, computed: Mapping[str, Tensor]) -> Iterator[str]:
    owner = model.get_submodule(module)
    prefix = f"{module}." if module else ""
    for name, tensor in [*owner._parameters.items(), *owner._buffers.items()]:
        full = f"{prefix}{name}"
        if tensor is not None and tensor.is_floating_point() and full not in computed:
            yield full


def tensor_of(model: nn.Module, name: str) -> Tensor:
    """A parameter or buffer of a model."""
    owner, _, leaf = name.rpartition(".")
    return getattr(model.get_submodule(owner), leaf)


def _set(model: nn.Module, name: str, value: Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    if leaf in module._parameters:
        is_parameter = isinstance(value, nn.Parameter)
        module._parameters[leaf] = (
            value if is_parameter else nn.Parameter(value, requires_grad=False)
        )
    else:
        module._buffers[leaf] = value

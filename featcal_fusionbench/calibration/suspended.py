"""Forwards that pause: the model's own code runs in a greenlet and waits where a hook stops it.

Nothing of an architecture is written down or replayed: masks, position biases, rotary embeddings,
caches of an encoder's output and residuals live in the paused frames. What a resumed forward
returns is what a fresh forward of the model as it then is would return.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor, nn

from .errors import ForwardError
from .spent import let_go
from .trace import first_tensor

__all__ = ["Capture", "Pause", "StopPoints", "SuspendedForward"]

_UNLIKE_THE_TRACE = (
    "the order of modules depends on the input. Exclude the modules that are not always reached."
)


@dataclass(frozen=True)
class Capture:
    """What one module saw in one forward: its input and, where asked for, its output."""

    input: Tensor
    output: Tensor | None = None


@dataclass(frozen=True)
class Pause:
    """What a paused forward hands over.

    Attributes:
        forward: Names path, task and batch in error messages.
        stop: Name of the stop.
        captures: Captures by module name.
        call: Positional and keyword arguments of a module stopped at its exit.
        output: Its output.
    """

    forward: str
    stop: str
    captures: Mapping[str, Capture]
    call: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    output: Any = None

    def capture_of(self, module: str) -> Capture:
        """The capture of one module.

        Raises:
            ForwardError: The forward came here without running it.
        """
        if module not in self.captures:
            raise ForwardError(
                f"{self.forward} came to {self.stop} without reaching {module}: {_UNLIKE_THE_TRACE}"
            )
        return self.captures[module]


class _Seen(BaseException):
    """Ends a run in advance; no ``except Exception`` of a model's code may stop it."""


class SuspendedForward(greenlet):
    """One forward of one model on one batch, run piece by piece.

    Args:
        forward: Runs the whole forward and returns its output.
        label: Names path, task and batch in error messages.
        spent: Inputs of this forward alone whose data are let go at
            :meth:`StopPoints.let_go_inputs`.
    """

    def __init__(
        self, forward: Callable[[], Any], label: str, *, spent: Iterable[Tensor] = ()
    ) -> None:
        super().__init__(forward)
        self._label = label
        self._spent = list(spent)
        self._last = "its start"
        self._bound_for: str | None = None
        self._captured: dict[str, Capture] = {}
        self._ran: set[str] = set()
        self._sought: Collection[str] = ()
        self._handed: Pause | None = None

    def resume(self, expected: str) -> Pause:
        """Run on to the next stop.

        Args:
            expected: Name of the stop that the plan foresees.

        Raises:
            ForwardError: The forward failed, ended, or came to another stop than planned.
        """
        self._bound_for = expected
        self._switch()
        pause, self._handed = self._handed, None
        if pause is None:
            raise ForwardError(
                f"{self._label} ended after {self._last} without reaching {expected}: "
                f"{_UNLIKE_THE_TRACE}"
            )
        if pause.stop != expected:
            raise ForwardError(
                f"{self._label} came to {pause.stop} where {expected} was planned: "
                f"{_UNLIKE_THE_TRACE}"
            )
        self._last = expected
        return pause

    def finish(self) -> Any:
        """Run on to the end and return the forward's output."""
        self._bound_for = None
        output = self._switch()
        if self._handed is not None:
            raise ForwardError(
                f"{self._label} came to {self._handed.stop} although no stop was planned."
            )
        return output

    def close(self) -> None:
        """End the forward where it is; does nothing if it has ended or never began."""
        if self:
            self.throw()

    # What hooks call, inside the forward:

    def pause(self, stop: str, **details: Any) -> None:
        """Hand over the captures and wait to be resumed.

        They are handed over by an attribute, since what is passed to ``switch`` would stay alive in
        this frame as long as the forward is paused.
        """
        self._handed = Pause(self._label, stop, self._captured, **details)
        self._captured = {}
        assert self.parent is not None, "only a thread's main greenlet has no parent"
        self.parent.switch()

    def saw(self, module: str, stop: str, capture: Capture) -> None:
        """Keep what a module saw if the forward is bound for the stop that it is needed at."""
        if module in self._ran:
            raise ForwardError(f"{module} ran once more than planned: {_UNLIKE_THE_TRACE}")
        self._ran.add(module)
        if stop == self._bound_for:
            self._captured[module] = capture
        if self._sought and self._captured.keys() >= set(self._sought):
            raise _Seen

    def run_in_advance(self, forward: Callable[[], Any], sought: Collection[str]) -> None:
        """Run a part of the model until all modules sought have been seen, and give it up."""
        ran, self._ran, self._sought = self._ran, set(), sought
        try:
            forward()
        except _Seen:
            pass
        finally:
            self._ran, self._sought = ran, ()

    def let_go_inputs(self) -> None:
        """Give up the data of the inputs that are spent now."""
        while self._spent:
            self.let_go(self._spent.pop())

    def let_go(self, tensor: Tensor) -> None:
        """Give up a tensor's data, unless they are about to be handed over."""
        if not any(tensor is capture.input for capture in self._captured.values()):
            let_go(tensor)

    def _switch(self) -> Any:
        self.parent = getcurrent()  # a pause returns to whoever resumed, not to whoever created
        try:
            return self.switch()
        except torch.cuda.OutOfMemoryError as error:
            raise ForwardError(
                f"{self._label} ran out of device memory after {self._last}: lower batch_size or "
                "n_samples, or set hold_activations=never, which holds less."
            ) from error
        except Exception as error:
            raise ForwardError(
                f"{self._label} failed after {self._last}: {type(error).__name__}: {error}"
            ) from error


def _current() -> SuspendedForward | None:
    """The suspended forward that is running now, if any: other forwards pass all hooks by."""
    current = getcurrent()
    return current if isinstance(current, SuspendedForward) else None


class StopPoints:
    """The hooks of one model: put in place one by one, all taken away on exit, whatever happens.

    Args:
        model: The model to hook.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._stack = ExitStack()

    def __enter__(self) -> StopPoints:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def at_entry(self, name: str, stop: str | None = None) -> None:
        """Pause where the module is about to run.

        Args:
            name: The module.
            stop: Name of the stop; by default the module's.
        """

        def hook(*_: object) -> None:
            if forward := _current():
                forward.pause(stop or name)

        self._before(name, hook)

    def at_exit(self, name: str, stop: str | None = None) -> None:
        """Pause where the module has run; hand over its arguments and output as they are."""

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if forward := _current():
                forward.pause(stop or name, call=(args, kwargs), output=output)

        self._after(name, hook)

    def inside(self, name: str, stop: str, sought: Collection[str]) -> None:
        """Pause where the module is about to run, having run it in advance.

        Args:
            name: The module, a block.
            stop: Name of the stop.
            sought: Modules inside it that are captured for this stop. The run in advance ends as
                soon as all of them are; nothing of it but the captures is left.
        """

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if forward := _current():
                # its `forward`, not the module: hooks on the block itself see the real run alone
                forward.run_in_advance(lambda: module.forward(*args, **kwargs), sought)
                forward.pause(stop)

        self._before(name, hook)

    def capture(self, name: str, stop: str, *, output: bool) -> None:
        """Record what the module sees in forwards that are bound for a stop.

        Args:
            name: The module.
            stop: Name of the stop at which it is handed over.
            output: Whether to run the module and record its output too.
        """

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            after(_, args, kwargs, None)

        def after(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
            if forward := _current():
                forward.saw(name, stop, Capture(_input_of(name, args, kwargs), result))

        if output:
            self._after(name, after)
        else:
            self._before(name, before)

    def let_go_inputs(self, name: str) -> None:
        """Give up the forward's spent inputs where the module is about to run."""

        def hook(*_: object) -> None:
            if forward := _current():
                forward.let_go_inputs()

        self._before(name, hook)

    def let_go_input_of(self, name: str) -> None:
        """Give up the module's input where the module has run."""

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            given = first_tensor(args, kwargs)
            forward = _current()
            if forward is not None and given is not None and given is not output:
                forward.let_go(given)

        self._after(name, hook)

    def _before(self, name: str, hook: Callable[..., None]) -> None:
        handle = self._model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)
        self._stack.callback(handle.remove)

    def _after(self, name: str, hook: Callable[..., None]) -> None:
        handle = self._model.get_submodule(name).register_forward_hook(hook, with_kwargs=True)
        self._stack.callback(handle.remove)


def _input_of(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    tensor = first_tensor(args, kwargs)
    if tensor is None:
        raise TypeError(f"{name} was called without a tensor")
    return tensor

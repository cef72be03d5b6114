"""Forwards that pause: the model's own code runs in a greenlet and waits where a hook stops it.

Nothing of an architecture is written down or replayed: masks, position biases, rotary embeddings,
caches of an encoder's output and residuals live in the paused frames. What a resumed forward
returns is what a fresh forward of the model as it then is would return.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor, nn

from .errors import ForwardError
from .releasable import release
from .trace import first_tensor

__all__ = ["Capture", "Pause", "PauseHooks", "SuspendedForward"]

_UNLIKE_THE_TRACE = (
    "the order of modules depends on the input. Exclude the modules that are not always reached."
)


@dataclass(frozen=True)
class Capture:
    """What one module saw in one forward.

    Attributes:
        args: Positional arguments.
        kwargs: Keyword arguments.
        output: Its output, where asked for.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any = None

    @property
    def input(self) -> Tensor:
        """Its first tensor, of a module that was called with one."""
        tensor = first_tensor(self.args, self.kwargs)
        assert tensor is not None, "PauseHooks.capture has seen to that"
        return tensor


@dataclass(frozen=True)
class Pause:
    """What a paused forward hands over.

    Attributes:
        forward: Names path, task and batch in error messages.
        name: Name of the pause.
        captures: Captures by module name.
        last: The call of the module that it paused after, if it is a module's exit.
    """

    forward: str
    name: str
    captures: Mapping[str, Capture]
    last: Capture | None = None

    def capture_of(self, module: str) -> Capture:
        """The capture of one module.

        Raises:
            ForwardError: The forward came here without running it.
        """
        if module not in self.captures:
            raise ForwardError(
                f"{self.forward} came to {self.name} without reaching {module}: {_UNLIKE_THE_TRACE}"
            )
        return self.captures[module]


class _AllCaptured(BaseException):
    """Ends a run in advance; no ``except Exception`` of a model's code may stop it."""


@dataclass
class _Run:
    """One run through the model, or through a block in advance.

    Attributes:
        wanted: Modules that end it as soon as all of them are captured; none: it goes to its end.
        ran: The modules that were to be captured, at this pause or another, and have run.
    """

    wanted: frozenset[str] = frozenset()
    ran: set[str] = field(default_factory=set)


class SuspendedForward(greenlet):
    """One forward of one model on one batch, run piece by piece.

    Args:
        forward: Runs the whole forward and returns its output.
        label: Names path, task and batch in error messages.
        releasable: Inputs of this forward alone that :meth:`PauseHooks.release_inputs` releases.
    """

    def __init__(
        self, forward: Callable[[], Any], label: str, *, releasable: Iterable[Tensor] = ()
    ) -> None:
        super().__init__(forward)
        self._label = label
        self._releasable = list(releasable)
        self._last = "its start"
        self._bound_for: str | None = None
        self._run = _Run()
        self._captured: dict[str, Capture] = {}
        self._handed: Pause | None = None

    def resume(self, expected: str) -> Pause:
        """Run on to the next pause.

        Args:
            expected: Name of the pause that the plan foresees.

        Raises:
            ForwardError: The forward failed, ended, or came to another pause than planned.
        """
        self._bound_for = expected
        self._switch()
        pause, self._handed = self._handed, None
        if pause is None:
            raise ForwardError(
                f"{self._label} ended after {self._last} without reaching {expected}: "
                f"{_UNLIKE_THE_TRACE}"
            )
        if pause.name != expected:
            raise ForwardError(
                f"{self._label} came to {pause.name} where {expected} was planned: "
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
                f"{self._label} came to {self._handed.name} although no pause was planned."
            )
        return output

    def close(self) -> None:
        """End the forward where it is; does nothing if it has ended or never began."""
        if self:
            self.throw()

    # What hooks call, inside the forward:

    def pause(self, name: str, last: Capture | None = None) -> None:
        """Hand over the captures and wait to be resumed.

        They are handed over by an attribute, since what is passed to ``switch`` would stay alive in
        this frame as long as the forward is paused.
        """
        self._handed = Pause(self._label, name, self._captured, last)
        self._captured = {}
        assert self.parent is not None, "only a thread's main greenlet has no parent"
        self.parent.switch()

    def record(self, module: str, pause: str, capture: Capture) -> None:
        """Note that a module has run, and keep the capture if the next pause hands it over."""
        if module in self._run.ran:
            raise ForwardError(f"{module} ran once more than planned: {_UNLIKE_THE_TRACE}")
        self._run.ran.add(module)
        if pause == self._bound_for:
            self._captured[module] = capture
        if self._run.wanted and self._captured.keys() >= self._run.wanted:
            raise _AllCaptured

    def run_in_advance(self, forward: Callable[[], Any], wanted: Iterable[str]) -> None:
        """Run a part of the model until all modules wanted are captured, and give that run up."""
        whole, self._run = self._run, _Run(frozenset(wanted))
        try:
            forward()
        except _AllCaptured:
            pass
        finally:
            self._run = whole

    def release_inputs(self) -> None:
        """Release the inputs that nothing reads any more."""
        while self._releasable:
            self.release(self._releasable.pop())

    def release(self, tensor: Tensor) -> None:
        """Release a tensor, unless it is about to be handed over."""
        if not any(tensor is capture.input for capture in self._captured.values()):
            release(tensor)

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


class PauseHooks:
    """The hooks of one model: put in place one by one, all taken away on exit, whatever happens.

    Args:
        model: The model to hook.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._stack = ExitStack()

    def __enter__(self) -> PauseHooks:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def at_entry(self, name: str, pause: str | None = None) -> None:
        """Pause where the module is about to run.

        Args:
            name: The module.
            pause: Name of the pause; by default the module's.
        """

        def hook(*_: object) -> None:
            if forward := _current():
                forward.pause(pause or name)

        self._before(name, hook)

    def at_exit(self, name: str, pause: str | None = None) -> None:
        """Pause where the module has run; hand over its arguments and output as they are."""

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if forward := _current():
                forward.pause(pause or name, Capture(args, kwargs, output))

        self._after(name, hook)

    def in_advance(self, name: str, pause: str, wanted: Collection[str]) -> None:
        """Pause where the module is about to run, having run it in advance.

        Args:
            name: The module, a block.
            pause: Name of the pause.
            wanted: Modules inside it that are captured for this pause. The run in advance ends as
                soon as all of them are; nothing of it but the captures is left.
        """

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if forward := _current():
                # its `forward`, not the module: hooks on the block itself see the real run alone
                forward.run_in_advance(lambda: module.forward(*args, **kwargs), wanted)
                forward.pause(pause)

        self._before(name, hook)

    def capture(self, name: str, pause: str, *, output: bool) -> None:
        """Record what the module sees in forwards that are bound for a pause.

        Args:
            name: The module.
            pause: Name of the pause at which it is handed over.
            output: Whether to run the module and record its output too.
        """

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            after(_, args, kwargs, None)

        def after(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
            if forward := _current():
                if first_tensor(args, kwargs) is None:
                    raise TypeError(f"{name} was called without a tensor")
                forward.record(name, pause, Capture(args, kwargs, result))

        if output:
            self._after(name, after)
        else:
            self._before(name, before)

    def release_inputs(self, name: str) -> None:
        """Release the forward's inputs, of those given to it, where the module is about to run."""

        def hook(*_: object) -> None:
            if forward := _current():
                forward.release_inputs()

        self._before(name, hook)

    def release_input_of(self, name: str) -> None:
        """Release the module's input where the module has run."""

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            given = first_tensor(args, kwargs)
            forward = _current()
            if forward is not None and given is not None and given is not output:
                forward.release(given)

        self._after(name, hook)

    def _before(self, name: str, hook: Callable[..., None]) -> None:
        handle = self._model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)
        self._stack.callback(handle.remove)

    def _after(self, name: str, hook: Callable[..., None]) -> None:
        handle = self._model.get_submodule(name).register_forward_hook(hook, with_kwargs=True)
        self._stack.callback(handle.remove)

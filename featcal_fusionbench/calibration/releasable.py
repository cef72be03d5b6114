"""Tensors that nothing reads again, although the frames of a paused forward still name them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["NOTHING_RELEASABLE", "Releasable", "release"]


@dataclass(frozen=True)
class Releasable:
    """What a model's forward does not read again; said by its architecture.

    A paused forward keeps every argument and local variable of its frames alive. Of what is named
    here only the names stay, so that thousands of paused forwards hold less.

    Attributes:
        inputs: Inputs of the forward that nothing reads once the first block is about to run.
        block_inputs: Whether nothing reads the input of a block once the block has run. It matters
            for the first block of a stack, whose input is also a variable of the stack's forward.
    """

    inputs: tuple[str, ...] = ()
    block_inputs: bool = False


NOTHING_RELEASABLE = Releasable()


def release(tensor: Tensor) -> None:
    """Free a tensor's memory wherever the tensor is named; views of it stay as they are.

    It is empty afterwards, so that reading it after all is an error of shapes.
    """
    tensor.data = tensor.new_empty(0)

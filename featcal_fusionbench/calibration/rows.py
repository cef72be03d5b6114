"""Rows (tokens) of features: how much each counts, and features as a matrix of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["RowRule", "RowRules", "Rows", "uniform_rows"]


class RowRule(Protocol):
    """Gives the weight r of each row (token) of a module's input; compared by ``==``."""

    def __call__(self, features: Tensor, inputs: Mapping[str, Any]) -> Tensor:
        """Weights of shape ``features.shape[:-1]`` for the features of one batch."""
        ...


class RowRules(Protocol):
    """Chooses the row rule of a module; None weighs every row 1."""

    def __call__(self, module: str, block: int | None, blocks: int) -> RowRule | None:
        """The rule of a module of block number ``block`` of ``blocks``."""
        ...


def uniform_rows(module: str, block: int | None, blocks: int) -> RowRule | None:
    """Every row of every module has weight 1."""
    return None


class Rows:
    """Turns features into a matrix of rows in the dtype of the sums, without rows of weight 0.

    Rows of weight 0 (padding) are left out rather than multiplied: whatever they hold, NaN
    included, has no influence.

    Args:
        weights: Row weights r of one batch, of any shape; None weighs every row 1.
        dtype: Precision of the sums.
    """

    def __init__(self, weights: Tensor | None, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._kept: Tensor | None = None
        self.weights: Tensor | None = None
        """Weights of the rows kept, shape (rows,); None where all are 1."""
        if weights is not None:
            flat = weights.reshape(-1).to(dtype)
            if bool((flat == 0).any()):
                self._kept = flat > 0
                flat = flat[self._kept]
            if not bool((flat == 1).all()):
                self.weights = flat

    def __call__(self, features: Tensor) -> Tensor:
        """Features of shape (..., width), as many as there are weights, as (rows, width)."""
        flat = features.reshape(-1, features.shape[-1])
        return (flat if self._kept is None else flat[self._kept]).to(self._dtype)

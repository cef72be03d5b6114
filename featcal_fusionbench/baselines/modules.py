"""The modules that correct a final representation: what they compute, and what trains them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .settings import ProbSurgerySettings, RepresentationSurgerySettings, SurgerySettings

__all__ = ["Correction", "ProbSurgeryModule", "SurgeryModule", "make_module"]


class Correction(nn.Module, ABC):
    """One task's correction of a final representation.

    Calling it gives what is to be subtracted from the representation at inference.
    """

    @abstractmethod
    def forward(self, features: Tensor) -> Tensor:
        """What is subtracted from features of shape (…, width)."""

    @abstractmethod
    def loss(self, features: Tensor, target: Tensor, noise: torch.Generator) -> Tensor:
        """The loss of a batch.

        Args:
            features: Final representations of the merged model, of shape (rows, width).
            target: Those of the task's expert on the same inputs.
            noise: Source of the noise, if the method has any; on the host, so that a run does not
                depend on the device.
        """


def _down(width: int, hidden: int, generator: torch.Generator | None) -> nn.Linear:
    linear = nn.Linear(width, hidden, bias=False)
    nn.init.kaiming_uniform_(linear.weight, a=math.sqrt(5), generator=generator)
    return linear


def _up(hidden: int, width: int) -> nn.Linear:
    # Zero, so that training starts from the merged model's own representation.
    linear = nn.Linear(hidden, width, bias=False)
    nn.init.zeros_(linear.weight)
    return linear


class SurgeryModule(Correction):
    """Representation Surgery (arXiv 2402.02705): f − up(ReLU(down(f))), trained by L1.

    Args:
        width: Width of the representation.
        hidden: Rank of the correction.
        generator: Draws the initial weights of ``down`` (Kaiming-uniform); ``up`` starts at zero.
    """

    def __init__(self, width: int, hidden: int, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.down = _down(width, hidden, generator)
        self.up = _up(hidden, width)

    def forward(self, features: Tensor) -> Tensor:
        return self.up(torch.relu(self.down(features)))

    def loss(self, features: Tensor, target: Tensor, noise: torch.Generator) -> Tensor:
        """Mean absolute difference of the corrected representation and the expert's."""
        return F.l1_loss(features - self(features), target)


class ProbSurgeryModule(Correction):
    """ProbSurgery (ICML 2025): the correction is drawn from N(μ(f), σ²(f)); at inference it is μ.

    Args:
        width: Width of the representation.
        hidden: Width between the first layer and the two heads.
        kl_weight: Weight of KL(N(μ, σ²) ‖ N(0, I)) in the loss.
        generator: Draws the initial weights of ``down`` (Kaiming-uniform); both heads start at
            zero, so that σ = 1.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        kl_weight: float,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.down = _down(width, hidden, generator)
        self.mean = _up(hidden, width)
        self.log_variance = _up(hidden, width)
        self.kl_weight = kl_weight

    def forward(self, features: Tensor) -> Tensor:
        return self.mean(torch.relu(self.down(features)))

    def loss(self, features: Tensor, target: Tensor, noise: torch.Generator) -> Tensor:
        """L1 of one draw, plus the divergence, summed over the width and averaged over rows."""
        hidden = torch.relu(self.down(features))
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        drawn = torch.randn(mean.shape, generator=noise, dtype=mean.dtype).to(mean.device)
        corrected = features - (mean + torch.exp(0.5 * log_variance) * drawn)
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(-1).mean()
        return F.l1_loss(corrected, target) + self.kl_weight * divergence


def make_module(
    settings: SurgerySettings, width: int, generator: torch.Generator | None = None
) -> Correction:
    """A new module for representations of a width, as the settings have it."""
    if isinstance(settings, ProbSurgerySettings):
        return ProbSurgeryModule(width, settings.hidden_width, settings.kl_weight, generator)
    if isinstance(settings, RepresentationSurgerySettings):
        return SurgeryModule(width, settings.hidden_width, generator)
    raise TypeError(f"{type(settings).__name__} is not the settings of a surgery method.")

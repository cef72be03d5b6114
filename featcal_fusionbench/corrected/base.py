"""What the wrappers of all architectures share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar, cast

from fusion_bench import BaseModelPool
from torch import Tensor, nn

from ..baselines.modules import Correction
from ..baselines.settings import SurgerySettings
from ..calibration.inputs import Inputs
from ..errors import CalibrationError
from .saving import Corrections, save_with_corrections

__all__ = ["CorrectedModel", "UnknownTaskError"]

Self = TypeVar("Self", bound="CorrectedModel")


class UnknownTaskError(CalibrationError, KeyError):
    """The task is not known, or the model was trained for others."""

    def __str__(self) -> str:
        return str(self.args[0])  # a KeyError would quote it


class CorrectedModel(nn.Module, ABC):
    """A merged model and one correction of its final representation per task.

    Args:
        model: The merged model, on the host, without gradients.
    """

    architecture: ClassVar[str]
    """Name of the architecture, in messages and files."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.requires_grad_(False).eval()
        # A list and names of our own: a ModuleDict takes no dots in its keys.
        self.tasks: tuple[str, ...] = ()
        self.corrections = nn.ModuleList()
        self.settings: SurgerySettings | None = None

    @classmethod
    @abstractmethod
    def recognises(cls, model: nn.Module) -> bool:
        """Whether it can wrap a model."""

    @classmethod
    @abstractmethod
    def from_pool(cls: type[Self], model: nn.Module, pool: BaseModelPool) -> Self:
        """Wrap a model, with what else the pool has to give."""

    @abstractmethod
    def around(self: Self, model: nn.Module) -> Self:
        """The same wrapper around another model of the architecture, without corrections."""

    @abstractmethod
    def representation(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Final representations of one batch, uncorrected.

        Args:
            inputs: Keyword arguments of a forward, placed where the model is.

        Returns:
            The representations, of shape (batch, positions, width), and which of the positions
            count, of shape (batch, positions).
        """

    def set_corrections(
        self, corrections: Mapping[str, Correction], settings: SurgerySettings
    ) -> None:
        """Give the tasks their corrections."""
        self.tasks = tuple(corrections)
        self.corrections = nn.ModuleList(corrections.values()).requires_grad_(False).eval()
        self.settings = settings
        self.eval()

    def find_task(self, task: str | None) -> str:
        """The name that a task has here; ``cola`` and ``glue-cola`` are one, as in FusionBench.

        Raises:
            UnknownTaskError: There is no correction for it.
        """
        alike = [own for own in self.tasks if own == task]
        alike += [own for own in self.tasks if _plain(own) == _plain(task or "")]
        if not alike:
            raise UnknownTaskError(
                f"there is no correction for task {task!r}, only for {', '.join(self.tasks)}: "
                "evaluate the model on the tasks that it was trained for."
            )
        return alike[0]

    def corrected(self, features: Tensor, task: str | None) -> tuple[Tensor, Tensor]:
        """A task's corrected representation, and what was subtracted, of shape (…, width)."""
        module = self.corrections[self.tasks.index(self.find_task(task))]
        subtracted = module(features.to(next(module.parameters()).dtype)).to(features.dtype)
        return features - subtracted, subtracted

    def extra_tensors(self) -> dict[str, Tensor]:
        """Weights besides the model's and the corrections' that belong into the saved file."""
        return {}

    @classmethod
    @abstractmethod
    def from_saved(cls: type[Self], path: str, extra: Mapping[str, Tensor]) -> Self:
        """Load what :meth:`save_pretrained` saved, without the corrections.

        Args:
            path: The directory.
            extra: What :meth:`extra_tensors` gave.
        """

    def save_pretrained(self, path: str, **kwargs: Any) -> None:
        """Save the merged model as it saves itself, and the corrections beside it.

        Args:
            path: A directory; made if it is missing. What is in it stays, but for files of the
                same names, each of which is replaced only by a whole one.
            **kwargs: For the merged model's ``save_pretrained``.
        """
        if self.settings is None:
            raise CalibrationError("the model has no corrections yet: there is nothing to save.")
        modules = dict(zip(self.tasks, cast("list[Correction]", self.corrections), strict=True))
        corrections = Corrections(self.architecture, self.settings, modules, self.extra_tensors())
        save_with_corrections(self.model, corrections, path, **kwargs)


def _plain(task: str) -> str:
    return task.removeprefix("glue-")

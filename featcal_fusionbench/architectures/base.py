"""What an architecture has to say."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar, cast

from fusion_bench import BaseModelPool
from torch import Tensor, nn

from ..calibration import Releasable, RowRule, RowRules
from ..calibration.drift import final_features
from ..calibration.inputs import Inputs
from ..calibration.releasable import NOTHING_RELEASABLE
from ..data.draws import PrepareInputs
from ..settings import Settings

__all__ = ["Architecture", "CompleteInputs", "ItemCheck"]

CompleteInputs = Callable[[nn.Module, Inputs], Inputs]
"""Adds to the inputs of a forward what only the task's expert, a loaded model, can give."""


@dataclass(frozen=True)
class ItemCheck:
    """What is known of a task's items before the work starts.

    Attributes:
        warnings: What the user should know.
        lengths: Lengths of items by index, where they differ: items alike go into one batch.
    """

    warnings: tuple[str, ...] = ()
    lengths: Mapping[int, int] = field(default_factory=dict)


SettingsT = TypeVar("SettingsT", bound=Settings)


class Architecture(ABC, Generic[SettingsT]):
    """The part of a calibration that depends on the architecture.

    Args:
        settings: Its settings; by default their defaults.
    """

    name: ClassVar[str]
    """What it is called in messages."""
    settings_type: ClassVar[type[Settings]] = Settings
    """Settings that it alone has; methods take them by their names."""

    def __init__(self, settings: SettingsT | None = None) -> None:
        self.settings = cast(SettingsT, self.settings_type() if settings is None else settings)

    @abstractmethod
    def recognises(self, model: nn.Module) -> bool:
        """Whether the model is of this architecture."""

    @abstractmethod
    def row_rules(self) -> RowRules:
        """Row weights by module."""

    @abstractmethod
    def load_processor(self, pool: BaseModelPool) -> Any:
        """What turns raw inputs into tensors; saved beside the calibrated model if it can be."""

    @abstractmethod
    def prepare_inputs(
        self, processor: Any, model: nn.Module, column: str | None = None
    ) -> PrepareInputs:
        """How items of a calibration data set become inputs of a forward, on the host.

        Args:
            processor: What :meth:`load_processor` gave.
            model: The base.
            column: The column that holds the inputs; None: it is found among the known ones.
        """

    def reads_plain_items(self, processor: Any) -> bool:
        """Whether items are read as they are stored, without a data set's format (torch, numpy)."""
        return True

    def check_items(
        self,
        task: str,
        items: Iterable[tuple[int, Any]],
        processor: Any,
        model: nn.Module,
        column: str | None = None,
    ) -> ItemCheck:
        """Look through all items drawn for a task; none is left out, whatever is found.

        Args:
            task: The task.
            items: Index and content of each item; read when iterated over.
            processor: What :meth:`load_processor` gave.
            model: The base.
            column: The column that holds the inputs; None: it is found among the known ones.

        Raises:
            CalibrationDataError: Items cannot be used; they are named.
        """
        for _ in items:  # that they can be read is something, too
            pass
        return ItemCheck()

    def complete_inputs(self) -> CompleteInputs | None:
        """How a task's expert completes the prepared inputs; None where they are complete."""
        return None

    def releasable(self, model: nn.Module) -> Releasable:
        """What a forward of the model does not read again, so that paused ones can release it."""
        return NOTHING_RELEASABLE

    def drift_rows(self, block: str) -> RowRule | None:
        """Which rows of a block's output drift is measured on, ``""`` for the final features."""
        return None

    def final_features(self, output: Any) -> Tensor:
        """The final features in a model's output, whose drift is measured."""
        return final_features(output)

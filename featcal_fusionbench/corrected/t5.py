"""T5: the decoder's final hidden state is corrected, as the head reads it.

With a tied head T5 scales the state by d^-0.5 on the way, and the releases of transformers decide
by different settings whether it does. What the head is given is the same thing in all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fusion_bench import BaseModelPool
from torch import Tensor, nn
from transformers import AutoModelForSeq2SeqLM, T5ForConditionalGeneration

from ..calibration.inputs import Inputs
from .base import CorrectedModel, UnknownTaskError

__all__ = ["CorrectedT5"]


class CorrectedT5(CorrectedModel):
    """A T5 with a correction of the decoder's final hidden state per task.

    The task must be set before it is used: this package's task pools do that.

    Args:
        model: A T5 with a language modelling head.
    """

    architecture = "T5"

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._task: str | None = None

    @classmethod
    def recognises(cls, model: nn.Module) -> bool:
        """Whether the model is a T5 with a language modelling head."""
        return isinstance(model, T5ForConditionalGeneration)

    @classmethod
    def from_pool(cls, model: nn.Module, pool: BaseModelPool) -> CorrectedT5:
        """Wrap a model; nothing else is needed."""
        return cls(model)

    def around(self, model: nn.Module) -> CorrectedT5:
        """The same wrapper around another model."""
        return type(self)(model)

    def set_task(self, task: str) -> None:
        """Say which task the inputs from here on are of.

        Raises:
            UnknownTaskError: There is no correction for it.
        """
        self._task = self.find_task(task)

    def representation(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """What the head reads at each decoder position, padding aside."""
        seen: list[Tensor] = []
        with self._at_head(lambda head, args: seen.append(args[0])):
            self.model(**inputs)
        (features,) = seen
        return features, inputs["decoder_attention_mask"].bool()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of the merged model, corrected for the task that is set."""
        with self._at_head(self._correct):
            return self.model(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate with the merged model, corrected for the task that is set."""
        with self._at_head(self._correct):
            return self.model.generate(*args, **kwargs)  # pyright: ignore[reportCallIssue]

    @classmethod
    def from_saved(cls, path: str, extra: Mapping[str, Tensor]) -> CorrectedT5:
        """Load the merged model."""
        return cls(AutoModelForSeq2SeqLM.from_pretrained(path))

    @contextmanager
    def _at_head(self, hook: Callable[[nn.Module, Any], Any]) -> Iterator[None]:
        """Run a hook on what the head is given; none is left on the model afterwards."""
        head = self.model.get_output_embeddings()  # pyright: ignore
        handle = head.register_forward_pre_hook(hook)
        try:
            yield
        finally:
            handle.remove()

    def _correct(self, head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if self._task is None:
            raise UnknownTaskError(
                "the task must be known at inference: use a task pool that tells the model, "
                "taskpool=flan-t5_glue_featcal or featcal_embedded_text, or call set_task."
            )
        features, *rest = args
        return (self.corrected(features, self._task)[0], *rest)

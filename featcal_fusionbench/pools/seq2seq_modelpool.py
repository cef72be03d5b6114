"""FusionBench's pool of sequence-to-sequence models, with what does not work there put right.

In FusionBench 0.2.33 ``Seq2SeqLMPool.load_tokenizer`` fails, a model given as a path is refused,
``model_kwargs`` reach a LoRA loader that does not take them, and a model is saved as a bare pickle
of its tensors, which ``from_pretrained`` does not load.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusion_bench.modelpool import Seq2SeqLMPool as UpstreamPool
from omegaconf import DictConfig
from transformers import AutoModelForSeq2SeqLM

from ..data.draws import load_tokenizer
from .adapter_entries import adapter_entry
from .adapters import merge_adapter

__all__ = ["Seq2SeqLMPool", "load_lora_model"]


class Seq2SeqLMPool(UpstreamPool):
    """Takes what FusionBench's pool takes, and works where that one fails."""

    def load_model(self, model_name_or_config: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a model: an instance, a configuration, a path or hub id, or a LoRA adapter.

        Adapters, configured as FusionBench has it (``_target_: …load_lora_model``), are merged
        into the weights of their base.
        """
        config = model_name_or_config
        if isinstance(config, str):
            config = self._models[config] if config in self._models else config
        if isinstance(config, str):
            return AutoModelForSeq2SeqLM.from_pretrained(config, **self._kwargs(kwargs))
        if isinstance(config, dict | DictConfig) and (found := adapter_entry(config)) is not None:
            arguments = self._kwargs({**found.model_kwargs, **kwargs})
            return load_lora_model(found.base, found.adapter, **arguments)
        return super().load_model(model_name_or_config, *args, **kwargs)

    def load_tokenizer(self, *args: Any, **kwargs: Any) -> Any:
        """The tokenizer of the pool's configuration."""
        return load_tokenizer(self)

    def save_model(self, model: Any, path: str, *args: Any, **kwargs: Any) -> None:
        """Save a model, and the pool's tokenizer beside it, for ``from_pretrained``."""
        model.save_pretrained(path)
        if self._tokenizer is not None:
            self.load_tokenizer().save_pretrained(path)

    def _kwargs(self, extra: Mapping[str, Any]) -> dict[str, Any]:
        return {str(k): v for k, v in (*(self._model_kwargs or {}).items(), *extra.items())}


def load_lora_model(base_model_path: str, peft_model_path: str, **model_kwargs: Any) -> Any:
    """Load a model and merge a LoRA adapter into its weights.

    Args:
        base_model_path: Path or hub id of the base.
        peft_model_path: Path or hub id of the adapter.
        **model_kwargs: For the base's ``from_pretrained``, such as ``torch_dtype``.

    Raises:
        ModelPoolError: The adapter does not fit the base, or would be used in part.
    """
    base = AutoModelForSeq2SeqLM.from_pretrained(base_model_path, **model_kwargs)
    return merge_adapter(base, peft_model_path, name=peft_model_path)

"""Write checkpoints that every supported transformers reads alike.

``save_pretrained`` would not do: transformers >= 5.6 may write a ``CLIPVisionModel`` without the
``vision_model.`` prefix, and 4.x then loads random weights with only a warning. So the tensors are
written under the prefixed names, which both layouts load.
"""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import CLIPModel, CLIPVisionModel, PretrainedConfig

from .tower import vision_transformer

PREFIX = "vision_model."


def tower_state(tower: nn.Module) -> dict[str, Tensor]:
    """The tower's weights under the ``vision_model.`` prefix, whatever the class layout is."""
    state = vision_transformer(tower).state_dict()
    return {PREFIX + name: value for name, value in state.items()}


def save_tower(tower: CLIPVisionModel, directory: Path) -> None:
    """Write an expert: what ``CLIPVisionModel.from_pretrained`` reads."""
    _save(tower.config, "CLIPVisionModel", tower_state(tower), directory)


def save_base(model: CLIPModel, directory: Path) -> None:
    """Write the whole CLIP model: what ``CLIPModel`` and ``CLIPVisionModel`` read alike."""
    state = {
        name: value for name, value in model.state_dict().items() if not name.startswith(PREFIX)
    }
    state |= tower_state(model.vision_model)
    _save(model.config, "CLIPModel", state, directory)


def _save(
    config: PretrainedConfig, architecture: str, state: dict[str, Tensor], directory: Path
) -> None:
    config.architectures = [architecture]
    # transformers 4 writes where the model came from: a path of this machine
    config.name_or_path = ""
    config.save_pretrained(directory)
    tensors = {name: value.detach().cpu().contiguous() for name, value in state.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})

"""Training on this machine: LiT of the text side, fine-tuning of the experts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import CLIPModel, CLIPTokenizer, CLIPVisionModel

from ..cache import ExpertRecipe
from ..training import Advance, device, index_batches, minimise, mixed_precision
from .recipe import TextRecipe
from .tasks import TASKS, Task
from .text_side import prompts, tokenize


def normalise(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """What the CLIP processor does with images that have the right size already.

    Args:
        images: (n, side, side) uint8, grey.
        mean: Of each channel.
        std: Of each channel.

    Returns:
        (n, channels, side, side) float32.
    """
    grey = images.float().div(255)[:, None]
    return (grey - torch.tensor(mean).view(-1, 1, 1)) / torch.tensor(std).view(-1, 1, 1)


@torch.inference_mode()
def pooled_features(tower: nn.Module, pixels: Tensor, batch_size: int = 128) -> Tensor:
    """The tower's ``pooler_output``, (n, hidden), on the CPU in float32."""
    tower = tower.to(device()).eval()
    parts = [
        tower(pixel_values=batch.to(device())).pooler_output.float().cpu()
        for batch in pixels.split(batch_size)
    ]
    return torch.cat(parts)


def text_embeddings(model: CLIPModel, tokens: dict[str, Tensor]) -> Tensor:
    """Projected, normalised embeddings of tokenised prompts, (prompts, projection_dim)."""
    tokens = {name: ids.to(device()) for name, ids in tokens.items()}
    pooled = model.text_model(**tokens).pooler_output
    return F.normalize(model.text_projection(pooled), dim=-1)


def tune_text(
    model: CLIPModel,
    tokenizer: CLIPTokenizer,
    features: Tensor,
    targets: Tensor,
    recipe: TextRecipe,
    seed: int,
    advance: Advance,
) -> None:
    """Locked-image tuning, in place: text tower, projections and logit scale are trained.

    Args:
        model: The base; its vision tower is not run, its features are given.
        tokenizer: Of the base.
        features: (n, hidden) frozen pooled features of the labelled images.
        targets: (n,) index of each image's class among all classes of all tasks.
        recipe: Steps, batch size, learning rate.
        seed: Of the order of images.
        advance: Called once a step.
    """
    nn.Module.to(model, device()).train()
    tokens = [
        tokenize(tokenizer, [p for task in TASKS.values() for p in prompts(task, template)])
        for template in (0, 1)
    ]
    features, targets = features.to(device()), targets.to(device())

    def losses() -> Iterator[Tensor]:
        batches = index_batches(len(features), recipe.batch_size, recipe.steps, seed)
        for step, chosen in enumerate(batches):
            # every class's prompt is a candidate: CLIP's contrastive loss, image to text
            texts = text_embeddings(model, tokens[step % 2])
            images = F.normalize(model.visual_projection(features[chosen]), dim=-1)
            yield F.cross_entropy(model.logit_scale.exp() * images @ texts.T, targets[chosen])

    trained = [model.text_model, model.text_projection, model.visual_projection]
    parameters = [*nn.ModuleList(trained).parameters(), model.logit_scale]
    minimise(losses(), parameters, recipe.steps, recipe.learning_rate, advance)
    model.eval()


@torch.inference_mode()
def class_embeddings(model: CLIPModel, tokenizer: CLIPTokenizer, task: Task) -> Tensor:
    """Classifier weights (classes, projection_dim) as FusionBench's zero-shot head makes them."""
    parts = [text_embeddings(model, tokenize(tokenizer, prompts(task, t))) for t in (0, 1)]
    return F.normalize(torch.stack(parts).mean(dim=0), dim=-1)


def tune_expert(
    tower: CLIPVisionModel,
    model: CLIPModel,
    head: Tensor,
    pixels: Tensor,
    labels: Tensor,
    recipe: ExpertRecipe,
    seed: int,
    advance: Advance,
) -> None:
    """Fine-tune a copy of the base's vision tower, in place, for one task.

    Args:
        tower: Starts as the base's.
        model: The base, for its frozen visual projection and logit scale.
        head: (classes, projection_dim) frozen text embeddings.
        pixels: (n, 3, side, side) normalised images.
        labels: (n,).
        recipe: Steps, batch size, learning rate.
        seed: Of the order of images.
        advance: Called once a step.
    """
    nn.Module.to(tower, device()).train()
    projection = model.visual_projection.weight.detach().to(device())
    classifier = (model.logit_scale.detach().exp() * head).to(device()).clone()

    def losses() -> Iterator[Tensor]:
        for chosen in index_batches(len(pixels), recipe.batch_size, recipe.steps, seed):
            with mixed_precision():
                pooled = tower(pixel_values=pixels[chosen].to(device())).pooler_output
            images = F.normalize(pooled.float() @ projection.T, dim=-1)
            yield F.cross_entropy(images @ classifier.T, labels[chosen].to(device()))

    minimise(losses(), tower.parameters(), advance=advance, **recipe.schedule)
    tower.eval()

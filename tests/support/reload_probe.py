"""Loads saved models as any program would and compares their outputs.

Run by the Python of another environment:

    python reload_probe.py DIRECTORY

Each directory below it is a saved model with `expected.safetensors`: inputs, and the output of the
model that was saved. Prints a JSON object of the largest difference by directory.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM, CLIPVisionModel


def difference(directory: Path) -> float:
    """The largest difference of an output from what was saved beside the model."""
    tensors = load_file(directory / "expected.safetensors")
    expected = tensors.pop("output")
    is_clip = "pixel_values" in tensors
    kind = CLIPVisionModel if is_clip else AutoModelForSeq2SeqLM
    with torch.no_grad():
        output = kind.from_pretrained(directory).eval()(**tensors)
    found = output.pooler_output if is_clip else output.logits
    return float((found - expected).abs().max() / expected.abs().max())


if __name__ == "__main__":
    (root,) = map(Path, sys.argv[1:])
    print(json.dumps({path.name: difference(path) for path in sorted(root.iterdir())}))

"""Renderings of font glyphs: three alphabets and mathematical symbols.

All fonts ship with matplotlib (DejaVu, STIX, Computer Modern; free licences), which FusionBench
depends on. A glyph of a font, distorted at random, is one image. Train and test are split by font:
no (glyph, font) pair is in both. Families are shared (a bold face against a regular one).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

LATIN = {letter: letter for letter in "abcdefghijklmnopqrstuvwxyz"}
GREEK = dict(
    zip(
        "αβγδεζηθικλμνξοπρστυφχψω",
        "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho "
        "sigma tau upsilon phi chi psi omega".split(),
        strict=True,
    )
)
CYRILLIC = dict(
    zip(
        "абвгджзийклмнптуфхцчшщыьэюя",
        "a be ve ghe de zhe ze i shorti ka el em en pe te u ef ha tse che sha shcha yeru softsign "
        "e yu ya".split(),
        strict=True,
    )
)
SYMBOLS = dict(
    zip(
        "∀∂∃∇∈∏∑∓√∝∞∠∧∨∩∪∫≈≠≡≤≥⊂⊃⊕⊗⊥±÷×",
        "forall partial exists nabla element product sum minusplus root proportional infinity "
        "angle and or intersection union integral approximately unequal identical atmost atleast "
        "subset superset circleplus circletimes perpendicular plusminus division times".split(),
        strict=True,
    )
)
ALPHABETS = {"latin": LATIN, "greek": GREEK, "cyrillic": CYRILLIC, "symbols": SYMBOLS}
"""Characters and their names by task; label order."""

_FONTS = {
    "train": "DejaVuSans DejaVuSans-Oblique DejaVuSansMono-Bold DejaVuSerif "
    "DejaVuSerif-BoldItalic STIXGeneral".split(),
    "test": "DejaVuSans-Bold DejaVuSansMono-Oblique DejaVuSerif-Italic STIXGeneralBol".split(),
}


@dataclass(frozen=True)
class Glyph:
    """One character in one font, with its label in the task."""

    character: str
    font: str
    label: int


def glyph_splits(task: str) -> dict[str, list[Glyph]]:
    """The (glyph, font) pairs of a rendered task, by split."""
    return {
        split: [
            Glyph(character, font, label)
            for label, character in enumerate(ALPHABETS[task])
            for font in _FONTS[split]
        ]
        for split in _FONTS
    }


def font_path(font: str) -> Path:
    """File of a font that matplotlib ships."""
    return Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{font}.ttf"


def render(glyph: Glyph, side: int, rng: np.random.Generator) -> np.ndarray:
    """Draw the glyph at a random size, place, slant and contrast on an uneven, noisy ground.

    Returns:
        (side, side) uint8.
    """
    canvas = 4 * side  # drawn four times as large, then averaged: smooth edges
    size = int(canvas * rng.uniform(0.6, 0.85))
    font = ImageFont.truetype(str(font_path(glyph.font)), size)
    mask = Image.new("L", (canvas, canvas))
    centre = canvas / 2 + rng.uniform(-0.1, 0.1, size=2) * canvas
    # "mm" is the middle of the line, so letters keep their place relative to the base line
    ImageDraw.Draw(mask).text((centre[0], centre[1]), glyph.character, 255, font, anchor="mm")
    turned = mask.rotate(rng.uniform(-12, 12), Image.Resampling.BILINEAR)
    ink = np.asarray(turned.resize((side, side), Image.Resampling.BOX), dtype=np.float64) / 255
    dark, light = rng.uniform(0.0, 0.35), rng.uniform(0.6, 1.0)
    ground, stroke = (dark, light) if rng.random() < 0.5 else (light, dark)
    slope = rng.uniform(-0.15, 0.15, size=2)
    axis = np.linspace(-1, 1, side)
    uneven = ground + slope[0] * axis[:, None] + slope[1] * axis[None, :]
    image = uneven * (1 - ink) + stroke * ink
    image += rng.normal(0, rng.uniform(0.0, 0.08), size=image.shape)
    return (image.clip(0, 1) * 255).round().astype(np.uint8)


def draw_split(glyphs: list[Glyph], size: int, side: int, rng: np.random.Generator) -> tuple:
    """Draw ``size`` images that go through the glyphs in shuffled rounds, so classes are even.

    Returns:
        images (size, side, side) uint8 and labels (size,) int64.
    """
    rounds = -(-size // len(glyphs))
    order = np.concatenate([rng.permutation(len(glyphs)) for _ in range(rounds)])[:size]
    images = np.stack([render(glyphs[index], side, rng) for index in order])
    return images, np.array([glyphs[index].label for index in order], dtype=np.int64)

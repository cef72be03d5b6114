"""Where things lie in a checkout, wherever a test file stands."""

from __future__ import annotations

from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
"""What tests share, programs that they start included."""
ROOT = next(path for path in SUPPORT.parents if (path / "pyproject.toml").exists())
"""The checkout."""
CONFIG = ROOT / "config"
"""The shipped configs."""

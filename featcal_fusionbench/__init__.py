"""FeatCal, the feature calibration of merged models, as a plugin for FusionBench.

Importing this package is cheap: torch and FusionBench are imported by the modules that need them.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("featcal-fusionbench")
except PackageNotFoundError:  # a source tree on the path, not installed
    __version__ = "0+unknown"

__all__ = ["__version__"]

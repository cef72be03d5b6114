"""Puts this package's configs, and FusionBench's, on Hydra's search path."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class FeatCalSearchPathPlugin(SearchPathPlugin):
    """Makes `fusion_bench method=featcal` work from any directory, with no flags.

    Our configs are appended, FusionBench's come last, so that nothing here shadows a config of
    the user: the primary directory (for `fusion_bench`, `./config` where it exists) comes first.
    FusionBench's own configs have to be added because its command takes ANY `./config`, be it
    empty or this repository's, INSTEAD of them, and then finds not even its primary config.

    Hydra calls this for every app of the environment. Only processes that use FusionBench are
    changed: other apps may have a `method` or a `model` group of their own, and a mistyped name
    there must stay an error and not resolve to a config of ours. Hydra does not say which app
    runs, but by now an app that uses FusionBench has imported it or has its configs on the path.
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the two config roots, each unless it is there already."""
        present = {element.path for element in search_path.get_path()}
        roots = [str(root) for root in (own_configs(), fusion_bench_configs()) if root]
        if "fusion_bench" in sys.modules or not present.isdisjoint(roots):
            for root in roots:
                if root not in present:
                    search_path.append("featcal-fusionbench", root)


def own_configs() -> Path:
    """Find our configs beside this file.

    Returns:
        Their directory: in an installed wheel it lies inside the package (a top-level `config` in
        site-packages would be taken by FusionBench for its own), in a source checkout at the root.
    """
    root = Path(__file__).resolve().parents[1]
    installed = root / "featcal_fusionbench" / "config"
    return installed if installed.is_dir() else root / "config"


def fusion_bench_configs() -> Path | None:
    """Find FusionBench's configs, without importing anything.

    Returns:
        Their directory, or None where there is none. (`pkg://fusion_bench_config` would do for a
        search path, but FusionBench itself uses the plain directory, and one must be recognised
        as the other.)
    """
    spec = find_spec("fusion_bench_config")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))

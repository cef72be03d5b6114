"""Errors of the mirror. Each message names the thing at fault and the remedy."""

__all__ = ["MirrorError"]


class MirrorError(Exception):
    """A mirror cannot be made: of these configs, or in this directory."""

"""The share of the gap to the experts that a calibration closes: one definition for all tables."""

from __future__ import annotations

import math

__all__ = ["share_of_gap"]


def share_of_gap(accuracy: float, merged: float, experts: float) -> float:
    """Which part of the way from the merged model to the experts a row has gone.

    ``(row - merged) / (experts - merged)`` of average accuracies: 0 is the merged model, 1 the
    experts; negative is worse than the merged model. NaN where the experts are not better than
    the merged model, since there is no gap then.
    """
    gap = experts - merged
    return (accuracy - merged) / gap if gap > 0 else math.nan

"""A local mirror of the Hugging Face hub with random weights, to test the plumbing without the hub.

It holds what FusionBench's model pools and task pools name, under the true ids, in the layout of
the hub's cache: checkpoints of the true architectures with random weights, and data sets of a few
dozen rows with the true columns. The unchanged commands then run with ``HF_HUB_OFFLINE=1``::

    python scripts/hub_mirror.py DIRECTORY

What is needed is read from the composed configs (`needs`); `home` knows the layout, `images`,
`glue` and `random_models` what is laid down in it. Numbers that come out of such runs mean nothing.
"""

from .build import Mirror, MirrorSettings
from .needs import MirrorError
from .sets import Selection

__all__ = ["Mirror", "MirrorError", "MirrorSettings", "Selection"]

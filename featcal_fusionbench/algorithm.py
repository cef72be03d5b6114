"""The methods, under the name that users' code and configs have for them."""

from .method.featcal import FeatCalAlgorithm as FeatCalAlgorithm
from .method.merge_only import MergeOnlyAlgorithm as MergeOnlyAlgorithm

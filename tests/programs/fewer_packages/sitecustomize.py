"""Hides the modules and distributions in $HIDDEN from Python, as if they were not installed."""

import importlib.metadata
import os
import sys

HIDDEN = dict.fromkeys(os.environ["HIDDEN"].split())
sys.modules.update(HIDDEN)
_find = importlib.metadata.MetadataPathFinder.find_distributions


def _find_others(*context):
    return [found for found in _find(*context) if found.name not in HIDDEN]


importlib.metadata.MetadataPathFinder.find_distributions = staticmethod(_find_others)

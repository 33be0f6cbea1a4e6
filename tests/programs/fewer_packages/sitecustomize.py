"""Hides the modules in $HIDDEN from Python, as if they were not installed."""

import os
import sys

sys.modules.update(dict.fromkeys(os.environ["HIDDEN"].split()))

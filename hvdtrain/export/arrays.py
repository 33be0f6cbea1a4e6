"""Write the arrays of a model as a safetensors file, with PyTorch's names and shapes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from hvdtrain.export.source import Source


def save_arrays(source: Source, path: Path) -> None:
    """Writes the arrays; the metadata `hvdtrain` have the document of `Source.about`. Raises OSError."""
    arrays = {name: np.ascontiguousarray(array) for name, array in source.arrays.items()}
    path.write_bytes(save(arrays, {"hvdtrain": json.dumps(source.about(complete=False)), "format": "pt"}))

"""Runs exported models without hvdtrain: `exported.py FOLDER`. For test_export.py.

For each file NAME.ENDING it reads the inputs in NAME.npy, and writes the outputs to NAME.ENDING.npz with the document
that the file has about its model. The first input is also run alone.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.modules["hvdtrain"] = None  # type: ignore[assignment]

Loaded = tuple[Callable[[Any], Any], str]


def torch(path: Path) -> Loaded:
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)
    extra = {"hvdtrain.json": ""}
    model = torch.export.load(path, extra_files=extra).module()
    return lambda inputs: model(torch.from_numpy(inputs)), extra["hvdtrain.json"]


def onnx(path: Path) -> Loaded:
    session = importlib.import_module("onnxruntime").InferenceSession(path)
    (given,) = session.get_inputs()
    assert given.shape[0] == "batch"
    about = session.get_modelmeta().custom_metadata_map["hvdtrain"]
    return lambda inputs: session.run(None, {given.name: inputs}), about


LOADERS = {".pt2": torch, ".onnx": onnx}


def arrays(outputs: Any) -> list[np.ndarray]:
    listed = outputs if isinstance(outputs, tuple | list) else [outputs]
    return [np.asarray(each.detach() if hasattr(each, "detach") else each) for each in listed]


def main() -> None:
    for path in (path for suffix in LOADERS for path in Path(sys.argv[1]).glob(f"*{suffix}")):
        run, about = LOADERS[path.suffix](path)
        inputs = np.load(path.with_suffix(".npy"))
        found = arrays(run(inputs))
        for output, alone in zip(found, arrays(run(inputs[:1])), strict=True):
            np.testing.assert_allclose(alone, output[:1], rtol=1e-4, atol=1e-4)
        np.savez(path.with_name(f"{path.name}.npz"), *found, about=np.array(about))


main()

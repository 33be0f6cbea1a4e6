"""Runs exported models without hvdtrain: `exported.py LIBRARY FOLDER`. For test_export.py.

For each model NAME that the folder has for this library it reads the inputs in NAME.npy, and writes the outputs to
NAME.LIBRARY.npz with the document that the file has about its model. The first input is also run alone.
"""

from __future__ import annotations

import importlib
import json
import sys
import zipfile
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
    model = torch.export.load(path.with_suffix(".pt2"), extra_files=extra).module()
    return lambda inputs: model(torch.from_numpy(inputs)), extra["hvdtrain.json"]


def onnx(path: Path) -> Loaded:
    session = importlib.import_module("onnxruntime").InferenceSession(path.with_suffix(".onnx"))
    (given,) = session.get_inputs()
    assert given.shape[0] == "batch"
    return lambda inputs: session.run(None, {given.name: inputs}), session.get_modelmeta().custom_metadata_map[
        "hvdtrain"
    ]


def keras(path: Path) -> Loaded:
    keras = importlib.import_module("keras")
    model = keras.models.load_model(path.with_suffix(".keras"))
    return model, zipfile.ZipFile(path.with_suffix(".keras")).read("hvdtrain.json").decode()


def savedmodel(path: Path) -> Loaded:
    tf = importlib.import_module("tensorflow")
    model = tf.saved_model.load(path.with_suffix(".savedmodel"))
    return lambda inputs: model.serve(inputs), (
        path.with_suffix(".savedmodel") / "assets.extra" / "hvdtrain.json"
    ).read_text()


def arrays(outputs: Any) -> list[np.ndarray]:
    listed = outputs if isinstance(outputs, tuple | list) else [outputs]
    return [np.asarray(each.detach() if hasattr(each, "detach") else each) for each in listed]


def main() -> None:
    library, folder = sys.argv[1], Path(sys.argv[2])
    ending = {"torch": "pt2"}.get(library, library)
    for path in sorted(path for path in folder.glob("*.npy") if path.with_suffix(f".{ending}").exists()):
        run, about = {"torch": torch, "onnx": onnx, "keras": keras, "savedmodel": savedmodel}[library](path)
        inputs = np.load(path)
        found = arrays(run(inputs))
        for output, alone in zip(found, arrays(run(inputs[:1])), strict=True):
            np.testing.assert_allclose(alone, output[:1], rtol=1e-4, atol=1e-4)
        np.savez(folder / f"{path.stem}.{library}.npz", *found, about=np.array(about))
        json.loads(about)


main()

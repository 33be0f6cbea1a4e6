"""A script that trains its own model with `hvdtrain.train`, in PyTorch or Keras, for test_own_train.py.

Usage: own_train.py FRAMEWORK FOLDER [JSON of settings]; each rank saves its final weights in FOLDER.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import hvdtrain
from hvdtrain.comm.launch_env import launch_env

DIGITS = load_digits()
X, Y = DIGITS.data / 16, DIGITS.target
PARTS = {"train": (X[:400], Y[:400]), "validation": (X[400:500], Y[400:500]), "test": (X[500:613], Y[500:613])}
SETTINGS = {"epochs": 2, "global_batch_size": 48, "checkpoint_steps": 3, "keep_checkpoints": 9, "lr": 0.1}


def new_model(framework: str, seed: int, dropout: float = 0.0) -> Any:
    """Return a model with random weights, some of which are not trained."""
    if framework == "torch":
        import torch

        torch.manual_seed(seed)
        first, last = torch.nn.Linear(64, 24), torch.nn.Linear(24, 10)
        fixed = torch.nn.Linear(24, 24).requires_grad_(False)
        return torch.nn.Sequential(first, torch.nn.Tanh(), torch.nn.Dropout(dropout), fixed, last)
    import keras

    keras.utils.set_random_seed(seed)
    x = keras.Input((64,))
    corner = keras.layers.Embedding(17, 24)(keras.ops.cast(16 * x[:, 2], "int32"))
    first = keras.layers.Dropout(dropout)(keras.layers.Dense(24, activation="tanh")(x))
    fixed = keras.layers.Dense(24, trainable=False)(first + corner)
    return keras.Model(x, keras.layers.Dense(10)(fixed))


def trained(framework: str, start: int, dropout: float = 0.0, **settings: Any) -> tuple[Any, Any]:
    """Train a model; return it and the run's summary."""
    model = new_model(framework, start, dropout)
    if framework == "torch":
        import torch

        loss = torch.nn.functional.cross_entropy
    else:
        import keras

        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return model, hvdtrain.train(model, loss=loss, **{**PARTS, **SETTINGS, **settings})


def weights(model: Any) -> list[np.ndarray]:
    """Return all weights in the model's order."""
    if hasattr(model, "state_dict"):
        return [each.numpy() for each in model.state_dict().values()]
    return [np.asarray(each) for each in model.get_weights()]


def answers(model: Any, inputs: np.ndarray) -> np.ndarray:
    """Return the likeliest class of each input, computed without hvdtrain."""
    if hasattr(model, "state_dict"):
        import torch

        with torch.no_grad():
            return model.eval()(torch.from_numpy(inputs.astype(np.float32))).argmax(1).numpy()
    return model.predict(inputs, verbose=0).argmax(1)


if __name__ == "__main__":
    framework, folder, *rest = sys.argv[1:]
    rank, settings = launch_env().rank, json.loads(rest[0]) if rest else {}
    if settings.pop("cut", None) and rank == 1:  # the mistake of sharding the data in the script
        PARTS["train"] = PARTS["train"][0][:-1], PARTS["train"][1][:-1]
    model, summary = trained(framework, rank, **settings)
    np.savez(Path(folder) / f"rank{rank}.npz", *weights(model))
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps([summary.test_scores, summary.train_s]))

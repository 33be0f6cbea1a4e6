"""Models as native implementations for both frameworks.

Each model has a module with its sizes, shapes and initial values, and a module for each framework.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

PRECISIONS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""TensorFlow's name of the compute type for each --precision"""


def network(name: str, framework: str, *arguments: Any, **options: Any) -> Any:
    """A model by module and class: `network("resnet.ResNet", "torch", spec)` makes a `resnet_torch.ResNetTorch`."""
    module, cls = name.split(".")
    suffix = {"torch": "Torch", "tensorflow": "TF"}[framework]
    found = importlib.import_module(f"hvdtrain.models.{module}_{suffix.lower()}")
    return getattr(found, cls + suffix)(*arguments, **options)


def maker(name: str, spec: Any, config: Any, scope: Callable[[], Any], **options: Any) -> Callable[[range | None], Any]:
    """A function that makes the model for a run's `config`: only the given layers, or all of them for None.

    `scope` makes the scope of TensorFlow's variables.
    """

    def make(stage: range | None) -> Any:
        tensorflow = {"compute_dtype": PRECISIONS[config.precision], "scope": scope()}
        more = tensorflow if config.framework == "tensorflow" else {}
        return network(name, config.framework, spec, stage=stage, **options, **more)

    return make

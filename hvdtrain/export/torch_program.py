"""Write a model as a program of torch.export (.pt2), or as ONNX.

The program consists of PyTorch's own operations and has no reference to hvdtrain's classes. TorchScript is not used:
PyTorch 2.13 has deprecated it.
"""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hvdtrain import models
from hvdtrain.captions.generation import UNWRITTEN, WORDS_LIMIT
from hvdtrain.captions.vocabulary import END, PAD, START
from hvdtrain.data.solar import SIDE, map_weights
from hvdtrain.export.source import Source
from hvdtrain.inference import trained
from hvdtrain.models import captioner, mlp
from hvdtrain.models.vgg16_torch import Vgg16Torch
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure

DOCUMENT = "hvdtrain.json"
"""Name of the extra file in a .pt2 archive that has the document of `Source.about`"""
ONNX_BYTES = 2_000_000_000
"""Limit for the weights in an ONNX file; protobuf allows 2 GiB"""
TOLERANCE = 1e-4
"""Greatest difference between PyTorch's and ONNX Runtime's outputs, relative to the greatest output"""


# --- models that take raw inputs --------------------------------------------------------------------------------------


class Images(nn.Module):
    """Logits (N, classes) of images (N, height, width, channels) uint8."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        self.network = _network("resnet.ResNet", source)
        self._rounded = source.preprocessing.get("rounded_to")

    def forward(self, images: Tensor) -> Tensor:
        x = images.to(torch.float32)
        x = x * (1 / 255) if self._rounded is None else (x / 255).to(getattr(torch, self._rounded)).to(torch.float32)
        return self.network(x)


class Rows(nn.Module):
    """Logits (N, classes) of features (N, features) float64."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        self.network = _network("mlp.MLP", source, loss="cross_entropy")
        for name in ("mean", "scale"):
            self.register_buffer(name, torch.tensor(source.preprocessing[name], dtype=torch.float64))
        self._fills = source.preprocessing["missing"] == "mean"

    def forward(self, features: Tensor) -> Tensor:
        x = (features - self.mean) / self.scale
        return self.network((torch.nan_to_num(x, nan=0.0) if self._fills else x).to(torch.float32))


class Readings(nn.Module):
    """Forecasts (N, 1) in W/m2 of readings (N, readings) float32 in W/m2."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        window = isinstance(source.spec, mlp.MLPSpec)
        if window:
            self.network = _network("mlp.MLP", source, loss="forecast_error")
        else:
            self.network = _network("solar.CNN", source)
        about = source.preprocessing
        self._mean, self._deviation, self._look = about["mean"], about["deviation"], about["look"]
        if self._look == "map":
            self.register_buffer("weights", torch.from_numpy(map_weights(about["places"])))

    def forward(self, readings: Tensor) -> Tensor:
        x = readings
        if self._look == "map":
            x = (x @ self.weights).unflatten(1, (SIDE, SIDE))
        elif self._look == "stack":
            x = torch.stack([x[:, row : row + SIDE] for row in range(SIDE)], 1)
        return self.network((x - self._mean) / self._deviation) * self._deviation + self._mean


class Captions(nn.Module):
    """Greedy captions (N, words) int64 and their logits (N, words, vocabulary) of images (N, height, width, 3) uint8.

    See `captions.generation` for the search; this is the search with a beam width of 1.
    """

    def __init__(self, source: Source) -> None:
        super().__init__()
        decoder = {name: source.arrays[name] for name in captioner.parameters(source.spec)}
        self.network = _network("captioner.Captioner", source, arrays=decoder)
        self._encoder = None
        if source.spec.encoder == "vgg16":
            frozen = {name.removeprefix("encoder."): a for name, a in source.arrays.items() if name not in decoder}
            self._encoder = Vgg16Torch(frozen, source.preprocessing["name"])
        mask = torch.zeros(source.spec.vocabulary)
        mask[list(UNWRITTEN)] = -torch.inf
        self.register_buffer("mask", mask)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        image = self.network.encoded(self._encoder.features(images) if self._encoder else images)
        hidden = cell = torch.zeros_like(image)
        last = torch.full_like(image[:, 0], START, dtype=torch.int64)
        words, logits = [], []
        for _ in range(WORDS_LIMIT):
            scores, hidden, cell = self.network.advanced(image, last, hidden, cell)
            over = (last == END) | (last == PAD)
            last = torch.where(over, PAD, (scores + self.mask).argmax(1))
            words.append(last)
            logits.append(scores)
        return torch.stack(words, 1), torch.stack(logits, 1)


MODELS: dict[str, Callable[[Source], nn.Module]] = {
    "resnet": Images,
    "tabular": Rows,
    "solar": Readings,
    "captioning": Captions,
}


def _network(name: str, source: Source, *, arrays: dict[str, Any] | None = None, **options: str) -> nn.Module:
    made: nn.Module = models.network(name, "torch", source.spec, **options)
    trained.fill(made, source.arrays if arrays is None else arrays, "torch")
    return made


# --- files ------------------------------------------------------------------------------------------------------------


def model(source: Source) -> nn.Module:
    """The model on the CPU, in evaluation mode, with its preprocessing."""
    return MODELS[source.workload](source).eval().requires_grad_(False)


def save_program(source: Source, path: Path) -> None:
    """Writes a .pt2 archive for torch.export.load. Raises OSError."""
    program, buffer = _program(model(source), source), io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about kernels in channels-last layout, which are saved whole
        # To memory, because PyTorch's own writer reports a full disk without its reason.
        torch.export.save(program, buffer, extra_files={DOCUMENT: json.dumps(source.about())})
    path.write_bytes(buffer.getbuffer())


def save_onnx(source: Source, path: Path) -> None:
    """Writes an ONNX file and compares ONNX Runtime's outputs with PyTorch's.

    Raises OSError, and Failure: 78 if the model is too large for the format, 1 if the outputs differ.
    """
    import onnx
    import onnxruntime

    if (size := sum(array.nbytes for array in source.arrays.values())) > ONNX_BYTES:
        message = f"the model has {size / 1e9:.1f} GB, and an ONNX file holds at most 2"
        raise Failure(f"{message}; hint: use --to torch or --to safetensors", exits.BAD_CONFIG)
    made = model(source)
    names = {"input_names": [source.input.name], "output_names": [output.name for output in source.outputs]}
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = _program(made, source)
        written = torch.onnx.export(program, dynamo=True, verbose=False, dynamic_shapes=({0: "batch"},), **names)
    for node in written.model.graph.all_nodes():
        node.metadata_props.clear()  # the lines of source code that each node comes from
    written.model.metadata_props["hvdtrain"] = json.dumps(source.about())
    written.save(str(path), external_data=False)
    onnx.checker.check_model(str(path))
    example = source.example(3)
    with torch.inference_mode():
        known = made(torch.from_numpy(example))
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    found = session.run(None, {source.input.name: example})
    for output, one, other in zip(source.outputs, known if type(known) is tuple else [known], found, strict=True):
        if not np.allclose(other, one.numpy(), rtol=TOLERANCE, atol=TOLERANCE * float(one.abs().max())):
            message = f"ONNX Runtime's {output.name} differ from PyTorch's"
            raise Failure(f"{message}; hint: use the versions of tools/constraints.txt, or --to torch")


def _program(made: nn.Module, source: Source) -> torch.export.ExportedProgram:
    example = torch.from_numpy(source.example(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(made, (example,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    for part in program.graph_module.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)  # paths on this machine
    return program

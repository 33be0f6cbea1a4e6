"""The captioning model as data: its sizes, array shapes and initial values, for both frameworks.

The "merge" model of Lucero (2022): picture and words meet only after the words were read.

    inputs (N, ...)      encoder -> F values; dropout; linear, ReLU          -> H   (the encoded picture)
    words  (N, T)        embedding of E values; dropout; LSTM                -> H   at each of the T positions
    both                 sum; linear, ReLU; linear; softmax                  -> probabilities of the next word

Encoders: `vgg16` takes 4,096 ready values per picture (fc2 of VGG16, which is not trained and not part of this model),
`small` is a convolutional network trained with the rest, and `none` shows no picture at all: its encoded picture is 0,
so that one can see how far the words alone lead.

`small` halves the picture four times (3x3 convolution with stride 2, padding 1, ReLU). Its last maps are flattened in
the order height, width, channel and not averaged, because where a thing is matters to a caption.

The study trained on one row per word: the words before it, padded on the left with masked zeros. Here a caption is one
row, and the loss of all its words comes from one pass: the LSTM looks back only, so what is at position t is what the
study's row for that word had. Padding stands at the end, where nothing but the loss has to be told about it.

Names and shapes are PyTorch's: convolutions (out, in, height, width), linear (out, in), the gates of the LSTM in the
order input, forget, cell, output. The LSTM has one bias.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from hvdtrain.models.layers import Arrays, Layer, Shapes, glorot, uniform
from hvdtrain.system.exits import BAD_CONFIG, Failure

PAD = 0
"""The word id that fills up short captions (`hvdtrain.captions.vocabulary`)."""

CONVOLUTIONS = (16, 32, 64, 64)
"""Output channels of the small encoder's convolutions."""
KERNEL, STRIDE, PADDING = 3, 2, 1
COLOURS = 3


@dataclass(frozen=True, kw_only=True)
class CaptionerSpec:
    """The sizes of the model. Raises Failure (BAD_CONFIG) for a value that makes no model."""

    vocabulary: int
    """Number of words, the four special ones (padding, start, end, unknown) included."""
    encoder: Literal["small", "vgg16", "none"]
    """What turns a picture into values; see the head of this module."""
    image_size: tuple[int, int] = (64, 64)
    """(width, height) of the pictures of encoder `small`, in pixels."""
    features: int = 4096
    """Values per picture of encoder `vgg16`."""
    embedding: int = 256
    """Values per word."""
    hidden: int = 256
    """Size of the LSTM and of the layers behind it."""
    dropout: float = 0.5
    """Share of values that dropout sets to 0 in training, before the image layer and before the LSTM."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "image_size", tuple(self.image_size))  # JSON brings a list
        if self.encoder not in ("small", "vgg16", "none"):
            raise Failure(f"model: no encoder '{self.encoder}'; choose small, vgg16 or none", BAD_CONFIG)
        if self.vocabulary < 5:
            raise Failure(
                f"model: vocabulary is {self.vocabulary}; give at least 5 (four special words and one)", BAD_CONFIG
            )
        for name in ("features", "embedding", "hidden"):
            if (value := getattr(self, name)) < 1:
                raise Failure(f"model: {name} is {value}; give at least 1", BAD_CONFIG)
        if len(self.image_size) != 2 or min(self.image_size) < 1:
            raise Failure(f"model: image_size is {self.image_size}; give width and height, at least 1", BAD_CONFIG)
        if not 0 <= self.dropout < 1:
            raise Failure(f"model: dropout is {self.dropout}; give at least 0 and less than 1", BAD_CONFIG)


def picture_values(spec: CaptionerSpec) -> int:
    """Values per picture that reach the image layer: F above, 0 without a picture, 1024 for `small` at 64x64."""
    if spec.encoder == "none":
        return 0
    return spec.features if spec.encoder == "vgg16" else _pixels(spec, len(CONVOLUTIONS)) * CONVOLUTIONS[-1]


def _pixels(spec: CaptionerSpec, convolutions: int) -> int:
    """Of a map behind so many convolutions."""
    return math.prod(-(-side // STRIDE**convolutions) for side in spec.image_size)


def rows(spec: CaptionerSpec) -> dict[str, Shapes]:
    """What follows each other, each with its trained arrays: encoder, image layer, all that reads words, the rest."""
    found: dict[str, Shapes] = {}
    if spec.encoder == "small":
        channels = (COLOURS, *CONVOLUTIONS)
        found["encoder"] = {}
        for number, outputs in enumerate(CONVOLUTIONS, start=1):
            found["encoder"][f"encoder.conv{number}.weight"] = (outputs, channels[number - 1], KERNEL, KERNEL)
            found["encoder"][f"encoder.conv{number}.bias"] = (outputs,)
    if spec.encoder != "none":
        found["image"] = {"image.weight": (spec.hidden, picture_values(spec)), "image.bias": (spec.hidden,)}
    found["lstm"] = {
        "embedding.weight": (spec.vocabulary, spec.embedding),
        "lstm.weight_ih": (4 * spec.hidden, spec.embedding),
        "lstm.weight_hh": (4 * spec.hidden, spec.hidden),
        "lstm.bias": (4 * spec.hidden,),
    }
    found["words"] = {
        "merge.weight": (spec.hidden, spec.hidden),
        "merge.bias": (spec.hidden,),
        "words.weight": (spec.vocabulary, spec.hidden),
        "words.bias": (spec.vocabulary,),
    }
    return found


def parameters(spec: CaptionerSpec, part: range | None = None) -> Shapes:
    """Name and shape of every trained array, in the order of the layers; `part`: of these `layers` only."""
    every = list(rows(spec).values())
    return {name: shape for number in part or range(len(every)) for name, shape in every[number].items()}


def layers(spec: CaptionerSpec, words: int) -> list[Layer]:
    """The model as a row of layers, for captions of so many words: pictures first, which the `lstm`'s words join."""
    outputs = {"encoder": (picture_values(spec),), "image": (spec.hidden,), "lstm": (words, spec.hidden)}
    held = {  # of each map what comes out of the ReLU; masks; an LSTM's gates and both its states; logits
        "encoder": sum(_pixels(spec, number) * count for number, count in enumerate(CONVOLUTIONS, start=1)),
        "image": picture_values(spec) + spec.hidden,
        "lstm": words * (2 * spec.embedding + 7 * spec.hidden),
        "words": words * (2 * spec.hidden + 2 * spec.vocabulary),
    }

    def work(name: str, shape: tuple[int, ...]) -> int:
        if len(shape) == 1 or name == "embedding.weight":  # rows of which are looked up
            return 0
        convolution = re.fullmatch(r"encoder\.conv(\d)\.weight", name)
        times = _pixels(spec, int(convolution[1])) if convolution else 1 if name == "image.weight" else words
        return math.prod(shape) * times

    return [
        Layer(
            name=name,
            arrays=tuple(shapes),
            output=outputs.get(name, (words, spec.vocabulary)),
            multiply_adds=sum(work(array, shape) for array, shape in shapes.items()),
            held=held[name],
        )
        for name, shapes in rows(spec).items()
    ]


def dense(spec: CaptionerSpec, words: int) -> dict[str, int]:
    """Weights of dense layers: name -> rows of inputs per caption of so many words."""
    picture = {} if spec.encoder == "none" else {"image.weight": 1}
    return picture | {"merge.weight": words, "words.weight": words}


def multiply_adds(spec: CaptionerSpec) -> float:
    """Multiply-adds of one layer of the decoder for one word, forward, on average; threads are chosen by it."""
    matrices = [shape for name, shape in parameters(spec).items() if name.startswith(("lstm.w", "merge.w", "words.w"))]
    return sum(math.prod(shape) for shape in matrices) / len(matrices)


def initial_state(spec: CaptionerSpec, seed: int, part: range | None = None) -> Arrays:
    """Parameters before the first step, float32, a pure function of `spec` and `seed`; `part`: of these layers.

    Keras' distributions, which the study used: the embedding uniform within +-0.05, biases 0 but 1 for the forget gate
    (Jozefowicz, Zaremba, Sutskever: "An empirical exploration of recurrent network architectures", ICML 2015), all
    else Glorot's (see `layers.glorot`). One exception: `lstm.weight_hh` is Glorot's too and not orthogonal, because a
    decomposition differs in its last digits between machines.

    Raises Failure (BAD_CONFIG) for a negative seed.
    """
    shapes, table = parameters(spec, part), "embedding.weight"
    state = glorot(seed, {name: shape for name, shape in shapes.items() if name != table})
    if "lstm.bias" in state:
        state["lstm.bias"][spec.hidden : 2 * spec.hidden] = 1
        state[table] = uniform(seed, table, shapes[table], 0.05)
    return state

"""Description of the captioning model for both frameworks: sizes, array shapes and initial values.

It is the "merge" model of Lucero (2022), in which image and words are combined after the words were read.

    inputs (N, ...)      encoder -> F values; dropout; linear, ReLU          -> H   (the encoded image)
    words  (N, T)        embedding of E values; dropout; LSTM                -> H   at each of the T positions
    both                 sum; linear, ReLU; linear; softmax                  -> probabilities of the next word

Encoders: `vgg16` takes 4,096 precomputed values per image. `small` is a convolutional network that is trained too: it
halves the image four times (3x3 convolution with stride 2, padding 1, ReLU), and its maps are flattened in the order
height, width, channel. `none` uses no image: its encoded image is 0, which shows how far the words alone lead.

The study trained on one row per word. Here a caption is one row, and one pass gives the loss of all its words, which is
equivalent since the LSTM looks back only. Padding is at the end, where only the loss must ignore it.

Names and shapes are PyTorch's: convolutions (out, in, height, width), linear (out, in), and the gates of the LSTM in
the order input, forget, cell, output. The LSTM has one bias.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Literal

from hvdtrain.config.constraints import Checked, bounded
from hvdtrain.models.layers import Arrays, Layer, Shapes, glorot, select, uniform
from hvdtrain.system.exits import BAD_CONFIG, Failure

PAD = 0
"""Word number of padding (`hvdtrain.captions.vocabulary`)."""

CONVOLUTIONS = (16, 32, 64, 64)
"""Output channels of the small encoder's convolutions."""
KERNEL, STRIDE, PADDING = 3, 2, 1
COLOURS = 3


@dataclass(frozen=True, kw_only=True)
class CaptionerSpec(Checked):
    """Sizes of the model. Raises Failure (BAD_CONFIG) for invalid values."""

    vocabulary: int = bounded(dataclasses.MISSING, least=5)
    """Number of words, including the four special ones (padding, start, end, unknown)."""
    encoder: Literal["small", "vgg16", "none"]
    """Image encoder; see the module's docstring."""
    image_size: tuple[int, int] = (64, 64)
    """(width, height) in pixels of the images for encoder `small`."""
    features: int = bounded(4096, least=1)
    """Values per image of encoder `vgg16`."""
    embedding: int = bounded(256, least=1)
    """Size of a word's embedding."""
    hidden: int = bounded(256, least=1)
    """Size of the LSTM and of the layers after it."""
    dropout: float = bounded(0.5, least=0, below=1)
    """Dropout in training, before the image layer and before the LSTM."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "image_size", tuple(self.image_size))  # JSON contains a list
        super().__post_init__()
        if len(self.image_size) != 2 or min(self.image_size) < 1:
            raise Failure(f"model: image_size is {self.image_size}; hint: give positive width and height", BAD_CONFIG)


def image_values(spec: CaptionerSpec) -> int:
    """Values per image that enter the image layer: F above, 0 without an image, 1024 for `small` at 64x64."""
    if spec.encoder == "none":
        return 0
    return spec.features if spec.encoder == "vgg16" else _pixels(spec, len(CONVOLUTIONS)) * CONVOLUTIONS[-1]


def _pixels(spec: CaptionerSpec, convolutions: int) -> int:
    """Pixels of a map after this number of convolutions."""
    return math.prod(-(-side // STRIDE**convolutions) for side in spec.image_size)


def layer_shapes(spec: CaptionerSpec) -> dict[str, Shapes]:
    """The layers in order, each with its trained arrays: encoder, image layer, LSTM with embedding, word layer."""
    shapes: dict[str, Shapes] = {}
    if spec.encoder == "small":
        channels = (COLOURS, *CONVOLUTIONS)
        shapes["encoder"] = {}
        for number, outputs in enumerate(CONVOLUTIONS, start=1):
            shapes["encoder"][f"encoder.conv{number}.weight"] = (outputs, channels[number - 1], KERNEL, KERNEL)
            shapes["encoder"][f"encoder.conv{number}.bias"] = (outputs,)
    if spec.encoder != "none":
        shapes["image"] = {"image.weight": (spec.hidden, image_values(spec)), "image.bias": (spec.hidden,)}
    shapes["lstm"] = {
        "embedding.weight": (spec.vocabulary, spec.embedding),
        "lstm.weight_ih": (4 * spec.hidden, spec.embedding),
        "lstm.weight_hh": (4 * spec.hidden, spec.hidden),
        "lstm.bias": (4 * spec.hidden,),
    }
    shapes["words"] = {
        "merge.weight": (spec.hidden, spec.hidden),
        "merge.bias": (spec.hidden,),
        "words.weight": (spec.vocabulary, spec.hidden),
        "words.bias": (spec.vocabulary,),
    }
    return shapes


def parameters(spec: CaptionerSpec, stage: range | None = None) -> Shapes:
    """Name and shape of every trained array, in the order of the layers; `stage`: only these layers."""
    return select(layer_shapes(spec), stage)


def layers(spec: CaptionerSpec, words: int) -> list[Layer]:
    """The model as a sequence of layers, for captions of `words` words: image layers first, then `lstm` adds the
    words."""
    outputs = {"encoder": (image_values(spec),), "image": (spec.hidden,), "lstm": (words, spec.hidden)}
    held = {  # outputs of each ReLU; dropout masks; an LSTM's gates and both of its states; logits
        "encoder": sum(_pixels(spec, number) * count for number, count in enumerate(CONVOLUTIONS, start=1)),
        "image": image_values(spec) + spec.hidden,
        "lstm": words * (2 * spec.embedding + 7 * spec.hidden),
        "words": words * (2 * spec.hidden + 2 * spec.vocabulary),
    }

    def work(name: str, shape: tuple[int, ...]) -> int:
        if len(shape) == 1 or name == "embedding.weight":  # a lookup multiplies nothing
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
        for name, shapes in layer_shapes(spec).items()
    ]


def multiply_adds(spec: CaptionerSpec) -> float:
    """Mean multiply-adds of a decoder layer for one word, forward; used to choose the number of threads."""
    matrices = [shape for name, shape in parameters(spec).items() if name.startswith(("lstm.w", "merge.w", "words.w"))]
    return sum(math.prod(shape) for shape in matrices) / len(matrices)


def initial_state(spec: CaptionerSpec, seed: int, stage: range | None = None) -> Arrays:
    """Parameters before the first step, float32; a pure function of `spec` and `seed`. `stage`: only these layers.

    The distributions are those of Keras, which the study used: the embedding is uniform within +-0.05; biases are 0,
    except 1 for the forget gate (Jozefowicz, Zaremba, Sutskever: "An empirical exploration of recurrent network
    architectures", ICML 2015); everything else is Glorot's (see `layers.glorot`). One exception: `lstm.weight_hh` is
    Glorot's instead of orthogonal, because a decomposition rounds differently on different machines.
    """
    shapes, table = parameters(spec, stage), "embedding.weight"
    state = glorot(seed, {name: shape for name, shape in shapes.items() if name != table})
    if "lstm.bias" in state:
        state["lstm.bias"][spec.hidden : 2 * spec.hidden] = 1
        state[table] = uniform(seed, table, shapes[table], 0.05)
    return state

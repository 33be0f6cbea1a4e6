"""The captioning model in PyTorch: the layers of `captioner.py`."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hvdtrain.models.captioner import CONVOLUTIONS, PAD, PADDING, STRIDE, CaptionerSpec, layer_shapes, parameters
from hvdtrain.models.layers_torch import Named, dropped


class CaptionerTorch(Named):
    """The model of `spec`: see `layers_torch.Named`. With `stage` it has only these layers (`captioner.layers`)."""

    def __init__(self, spec: CaptionerSpec, stage: range | None = None) -> None:
        super().__init__(parameters(spec, stage))
        self.spec = spec
        methods = {"encoder": self._encoder, "image": self._image, "lstm": self._lstm_layer, "words": self._words}
        layers = [methods[name] for name in layer_shapes(spec)]
        self._layers = [layers[number] for number in stage or range(len(layers))]

    def forward(self, inputs: Tensor, tokens: Tensor, key: Tensor) -> Any:
        """Logits (words, vocabulary) float32 and targets (words,) of all target words, caption after caption; for a
        stage without the last layer, its output for the previous stage's output.

        inputs: (N, height, width, 3) uint8, or (N, features) float32; tokens (N, T + 1) int64: start, words, end,
        padding; key (2,) int64, which determines dropout in training.
        """
        x, dropout_key = inputs, key if self.training and self.spec.dropout else None
        for layer in self._layers:
            x = layer(x, tokens, dropout_key)
        return x

    def loss(self, inputs: Tensor, tokens: Tensor, key: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum of the cross-entropies of all target words (without padding), and the number of correct predictions."""
        logits, targets = self(inputs, tokens, key)
        return F.cross_entropy(logits, targets, reduction="sum"), {"correct": (logits.argmax(1) == targets).sum()}

    @torch.inference_mode()
    def encode(self, inputs: np.ndarray) -> np.ndarray:
        """The encoded images (N, hidden) float32, without dropout; inputs as in `forward`."""
        if self.spec.encoder == "none":
            return np.zeros((len(inputs), self.spec.hidden), np.float32)
        return cast(np.ndarray, self.encoded(self._tensor(inputs)).cpu().numpy())

    def encoded(self, inputs: Tensor) -> Tensor:
        """The encoded images (N, hidden) float32, without dropout; inputs as in `forward`."""
        x = inputs
        for layer in self._layers[:-2]:
            x = layer(x, inputs, None)
        return x.float()

    @torch.inference_mode()
    def step(
        self, encoded: np.ndarray, words: np.ndarray, hidden: np.ndarray, cell: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Advances captions by one word, without dropout: see `hvdtrain.captions.generation.Writer`."""
        logits, h, c = self.advanced(*(self._tensor(array) for array in (encoded, words, hidden, cell)))
        return F.log_softmax(logits, dim=1).cpu().numpy(), h.cpu().numpy(), c.cpu().numpy()

    def advanced(self, image: Tensor, words: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits (N, vocabulary) of the word after `words` (N,), and the LSTM's new hidden and cell state (N, hidden);
        `image` (N, hidden) is the encoded image."""
        embedded = F.embedding(words, self._array("embedding.weight"))
        hidden, cell = torch.lstm_cell(embedded, (hidden, cell), *self._lstm_arrays())
        return self._logits(hidden + image), hidden, cell

    # The layers. Each takes the output of the layer before, the tokens, and the key if dropout is on.

    def _encoder(self, images: Tensor, tokens: Tensor, key: Tensor | None) -> Tensor:
        """(N, values), output of the small encoder."""
        x = images.permute(0, 3, 1, 2).float().div_(255)  # permute makes a view: channels-last in memory
        for number in range(1, len(CONVOLUTIONS) + 1):
            x = F.relu_(F.conv2d(x, *self._layer(f"encoder.conv{number}"), STRIDE, PADDING))
        return x.permute(0, 2, 3, 1).flatten(1)

    def _image(self, x: Tensor, tokens: Tensor, key: Tensor | None) -> Tensor:
        """(N, hidden), the encoded image."""
        return F.relu_(F.linear(dropped(x, self.spec.dropout, key), *self._layer("image")))

    def _lstm_layer(self, image: Tensor, tokens: Tensor, key: Tensor | None) -> Tensor:
        """(N, T, hidden): the LSTM's output at each word, plus the encoded image if there is one."""
        embedded = F.embedding(tokens[:, :-1], self._array("embedding.weight"))
        read = self._read(dropped(embedded, self.spec.dropout, None if key is None else key + 1))
        return read if self.spec.encoder == "none" else read + image.unsqueeze(1)

    def _words(self, merged: Tensor, tokens: Tensor, key: Tensor | None) -> tuple[Tensor, Tensor]:
        """Logits and targets, as `forward` returns them."""
        targets = tokens[:, 1:]
        is_word = targets != PAD  # the widest layer is computed only for these
        return self._logits(merged[is_word]), targets[is_word]

    def _read(self, embedded: Tensor) -> Tensor:
        """The LSTM's outputs (N, T, hidden) at each position."""
        device = embedded.device.type
        arrays = self._lstm_arrays()
        if torch.is_autocast_enabled(device):  # autocast supports the LSTM on GPUs only
            kind = torch.get_autocast_dtype(device)
            embedded, arrays = embedded.to(kind), [array.to(kind) for array in arrays]
        zeros = embedded.new_zeros(1, len(embedded), self.spec.hidden)
        outputs, _, _ = torch.lstm(
            embedded,
            (zeros, zeros),
            arrays,
            has_biases=True,
            num_layers=1,
            dropout=0.0,
            train=self.training,
            bidirectional=False,
            batch_first=True,
        )
        return outputs

    def _lstm_arrays(self) -> list[Tensor]:
        """The LSTM's arrays for PyTorch, which needs a second bias; it is 0 here."""
        bias = self._array("lstm.bias")
        return [self._array("lstm.weight_ih"), self._array("lstm.weight_hh"), bias, torch.zeros_like(bias)]

    def _logits(self, merged: Tensor) -> Tensor:
        x = F.relu_(F.linear(merged, *self._layer("merge")))
        return F.linear(x, *self._layer("words")).float()

    def _tensor(self, array: np.ndarray) -> Tensor:
        """A tensor on the model's device, sharing memory if possible. PyTorch rejects read-only arrays, such as memory
        maps."""
        return torch.from_numpy(np.require(array, requirements=("C", "W"))).to(self._array("embedding.weight").device)

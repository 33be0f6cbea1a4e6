"""The captioning model in PyTorch: the layers of `captioner.py`."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hvdtrain.models.captioner import CONVOLUTIONS, PAD, PADDING, STRIDE, CaptionerSpec, parameters, rows
from hvdtrain.models.layers_torch import Named, dropped


class CaptionerTorch(Named):
    """The model of `spec`: see `layers_torch.Named`. With `part` it is those layers (`captioner.layers`) alone."""

    def __init__(self, spec: CaptionerSpec, part: range | None = None) -> None:
        super().__init__(parameters(spec, part))
        self.spec = spec
        known = {"encoder": self._seen, "image": self._encoded, "lstm": self._merged, "words": self._said}
        layers = [known[name] for name in rows(spec)]
        self._layers = [layers[number] for number in part or range(len(layers))]

    def forward(self, inputs: Tensor, tokens: Tensor, key: Tensor) -> Any:
        """Logits (words, vocabulary) float32 and targets (words,) of every word to be said, caption after caption; of a
        part without the last layer, what its layers make of what those before made.

        inputs: (N, height, width, 3) uint8, or (N, features) float32; tokens (N, T + 1) int64: start, words, end,
        padding; key (2,) int64, from which dropout draws in training: equal keys, equal masks.
        """
        x, drawn = inputs, key if self.training and self.spec.dropout else None
        for layer in self._layers:
            x = layer(x, tokens, drawn)
        return x

    def loss(self, inputs: Tensor, tokens: Tensor, key: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum of the cross-entropies of all words to be said (padding aside), and how many were the likeliest one."""
        logits, targets = self(inputs, tokens, key)
        return F.cross_entropy(logits, targets, reduction="sum"), {"correct": (logits.argmax(1) == targets).sum()}

    @torch.inference_mode()
    def encode(self, inputs: np.ndarray) -> np.ndarray:
        """The encoded pictures (N, hidden) float32, without dropout; inputs as in `forward`."""
        if self.spec.encoder == "none":
            return np.zeros((len(inputs), self.spec.hidden), np.float32)
        x = tokens = self._tensor(inputs)
        for layer in self._layers[:-2]:
            x = layer(x, tokens, None)
        return cast(np.ndarray, x.float().cpu().numpy())

    @torch.inference_mode()
    def step(
        self, encoded: np.ndarray, words: np.ndarray, hidden: np.ndarray, cell: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """One word on, without dropout: log-probabilities (N, vocabulary) of the next word, and the LSTM's new state.

        encoded (N, hidden) of `encode`; words (N,) int64, the last ones said; hidden and cell (N, hidden), zeros before
        the first word. All but words float32.
        """
        picture, last, h, c = (self._tensor(array) for array in (encoded, words, hidden, cell))
        embedded = F.embedding(last, self._array("embedding.weight"))
        h, c = torch.lstm_cell(embedded, (h, c), *self._lstm_arrays())
        chances = F.log_softmax(self._logits(h + picture), dim=1)
        return chances.cpu().numpy(), h.cpu().numpy(), c.cpu().numpy()

    # The layers: each takes what the one before made, tokens, and the key if something is to be dropped.

    def _seen(self, pictures: Tensor, tokens: Tensor, key: Tensor | None) -> Tensor:
        """(N, values) of the small encoder."""
        x = pictures.permute(0, 3, 1, 2).float().div_(255)  # a view first: channels-last in memory
        for number in range(1, len(CONVOLUTIONS) + 1):
            x = F.relu_(F.conv2d(x, *self._layer(f"encoder.conv{number}"), STRIDE, PADDING))
        return x.permute(0, 2, 3, 1).flatten(1)

    def _encoded(self, x: Tensor, tokens: Tensor, key: Tensor | None) -> Tensor:
        """(N, hidden) of a picture's values."""
        return F.relu_(F.linear(dropped(x, self.spec.dropout, key), *self._layer("image")))

    def _merged(self, picture: Tensor, tokens: Tensor, key: Tensor | None) -> Tensor:
        """(N, T, hidden): what was read up to each word, and the encoded picture if there is one."""
        embedded = F.embedding(tokens[:, :-1], self._array("embedding.weight"))
        read = self._read(dropped(embedded, self.spec.dropout, None if key is None else key + 1))
        return read if self.spec.encoder == "none" else read + picture.unsqueeze(1)

    def _said(self, merged: Tensor, tokens: Tensor, key: Tensor | None) -> tuple[Tensor, Tensor]:
        """What `forward` returns."""
        targets = tokens[:, 1:]
        said = targets != PAD  # the widest layer is for these only
        return self._logits(merged[said]), targets[said]

    def _read(self, embedded: Tensor) -> Tensor:
        """What the LSTM makes of the words so far, (N, T, hidden), at each of their positions."""
        device = embedded.device.type
        arrays = self._lstm_arrays()
        if torch.is_autocast_enabled(device):  # which knows the LSTM on GPUs only
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
        """As PyTorch wants them: with a second bias, which is 0 here."""
        bias = self._array("lstm.bias")
        return [self._array("lstm.weight_ih"), self._array("lstm.weight_hh"), bias, torch.zeros_like(bias)]

    def _logits(self, merged: Tensor) -> Tensor:
        x = F.relu_(F.linear(merged, *self._layer("merge")))
        return F.linear(x, *self._layer("words")).float()

    def _tensor(self, array: np.ndarray) -> Tensor:
        """On the model's device; shares memory where it can. PyTorch takes no read-only arrays, such as memory maps."""
        return torch.from_numpy(np.require(array, requirements=("C", "W"))).to(self._array("embedding.weight").device)

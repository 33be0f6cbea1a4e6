"""ResNet-34 in TensorFlow: follows the plan of `resnet.py` with native operations, which are faster than Keras 3."""

from __future__ import annotations

import functools
from collections.abc import Callable

import tensorflow as tf

from hvdtrain.models import resnet
from hvdtrain.models.layers_tf import Held, Scope, convolved, padded, variable
from hvdtrain.models.resnet import Block, ConvNorm, ResNetSpec

Layer = Callable[[tf.Tensor, bool], tf.Tensor]


class ResNetTF(Held):
    """The network of `spec`: see `layers_tf.Held`. `buffers` are the running statistics, which each rank has
    separately: variables like `weights`, always float32."""

    def __init__(
        self, spec: ResNetSpec, compute_dtype: tf.DType = tf.float32, scope: Scope = None, stage: range | None = None
    ) -> None:
        """`stage`: only these layers (`resnet.layers`)."""
        super().__init__(resnet.parameters(spec, stage), compute_dtype, scope)
        network = resnet.plan(spec)
        shapes = resnet.buffers(spec, stage)
        self.buffers = {name: variable(name, shape, trainable=False) for name, shape in shapes.items()}
        self.statistics = dict.fromkeys(self.buffers, resnet.NORM_MOMENTUM)
        blocks = [functools.partial(self._block, block) for block in network.blocks.values()]
        layers: list[Layer] = [functools.partial(self._stem, network.stem), *blocks, self._head]
        self._layers = [layers[number] for number in stage or range(len(layers))]

    def __call__(self, images: tf.Tensor, *_: tf.Tensor, training: bool) -> tf.Tensor:
        """Logits (N, classes) float32 of images (N, H, W, channels); for a stage, its output for the previous stage's
        output. `training` updates the running statistics."""
        x = tf.cast(images, self.compute_dtype)
        for layer in self._layers:
            x = layer(x, training)
        return tf.cast(x, tf.float32)

    def loss(self, images: tf.Tensor, labels: tf.Tensor, training: bool) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """Sum of the cross-entropies, and the number of correctly classified images; labels (N,) int64."""
        logits = self(images, training=training)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        return tf.reduce_sum(losses), {"correct": tf.math.count_nonzero(tf.argmax(logits, 1) == labels)}

    def _stem(self, layer: ConvNorm, x: tf.Tensor, training: bool) -> tf.Tensor:
        x = tf.nn.relu(self._conv_norm(layer, x, training))
        x = padded(x, resnet.POOL_SIZE // 2)  # zeros are never larger than outputs of a ReLU
        return tf.nn.max_pool2d(x, resnet.POOL_SIZE, resnet.POOL_STRIDE, "VALID")

    def _block(self, block: Block, x: tf.Tensor, training: bool) -> tf.Tensor:
        shortcut = self._conv_norm(block.shortcut, x, training) if block.shortcut else x
        x = tf.nn.relu(self._conv_norm(block.first, x, training))
        x = self._conv_norm(block.second, x, training)
        return tf.nn.relu(x + shortcut)

    def _head(self, x: tf.Tensor, training: bool) -> tf.Tensor:
        features = tf.reduce_mean(tf.cast(x, tf.float32), (1, 2))
        return tf.matmul(features, self.weights["fc.weight"], transpose_b=True) + self.weights["fc.bias"]

    def _conv_norm(self, layer: ConvNorm, x: tf.Tensor, training: bool) -> tf.Tensor:
        mean = self.buffers[f"{layer.norm}.running_mean"]
        variance = self.buffers[f"{layer.norm}.running_var"]
        result = tf.raw_ops.FusedBatchNormV3(
            x=convolved(x, self._array(f"{layer.conv}.weight"), layer.stride),
            scale=self.weights[f"{layer.norm}.weight"],
            offset=self.weights[f"{layer.norm}.bias"],
            mean=mean,
            variance=variance,
            epsilon=resnet.NORM_EPSILON,
            exponential_avg_factor=resnet.NORM_MOMENTUM,
            is_training=training,
        )
        if training:
            mean.assign(result.batch_mean)
            variance.assign(result.batch_variance)
        return result.y

"""`import hvdtrain.tensorflow.keras as hvd` in place of `import horovod.tensorflow.keras as hvd`: see `hvdtrain.keras`.

TensorFlow's Keras is Keras 3.
"""

from horovod.tensorflow.keras import *  # noqa: F403

from hvdtrain.keras import *  # noqa: F403

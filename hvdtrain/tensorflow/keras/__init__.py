"""`import hvdtrain.tensorflow.keras as hvd` in place of `import horovod.tensorflow.keras as hvd`: see `hvdtrain.keras`.

TensorFlow's Keras is Keras 3.
"""

from hvdtrain.keras import *  # noqa: F403
from hvdtrain.keras import __getattr__ as __getattr__
from hvdtrain.tensorflow.api import ProcessSet as ProcessSet
from hvdtrain.tensorflow.api import add_process_set as add_process_set
from hvdtrain.tensorflow.api import remove_process_set as remove_process_set

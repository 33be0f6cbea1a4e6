"""`import hvdtrain.tensorflow.keras as hvd` in place of `import horovod.tensorflow.keras as hvd`: see `hvdtrain.keras`.

TensorFlow's Keras is Keras 3.
"""

from horovod.tensorflow.keras import *  # noqa: F403

from hvdtrain.keras import DistributedOptimizer as DistributedOptimizer
from hvdtrain.keras import allgather as allgather
from hvdtrain.keras import allreduce as allreduce
from hvdtrain.keras import broadcast as broadcast
from hvdtrain.keras import broadcast_global_variables as broadcast_global_variables
from hvdtrain.keras import callbacks as callbacks
from hvdtrain.keras import elastic as elastic
from hvdtrain.keras import init as init
from hvdtrain.keras import load_model as load_model
from hvdtrain.keras import log as log
from hvdtrain.keras import reducescatter as reducescatter
from hvdtrain.keras import shutdown as shutdown

"""Horovod's functions for TensorFlow, without hvdtrain's strategies."""

from typing import Any

from hvdtrain.horovod_api.functions import Adasum as Adasum
from hvdtrain.horovod_api.functions import Average as Average
from hvdtrain.horovod_api.functions import Max as Max
from hvdtrain.horovod_api.functions import Min as Min
from hvdtrain.horovod_api.functions import Product as Product
from hvdtrain.horovod_api.functions import Sum as Sum
from hvdtrain.horovod_api.process_sets import ProcessSet as ProcessSet
from hvdtrain.horovod_api.process_sets import add_process_set as add_process_set
from hvdtrain.horovod_api.process_sets import global_process_set as global_process_set
from hvdtrain.horovod_api.process_sets import remove_process_set as remove_process_set
from hvdtrain.tensorflow.calling import DistributedGradientTape as DistributedGradientTape
from hvdtrain.tensorflow.calling import DistributedOptimizer as DistributedOptimizer
from hvdtrain.tensorflow.collectives import *  # noqa: F403
from hvdtrain.tensorflow.collectives import FRONT


def __getattr__(name: str) -> Any:
    """What Horovod has besides, if it is installed. Raises AttributeError."""
    return FRONT.get(name)

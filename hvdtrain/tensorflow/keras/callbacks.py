"""See `hvdtrain.keras.callbacks`."""

from hvdtrain.keras.callbacks import *  # noqa: F403

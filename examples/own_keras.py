"""A Keras script of one's own on several ranks: `mpirun -np 2 python examples/own_keras.py`.

HVDTRAIN_STRATEGY, as in `HVDTRAIN_STRATEGY=local-sgd:every=4+powersgd:rank=2`, says what the ranks exchange.
"""

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import hvdtrain.tensorflow.keras as hvd

hvd.init()
keras.utils.set_random_seed(1)
images, labels = load_digits(return_X_y=True)
x, test_x, y, test_y = train_test_split(images / 16, labels, test_size=360, random_state=1)
x, y = x[: len(x) // hvd.size() * hvd.size()], y[: len(y) // hvd.size() * hvd.size()]  # as many steps on each rank

model = keras.Sequential(
    [keras.layers.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10, activation="softmax")]
)
optimizer = keras.optimizers.SGD(0.1 * hvd.size(), momentum=0.9)
model.compile(hvd.DistributedOptimizer(optimizer), "sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(
    x[hvd.rank() :: hvd.size()],
    y[hvd.rank() :: hvd.size()],
    batch_size=32,
    epochs=8,
    callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(0.1 * hvd.size(), warmup_epochs=2),
    ],
    verbose=2 if hvd.rank() == 0 else 0,
)
if hvd.rank() == 0:
    loss, accuracy = model.evaluate(test_x, test_y, verbose=0)
    hvd.log(test_accuracy=accuracy)
    print(f"test accuracy {accuracy:.3f} on {len(test_y)} digits, {hvd.size()} ranks")
    assert accuracy > 0.9
hvd.shutdown()

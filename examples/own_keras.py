"""A Keras script on several ranks: `mpirun -np 2 python examples/own_keras.py`.

HVDTRAIN_STRATEGY selects the strategy, for example `HVDTRAIN_STRATEGY=balanced`.
"""

import keras

import hvdtrain.data
import hvdtrain.tensorflow.keras as hvd

hvd.init()
keras.utils.set_random_seed(1)
digits = hvdtrain.data.load("digits", (8, 8))
x, y = digits.train.samples.reshape(-1, 64), digits.train.labels
test_x, test_y = digits.test.samples.reshape(-1, 64), digits.test.labels
count = len(x) // hvd.size() * hvd.size()  # the same number of steps on each rank

model = keras.Sequential(
    [keras.layers.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10, activation="softmax")]
)
optimizer = keras.optimizers.SGD(0.1 * hvd.size(), momentum=0.9)
model.compile(hvd.DistributedOptimizer(optimizer), "sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(
    x[hvd.rank() : count : hvd.size()],
    y[hvd.rank() : count : hvd.size()],
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

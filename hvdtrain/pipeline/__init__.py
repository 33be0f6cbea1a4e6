"""Pipeline parallelism, alone or combined with data parallelism: a model is partitioned into stages on different ranks.

    rank 0    rank 1    rank 2
    stem      layer2.1  layer3.3      The samples of a step go through the pipeline in micro-batches,
    ..        ..        ..            so that all stages compute at the same time.
    layer2.0  layer3.2  fc
       ^--------^---------^           Activations go to the next stage, their gradients come back.

The ranks form a `mesh` with two axes: the stages of a replica of the model, and the replicas of a stage, which exchange
gradients with any strategy. `partition` chooses the layers of each stage. `schedule` defines the order in which a stage
computes and sends. Data loader, evaluation and strategy see only the replicas.

Huang et al., "GPipe", 2019 (arXiv:1811.06965): micro-batches; Narayanan et al., "PipeDream", 2019 (doi
10.1145/3341301.3359646) and "Memory-efficient pipeline-parallel DNN training", 2021: one forward, one backward.
"""

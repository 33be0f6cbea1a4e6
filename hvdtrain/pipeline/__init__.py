"""A model cut into stages, each on ranks of its own: pipeline parallelism, alone or with data parallelism.

    rank 0    rank 1    rank 2
    stem      layer2.1  layer3.3      a pipeline: a step's samples go through it in micro-batches, so that all stages
    ..        ..        ..            compute at the same time
    layer2.0  layer3.2  fc
       ^--------^---------^           activations go to the next stage, their gradients come back

Ranks are a grid of two axes (`grid`): along `stage` lies a pipeline, along `data` lie the replicas of one stage, which
exchange their gradients by any strategy. `cut` chooses which layers are a stage, `pipe` says in which order a stage
goes forward and backward, and what it sends when. Only `data` is seen by loader, evaluation and strategy.

Huang et al., "GPipe", 2019 (arXiv:1811.06965): micro-batches; Narayanan et al., "PipeDream", 2019 (doi
10.1145/3341301.3359646) and "Memory-efficient pipeline-parallel DNN training", 2021: one forward, one backward.
"""

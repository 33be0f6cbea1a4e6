"""Image captioning: data, generation of captions, and scores. The workload is `hvdtrain.captioning`.

`load` opens a data set by name: drawn scenes (`shapes`), or a folder that `prepare` makes from the formats that
`sources` reads, and that `prepared` opens. `dataset` holds images and sentences as arrays, `vocabulary` numbers the
words. `features` computes the outputs of a frozen encoder (`frozen`) once, on all ranks. `generation` writes captions
with a model, and `bleu` scores them. `command` captions images with a model that `trained` loads from a run.
"""

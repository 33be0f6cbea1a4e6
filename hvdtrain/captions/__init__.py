"""Captions for pictures: the workload's data, the writing of captions, and what they score.

`dataset` is pictures with sentences as arrays and `vocabulary` numbers their words; `load` finds a data set by name:
drawn scenes (`shapes`), or a folder that `prepare` makes of the formats that `sources` reads and `prepared` opens.
`features` are what the encoder that is not trained (`frozen`) sees, computed once by all ranks. `generation` writes
captions with a model, `bleu` scores them. `command` captions pictures with a run that `trained` opens, and
`contact_sheet` is the page it makes of them. The workload itself is `hvdtrain.captioning`.
"""

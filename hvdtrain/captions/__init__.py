"""Image captioning: data, generation of captions, and scores. The workload is `hvdtrain.captioning`."""

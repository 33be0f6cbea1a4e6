"""A user's own script as a rank of a job: who is here, Horovod's calls over our streams, its run folder."""

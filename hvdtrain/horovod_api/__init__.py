"""The core of hvdtrain.torch, .tensorflow and .keras: ranks, Horovod's calls over TCP, and a script's run folder."""

"""The libraries that move data between ranks: Horovod, the frameworks' own collectives, and hvdtrain's TCP backend."""

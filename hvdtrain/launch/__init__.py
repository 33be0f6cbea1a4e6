"""Starts a job's ranks with settings that suit the network, and stays with them until the job has ended."""

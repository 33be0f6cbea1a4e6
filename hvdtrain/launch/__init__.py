"""Start a job's ranks with settings that suit the network, and supervise the job until it ends."""

"""Files, processes, networks and hosts of this machine. Standard library only, so that it also runs under sudo."""

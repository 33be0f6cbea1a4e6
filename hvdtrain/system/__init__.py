"""Files, processes, networks and hosts of this machine. Standard library only, so that it runs under sudo."""

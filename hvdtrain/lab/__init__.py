"""Virtual hosts and slow links on this machine."""

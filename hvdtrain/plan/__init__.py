"""Predicts the time of a training step for other hosts, links and strategies, before any of them is used.

- `profile` measures one host: computation, readiness of gradients, delays. `observe` runs a workload or a script
  until its profile is known, and `steps` times the steps that a script makes itself. `pilot` trains for some seconds to
  see what larger batches cost.
- `coding` measures what reducers cost the processor.
- `network` describes links between hosts, in TCP payload; `probe` measures the links of real hosts over ssh.
- `simulation` simulates computation, coding and links of all hosts.
- `prediction` turns a profile, hosts and a strategy into a prediction, whose `interval` follows from recorded errors.
- `learning` holds recorded effects of each strategy on accuracy and on the number of steps.
- `choice` implements `--strategy auto`.
- `recorded` uses a recorded run as the profile, and `advice` says after a run what would have been faster.
- `report` makes the tables and the advice of the command `hvdtrain plan`, which is in `command`.
"""

"""Trained models of runs: their arrays (`trained`), their meaning by workload (`runs`), and `hvdtrain predict`."""

"""`hvdtrain results report`: one HTML page about a set of runs."""

"""Predicts the time of a training step for other hosts, links and strategies, before any of them is used.

profile      measures one host: computation, readiness of gradients, cost of coding
network      links between hosts, in TCP payload
simulation   simulates computation, coding and links of all hosts
prediction   turns a profile, hosts and a strategy into a prediction
learning     recorded effects of each strategy on accuracy and on the number of steps
choice       --strategy auto
recorded     a recorded run as the profile
report       tables, advice and the figure
command      `hvdtrain plan`
"""

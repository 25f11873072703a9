"""Predicts the time of a dispatch and a combine in a group of any size, without GPUs.

    python -m uccl_ep_train.planner --sweep --ep 64 128 256 --domain-size 8 72   # --picture FILE.png
    python -m uccl_ep_train.planner --fit bench                                  # every error of a fit

shape.py      the group, the model and its routing: rows and pairs between ranks
machine.py    rates and times of a kind of node, each with its source
protocol.py   what the native layout gives: memory, windows, chunks
clock.py      simulated and real time, of the model alone: engines read the host's clock
events.py     the event model; ports and turns are in ports.py, streams in streams.py, costs in costs.py
fit.py        rates from the repository's measurements
traces.py     rates of post, wire, NIC and relay, each by itself
published.py  a closed form for what others published
accuracy.py   errors of both
report.py     text, tables and pictures

It knows rows and bytes: exact under uniform routing with groups, drawn with skew, or of a router's trace. It
knows memory and windows of the native layout, and rates of SMs, NVLink, NICs, proxies and polling.

Accuracy: 18 rates of kernels, and one of each of five hosts, are fitted on 24 measured rows of 2 and 4
GPUs. 227 other rows are predicted with a mean error of 3.0 %, median 1.7 %, largest 15 %. Of these, 66 go
in 2 to 19 windows (of today's layout): mean 1.9 %, largest 8 %; without overlap 4.1 % and 28 %. The model's
structure, which rows are fitted, and what rates start from, were chosen with all rows in sight. With other
rows fitted the largest error is 15 to 35 %.

A small new plan whose counts the host reads takes as long as the host, 16 to 69 µs behind the counts. With
one rate for all hosts some rows are above 20 %, whatever it is. It differs between jobs of a machine, too:
one call took 74, 107 and 108 µs in three of them. No model that does not know the job can tell these apart.

For 39 published rows of UCCL-EP and DeepEP V1 (bench/published.json), a closed form with four rates is fitted
with each number of ranks left out in turn: median 3.3 %, mean 5.3 %, 90 % within 15 %. Three rows take no
part; the file says why.

Rows of 7b66ab8 in h200_x1_domain_windows.json came later; nothing is fitted to them. 19, of which 11 in 2
to 19 windows between domains, are predicted within 9 %. Where two windows send less than 16 MB, or memory
is 80 MiB or less, operations took up to 2.3 times as long as predicted. A report says where they send so
little.

It cannot know what no row shows: groups of more than 4 ranks (extrapolated), NICs (emulated only), loss,
congestion, kernels of B200 and MI300X, other numbers of SMs, serial work that grows with ranks.
"""

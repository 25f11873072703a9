"""Predicts the time of a dispatch and a combine in a group of any size, without GPUs.

    python -m uccl_ep_train.planner --sweep --ep 64 128 256 --domain-size 8 72   # --picture FILE.png
    python -m uccl_ep_train.planner --fit bench                                  # every error of a fit

shape.py      the group, the model and its routing: rows and pairs between ranks
machine.py    rates and times of a kind of node, each with its source
protocol.py   what the native layout gives: memory, windows, chunks
clock.py      simulated and real time
events.py     the event model
fit.py        rates from the repository's measurements
traces.py     rates of post, wire, NIC and relay, each by itself
published.py  a closed form for what others published
accuracy.py   errors of both
report.py     text, tables and pictures

It knows rows and bytes: exact under uniform routing with groups, drawn with skew, or of a router's trace. It
knows memory and windows of the native layout, and rates of SMs, NVLink, NICs, proxies and polling.

Accuracy: 17 rates are fitted on 24 measured rows of 2 and 4 GPUs, T = 128 and 4096. 149 other rows are
predicted with a mean error of 4.6 %, median 2.8 %; 95 % of them are within 15 %. Four are above 20 %, up to
32 %: new plans of 128 tokens, where the host's time differs between runs. The model's structure, and what
rates start from, were chosen with all rows in sight.

For 39 published rows of UCCL-EP and DeepEP V1 (bench/published.json), a closed form with four rates is fitted
with each number of ranks left out in turn: median 3.3 %, mean 5.3 %, 90 % within 15 %. Three rows take no
part; the file says why.

It cannot know what no row shows: groups of more than 4 ranks (extrapolated), NICs (emulated only), loss,
congestion, kernels of B200 and MI300X, other numbers of SMs, serial work that grows with ranks.
Rows in windows were measured when each window was a kernel. One kernel does all now, so its fixed time counts
once; that windows overlap is not modelled.
"""

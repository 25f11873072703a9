"""What a run shows: losses, times, rows that crossed domains, differences of runs."""

"""Figures of pages are those of result files and of tables."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
OF_README = ("one_domain_24_sms", "backward_24_sms", "forward_backward")
ROUNDING_US = 1.0


def records(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())
    return found


def ours() -> list[float]:
    """Medians of `uccl_ep` with 24 SMs in the files of README's table, microseconds."""
    every = [record for name in OF_README for record in records(f"h200_x4_{name}")]
    return [r["median_us"] for r in every if r["system"].startswith("uccl_ep") and r["num_sms"] == 24]


def figures() -> list[float]:
    """The second column of README's table."""
    lines = README.split("| operation | `uccl_ep` |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    cells = [line.split("|")[2] for line in lines]
    return [float(number.replace(",", "")) for cell in cells for number in re.findall(r"[\d,]+", cell)]


def measured(figure: float) -> bool:
    return any(abs(figure - median) <= ROUNDING_US for median in ours())


def test_readme_s_times_were_measured_at_the_commits_that_it_names() -> None:
    assert len(figures()) == 9 and all(map(measured, figures())), [x for x in figures() if not measured(x)]
    commits = {record["commit"][:7] for name in OF_README for record in records(f"h200_x4_{name}")}
    assert commits == set(re.findall(r"commits (\w{7}) and (\w{7})", README)[0])
    assert not measured(1.0) and not measured(280.5 / 2), "control"


def test_readme_s_share_of_a_link_is_that_of_the_table() -> None:
    page = (ROOT / "docs" / "performance.md").read_text().split("## Between domains", 1)[1]
    lines = [line for line in page.split("\n\n16 ranks", 1)[0].splitlines() if line.startswith("|")]
    shares = [float(share) for line in lines for share in re.findall(r"\b0\.\d{3}\b", line)]
    least, most = re.findall(r"reaches (\d+) to (\d+) % of the link", README)[0]
    assert len(shares) == 18 and (round(100 * min(shares)), round(100 * max(shares))) == (
        int(least),
        int(most),
    )


def test_the_growth_that_the_page_of_benchmarks_states_is_the_file_s() -> None:
    page = (ROOT / "bench" / "README.md").read_text()
    for record in records("growth"):
        operation = record["op"].removeprefix("growth of ")
        assert f"{operation} {record['exponent']:.2f}" in page
    rates = [r["commands_per_s"] / 1e6 for r in records("posting_rate") if r["threads"] == 1]
    assert f"ships {min(rates):.1f} to {max(rates):.1f} million" in page


def test_what_trials_took_less_than_estimated_is_that_of_the_table() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text()
    pairs = re.findall(r"\| ([\d.]+) / ([\d.]+) GiB \|", page)
    less = [round(100 * (1 - float(took) / float(estimated))) for took, estimated in pairs]
    assert len(less) == 5 and f"Five trials took {min(less)} to {max(less)} % less" in page

"""The comparison of two versions' steps: ratios within a round, medians over rounds."""

from __future__ import annotations

from overhead_between import write_report

KEY = ("auto", "greedy", 1)


def test_ratios_are_taken_within_a_round_so_that_a_machine_that_slows_down_is_no_change() -> None:
    rounds = [
        [{KEY: (1.0, 10.0)}, {KEY: (1.0, 11.0)}],
        [{KEY: (3.0, 30.0)}, {KEY: (3.0, 30.0), ("off", "x", 2): (1, 1)}],
    ]
    (row,) = (line for line in write_report(["aaa", "bbb"], rounds).splitlines() if line.startswith("| auto"))
    assert row == "| auto | greedy | 1 | 2.00 | 2.00 | 1.00 [1.00, 1.00] | 20.00 | 20.50 | 1.05 [1.00, 1.10] |"

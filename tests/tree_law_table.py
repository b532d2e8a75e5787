"""`python tests/tree_law_table.py` prints the chi-square of every game with trees."""

from __future__ import annotations

import torch
from tree_laws import tree_cases


def main() -> None:
    torch.set_num_threads(1)
    print(f"{'case':34} {'texts':>6} {'accepted':>9} {'chi2':>7} {'dof':>4} {'p-value':>8}")
    for name, case in tree_cases().items():
        games = case.play()
        found = case.check(games)
        accepted = sum(games.num_accepted) / len(games.num_accepted)
        print(
            f"{name:34} {found.num_draws:6} {accepted:9.2f} {found.statistic:7.1f} "
            f"{found.degrees:4} {found.odds:8.2g}{'' if found.holds else '  FAILS'}"
        )


if __name__ == "__main__":
    main()

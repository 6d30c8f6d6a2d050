"""The table on top of the README says what the kept runs say."""

import json
import re
from pathlib import Path

from recipes.comparison import headline
from recipes.comparison.paired_statistics import estimate

ROOT = Path(__file__).resolve().parents[3]
ROWS = {  # how the README's rows begin
    "shipped-block-muon": "**`BlockMuon`**",
    "shipped-muon": "`torch.optim.Muon`",
    "shipped-block-adamw-whitened": '**`BlockAdamW(second_moment="whitened")`**',
    "adamw-groups": "`torch.optim.AdamW`, learning rates",
    "shipped-block-sgd+newton": "**`BlockSGD`** with `BlockLR`",
    "shipped-adamw": "`torch.optim.AdamW`",
    "sgd": "`torch.optim.SGD` with momentum",
}


def kept() -> headline.Losses:
    path = ROOT / "recipes" / "results" / "headline.json"
    return headline.losses(json.loads(path.read_text(encoding="utf-8"))["runs"])


def test_the_readme_has_the_means_and_errors_of_the_kept_runs():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    for arm, begin in ROWS.items():
        row = next(line for line in reversed(lines) if line.startswith(f"| {begin}"))
        if arm == "shipped-adamw":
            row = next(line for line in lines if line.startswith(f"| {begin} |"))
        cells = [re.sub(r"\*", "", cell).strip() for cell in row.split("|")]
        for corpus, cell in zip(("stdlib", "linux"), cells[2:4], strict=True):
            mean, error, *_ = estimate(list(kept()[corpus][arm].values()))
            assert cell == f"{mean:.3f} ± {error:.3f}", row


def test_every_headline_arm_has_the_same_five_seeds():
    assert {tuple(seeds) for arms in kept().values() for seeds in arms.values()} == {
        (1, 2, 3, 4, 5)
    }


def test_the_picture_is_drawn_from_the_runs():
    panels = headline.draw(kept()).axes
    assert [len(panel.patches) for panel in panels] == [7, 7]

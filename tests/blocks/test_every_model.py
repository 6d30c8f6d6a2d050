"""Every model type of the pinned transformers and timm, against a table that people have read.

`python -m tests.helpers.every_model` writes the table anew; its changes are for review.
"""

import json
from importlib.metadata import version

import pytest

from tests.helpers import ROOT
from tests.helpers.every_model import SHARES, all_shares

TABLE = json.loads(SHARES.read_text())
PINNED = dict(
    line.strip().split("==") for line in (ROOT / "constraints.txt").read_text().splitlines()
)


@pytest.mark.parametrize("library", TABLE)
@pytest.mark.filterwarnings("ignore")  # those of the libraries, while models are built
def test_the_shares_of_the_roles_are_those_of_the_table(library):
    if version(library) != PINNED[library]:
        pytest.skip(f"The table is of {library} {PINNED[library]}.")
    expected, found = TABLE[library], all_shares(library)
    changed = {
        name: (expected.get(name), found.get(name))
        for name in {*expected, *found}
        if expected.get(name) != found.get(name)
    }
    assert not changed, f"{len(changed)} of {len(expected)} have changed: {changed}"


def test_the_table_is_about_many_models_few_of_which_are_refused():
    rows = [row for models in TABLE.values() for row in models.values()]
    assert len(rows) > 700
    assert sum("refused" in row for row in rows) < 30


FAMILIES = (
    *("qwen3_moe", "gpt_oss", "mixtral", "deepseek_v3", "qwen3_next", "xlnet", "squeezebert"),
    *("deberta", "deberta-v2", "longformer", "led", "blip", "codegen", "persimmon", "rwkv"),
    *("mamba", "mamba2", "jamba", "perceiver", "patchtst", "sam2", "openai-gpt", "layoutlm"),
)


@pytest.mark.parametrize("kind", FAMILIES)
def test_next_to_nothing_of_a_known_family_has_no_role(kind):
    row = TABLE["transformers"][kind]
    assert "refused" not in row
    assert row.get("other", 0) <= 5

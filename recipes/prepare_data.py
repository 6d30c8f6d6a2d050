"""Prepare tokens to train on: the source of Python's standard library, digit addition, files, or a data set of the hub.

    python recipes/prepare_data.py                                              the default, stdlib: tokenize, say what came of it
    python recipes/prepare_data.py --data addition:5                            sums of five digits
    python recipes/prepare_data.py --data corpus/ --vocab-size 4096             a folder of text, JSONL or Parquet files
    python recipes/prepare_data.py --data corpus.jsonl --text-column body       a file, its text in another column
    python recipes/prepare_data.py --data wikitext:wikitext-2-raw-v1            a data set of the Hugging Face hub
    python recipes/prepare_data.py --data HuggingFaceFW/fineweb:sample-10BT --streaming --max-tokens
    100_000_000 python recipes/prepare_data.py --help

The other scripts take the same flags, and load what is prepared at once: tokens are cached under
`~/.cache/blockopt` (or `$BLOCKOPT_CACHE`, or `--cache`), keyed by the text and the settings. Run
this first on a machine with a network, if the one that trains has none.
"""

from __future__ import annotations

import argparse
import time

from rich.console import Console
from rich.table import Table

from recipes.data.token_data import add_data_arguments, default_cache, load_from_arguments


def main() -> None:
    """Prepare data, and say what there is."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_data_arguments(parser)
    arguments = parser.parse_args()
    start = time.perf_counter()
    data = load_from_arguments(arguments)
    seconds = time.perf_counter() - start
    table = Table("", "train", "validation", title=data.name)
    table.add_row("tokens", f"{data.train.numel():,}", f"{data.validation.numel():,}")
    if data.train.ndim == 2:
        table.add_row("examples", f"{len(data.train):,}", f"{len(data.validation):,}")
    console = Console(highlight=False)
    console.print(table)
    console.print(f"vocabulary {data.vocab_size:,}; loaded in {seconds:.2f} s from", soft_wrap=True)
    console.print(
        str((arguments.cache or default_cache()) / "tokens" / data.key),
        soft_wrap=True,
        markup=False,
    )
    sample = data.train[:3] if data.train.ndim == 2 else data.train[None, :80]
    for row in sample:
        console.print(repr(data.decode(row)), soft_wrap=True, markup=False)


if __name__ == "__main__":
    main()

r"""Prepare tokens to train on: from the standard library, sums, files, or a data set of the hub.

    python recipes/prepare_data.py                                        the standard library
    python recipes/prepare_data.py --data addition:5                      sums of five digits
    python recipes/prepare_data.py --data corpus/ --vocab-size 4096       text, JSONL, Parquet files
    python recipes/prepare_data.py --data corpus.jsonl --text-column body
    python recipes/prepare_data.py --data wikitext:wikitext-2-raw-v1      from the Hugging Face hub
    python recipes/prepare_data.py --data HuggingFaceFW/fineweb:sample-10BT \
        --streaming --max-tokens 100_000_000

The other scripts take the same flags and load at once what is prepared: tokens are cached under
`~/.cache/blockopt` (or `$BLOCKOPT_CACHE`, or `--cache`), keyed by the text and the settings. If the
machine that trains has no network, run this first on one that has.
"""

from __future__ import annotations

import time

from rich.console import Console
from rich.table import Table

from recipes.common.errors import one_line_errors
from recipes.common.flags import script_parser
from recipes.data.token_data import add_data_arguments, default_cache, load_from_arguments


def main() -> None:
    """Prepare data, and say what there is."""
    parser = script_parser(__doc__)
    add_data_arguments(parser)
    arguments = parser.parse_args()
    start = time.perf_counter()
    with one_line_errors():
        data = load_from_arguments(arguments)
    seconds = time.perf_counter() - start
    table = Table("", "train", "validation", title=data.name)
    table.add_row("tokens", f"{data.train.numel():,}", f"{data.validation.numel():,}")
    if data.train.ndim == 2:
        table.add_row("examples", f"{len(data.train):,}", f"{len(data.validation):,}")
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(table)
    console.print(f"vocabulary {data.vocab_size:,}; loaded in {seconds:.2f} s from")
    console.print(str((arguments.cache or default_cache()) / "tokens" / data.key))
    sample = data.train[:3] if data.train.ndim == 2 else data.train[None, :80]
    for row in sample:
        console.print(repr(data.decode(row)))


if __name__ == "__main__":
    main()

"""From a checkpoint to its sharp heads, its flat roles, and what BlockLR does about them.

    python recipes/walk_through.py                                  trains a tiny GPT-2 first
    python recipes/walk_through.py --model path/to/checkpoint --text notes.txt

It writes one self-contained page, `report.html`, with all pictures inside: it loads nothing. Larger
models (over 10M parameters) take `--samples 16`: gradients instead of products with every head.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from recipes.common.errors import UsageError, one_line_errors
from recipes.common.files import output_folder
from recipes.common.flags import script_parser

ROOT = Path(__file__).resolve().parents[1]
# A GPT-2 of 0.04M parameters with two layers of two heads, on bytes: about a minute
TINY = ("--width", "32", "--depth", "2", "--heads", "2", "--context", "64", "--tokenizer", "bytes")


def run(*command: str) -> None:
    """Run a script of this project, and end as it does if it fails."""
    done = subprocess.run([sys.executable, *command], cwd=ROOT, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)


def main() -> None:
    """Train if there is no checkpoint, measure, and write the page."""
    parser = script_parser(__doc__)
    parser.add_argument("--model", type=Path, help="a checkpoint of transformers with a tokenizer")
    text = "a text file; the tiny model sees its own training data"
    parser.add_argument("--text", type=Path, help=text)
    parser.add_argument("--steps", type=int, default=300, help="training steps of the tiny model")
    parser.add_argument(
        "--samples",
        type=int,
        default=0,
        help="sampled gradients per batch, for large models, as in `blockopt hessian`",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("results/walk_through"), help="folder to write to"
    )
    options = parser.parse_args()
    with one_line_errors():
        if options.model is not None and options.text is None:
            raise UsageError("--model needs --text: a file of text to measure the loss on.")
        out = output_folder(options.out.resolve())
        model, words = options.model, options.text
        if words is None:
            words = out / "text.txt"
            words.write_text((ROOT / "recipes" / "README.md").read_text(encoding="utf-8"))
        if model is None:
            model = out / "run" / "model"
            steps = ("--steps", str(options.steps), "--output", str(out / "run"))
            run("recipes/train.py", *TINY, *steps, "--data", str(words.resolve()))
        size = ("--sequences", "2", "--length", "64", "--by", "head", "--matrix", "gauss-newton")
        samples = ("--samples", str(options.samples)) if options.samples else ()
        given = (str(model.resolve()), "--text", str(words.resolve()), "--out", str(out))
        run("-m", "blockopt", "hessian", *given, *size, *samples)
    print(f"Open {out / 'report.html'}")


if __name__ == "__main__":
    main()

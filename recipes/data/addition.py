"""Digit addition as next-token prediction, the data of the ICLR 2025 paper (Appendix F).

The format is that of Quirke and Barez, "Understanding Addition in Transformers" (ICLR 2024): two
numbers of n digits, and a sum of n + 1 digits with leading zeros,

    12345+67890=080235        n + 1 + n + 1 + (n + 1) = 3 n + 3 tokens

Every token but the last is an input and every token but the first a target, 3 n + 2 of each: L = 17
for 5 digits, as in the paper. As in Quirke and Barez, only the digits of the sum count in the loss:
nobody can predict the others. (They also draw some digits again, so that carries over several
digits are less rare; here all digits are uniform.)
"""

from __future__ import annotations

import torch
from torch import Tensor

VOCABULARY = "0123456789+="
PLUS, EQUALS = 10, 11
IGNORED = -100  # what `F.cross_entropy` leaves out


def addition(
    number: int = 64,
    digits: int = 5,
    *,
    answers_only: bool = True,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of random sums, (number, 3 digits + 2) each.

    Args:
        number: How many sums.
        digits: Digits of each summand.
        answers_only: Whether targets other than digits of the sum are `IGNORED`.
        generator: Draws the digits; by default one with seed 0.

    Example:
        >>> inputs, targets = addition(1, 2)
        >>> inputs.shape, targets[0, :4].tolist()
        (torch.Size([1, 8]), [-100, -100, -100, -100])
    """
    if number < 1 or digits < 1:
        raise ValueError(f"Invalid number={number}, digits={digits}. Both must be integers >= 1.")
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    summands = torch.randint(10, (2, number, digits), generator=generator)
    powers = 10 ** torch.arange(digits, -1, -1)
    total = (summands.sum(0) * powers[1:]).sum(-1)
    answer = total[:, None] // powers % 10
    sign = torch.ones(number, 1, dtype=torch.long)
    tokens = torch.cat([summands[0], PLUS * sign, summands[1], EQUALS * sign, answer], dim=1)
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    if answers_only:
        targets[:, : 2 * digits + 1] = IGNORED
    return inputs, targets


def decode(tokens: Tensor) -> str:
    """Return a row of tokens as text.

    Example:
        >>> decode(torch.tensor([1, 10, 2, 11, 0, 3]))
        '1+2=03'
    """
    return "".join(VOCABULARY[token] for token in tokens.tolist())

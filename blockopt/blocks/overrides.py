"""What a user says about parameters whose blocks cannot be told, and how we ask for it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase

from blockopt.blocks.blocks import ROLES, Blocks
from blockopt.blocks.layouts import Ambiguity
from blockopt.blocks.split import Split

Shapes = dict[str, tuple[int, ...]]
EXAMPLE_HELPS = (
    " Or pass example=batch, what the model is called with, to see it in one forward pass."
)


def match_overrides(overrides: Mapping[str, Blocks | str], shapes: Shapes) -> dict[str, Blocks]:
    """Return `{parameter name: Blocks}` for the names that each pattern matches; later ones win.

    Raises:
        ValueError: If a pattern matches no trainable parameter, or its blocks do not fit a shape.
    """
    chosen: dict[str, Blocks] = {}
    for pattern, value in overrides.items():
        matched = [name for name in shapes if fnmatchcase(name, pattern)]
        if not matched:
            raise ValueError(
                f"Invalid overrides key {pattern!r}: it matches no trainable parameter, such as "
                f"{next(iter(shapes), None)!r}."
            )
        for name in matched:
            blocks = Blocks((value,)) if isinstance(value, str) else Blocks(*value)
            try:
                blocks.check(shapes[name])
            except ValueError as error:
                raise ValueError(
                    f"Invalid overrides[{pattern!r}] for {name!r} of shape {shapes[name]}: {error}"
                ) from None
            chosen[name] = blocks
    return chosen


def parse_override(text: str) -> tuple[str, Blocks]:
    """Read `NAME=ROLE`, or `NAME=ROLE+ROLE:dim/sizes/parts/repeat/stack`, as commands take it.

    Args:
        text: A name or pattern, and a role. Several roles are joined by `+`, and need a split: the
            dimension, the sizes and the parts of the sections, joined by `+` as well, how often
            they recur, and how many matrices the parameter stacks (1 if left out).

    Raises:
        ValueError: If the text has another form, or names a role that there is not.

    Example:
        >>> parse_override("h.*.attn.weight=query+key:0/64+64/4+4")
        ('h.*.attn.weight', Blocks(roles=('query', 'key'), layer=None, split=Split(dim=0, sizes=(64, 64), parts=(4, 4))))
    """  # noqa: E501
    form = r"(?P<name>[^=]+)=(?P<roles>[a-z_+]+)(:(?P<dim>\d+)/(?P<sizes>[\d+]+)/(?P<parts>[\d+]+)"
    form += r"(/(?P<repeat>\d+)(/(?P<stack>\d+))?)?)?"
    found = re.fullmatch(form, text.strip())
    unknown = set(found["roles"].split("+")) - set(ROLES) if found else set()
    if found is None or unknown:
        raise ValueError(
            f"Invalid override {text!r}"
            + (f" with the role {min(unknown)!r}" if unknown else "")
            + ". Must be NAME=ROLE or NAME=ROLE+ROLE:dim/sizes/parts, such as "
            f"'h.*.qkv.weight=query+key+value:0/64+64+64/4+4+4', with roles among "
            f"{', '.join(ROLES)}."
        )
    split = None
    if found["dim"] is not None:
        sizes, parts = (tuple(map(int, found[key].split("+"))) for key in ("sizes", "parts"))
        repeat, stack = (int(found[key] or 1) for key in ("repeat", "stack"))
        split = Split(int(found["dim"]), sizes, parts, repeat, stack=stack)
    return found["name"], Blocks(tuple(found["roles"].split("+")), None, split)


def as_text(name: str, blocks: Blocks) -> str:
    """The text that `parse_override` reads as these blocks."""
    text = f"{name}={'+'.join(blocks.roles)}"
    if blocks.split is None:
        return text
    dim, sizes, parts, repeat, _, stack = blocks.split
    text += f":{dim}/{'+'.join(map(str, sizes))}/{'+'.join(map(str, parts))}"
    if stack > 1:
        return f"{text}/{repeat}/{stack}"
    return text if repeat == 1 else f"{text}/{repeat}"


class UnknownBlocksError(ValueError):
    """Parameters whose blocks cannot be told, with overrides that settle them.

    Attributes:
        overrides: `{name or pattern: Blocks}`, which fit the shapes. Whether they are right is for
            the user to say.
    """

    def __init__(
        self, unknown: Mapping[str, Ambiguity], shapes: Shapes, may_watch: bool = True
    ) -> None:
        groups: dict[tuple[str, Ambiguity], list[str]] = {}
        alike = [(pattern_of(name), ambiguity) for name, ambiguity in unknown.items()]
        several = {
            pattern for pattern, _ in alike if len({a for p, a in alike if p == pattern}) > 1
        }
        for (name, ambiguity), (pattern, _) in zip(unknown.items(), alike):
            key = pattern_of(name, 1) if pattern in several else pattern
            groups.setdefault((key, ambiguity), []).append(name)
        self.overrides: dict[str, Blocks] = {}
        lines = []
        for (pattern, ambiguity), names in groups.items():
            blocks = Blocks(ambiguity.suggestion.roles, None, ambiguity.suggestion.split)
            fitting = [name for name in shapes if fnmatchcase(name, pattern)]
            keys = [pattern] if sorted(fitting) == sorted(names) else names
            self.overrides |= dict.fromkeys(keys, blocks)
            more = f" and {len(names) - 1} like it" if len(names) > 1 else ""
            lines.append(f"  {names[0]!r} of shape {shapes[names[0]]}{more}: {ambiguity.reason}.")
        entries = "".join(f"    {k!r}: {python(b)},\n" for k, b in self.overrides.items())
        number = "a parameter" if len(unknown) == 1 else f"{len(unknown)} parameters"
        super().__init__(
            f"Cannot tell the blocks of {number}:\n" + "\n".join(lines) + "\nPass overrides={\n"
            f"{entries}}} to find_blocks, after correcting what is wrong for your model. These fit "
            "the shapes. A single role, such as 'other', makes one block."
            + (EXAMPLE_HELPS if may_watch else "")
        )

    def for_a_command(self) -> str:
        """The message, and the overrides as a command takes them."""
        flags = [f"    --override '{as_text(*entry)}'" for entry in self.overrides.items()]
        return f"{self}\nTo this command, pass\n" + " \\\n".join(flags)


def python(blocks: Blocks) -> str:
    """Blocks as a user would write them."""
    if blocks.split is None:
        return repr(blocks.roles[0])
    return f"Blocks({blocks.roles}, split={blocks.split})"


def pattern_of(name: str, indices: int | None = None) -> str:
    """The name with the indices in it replaced by `*`, so that one override serves all layers.

    Args:
        name: The name of a parameter.
        indices: How many of the indices in it to replace, the first ones first; all by default.
    """
    parts = name.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdecimal()][:indices]
    return ".".join("*" if i in numbers else part for i, part in enumerate(parts))

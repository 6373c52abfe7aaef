"""The places of keys in a TOML document, which tomlkit knows and does not tell."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tomlkit import TOMLDocument
    from tomlkit.items import Item, Key


def toml_items(document: "TOMLDocument") -> "Iterator[tuple[Key | None, Item, int, str]]":
    """What stands above the first [table]: key (None for comments and blank lines), value, offset
    and text.
    """
    import tomlkit  # only here: most configs are JSON

    # tomlkit renders a document byte for byte, so the lengths of its items add up to offsets.
    offset = 0
    for key, item in document.body:
        table = isinstance(item, (tomlkit.items.Table, tomlkit.items.AoT))
        if table and key is not None and not key.is_dotted():
            break  # no top-level key can follow a [table]
        whole = tomlkit.container.Container()
        whole.body.append((key, item))
        rendered = whole.as_string()
        yield key, item, offset, rendered
        offset += len(rendered)

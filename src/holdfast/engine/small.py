"""The small state of a rank, as it is read: its outline is checked once, so that what uses it may rely on it.

Of an optimizer's tree the outline is what the format says; what is in the other trees is for the objects that wrote them.
"""

from __future__ import annotations

from holdfast.core.documents import Fields, Json, parse
from holdfast.errors import CorruptCheckpoint


def parse_small(data: bytes, what: str) -> dict[str, Json]:
    """The document in `holdfast.state`.

    Raises:
        CorruptCheckpoint: it is none.
    """
    fields = Fields(parse(data, what), what)
    fields.get("rng", dict)
    state = fields.get("state", dict)
    Fields({"modules": {}} | state, f"{what}: state").get("modules", dict)
    for key, tree in state.items():
        if key.partition(".")[0] == "optimizer":
            _check_optimizer(Fields(tree, f"{what}: {key}"))
    return fields.document


def _check_optimizer(fields: Fields) -> None:
    if "class" in fields.document:
        fields.get("class", str)
    fields.get("values", dict)
    for i, document in enumerate(fields.get("groups", list)):
        group = Fields(document, f"{fields.what}: group {i}")
        if not all(isinstance(name, str) for name in group.get("params", list)) or "values" not in group.document:
            raise CorruptCheckpoint(f"{group.what} should have the names of its parameters, and values")

"""`mulstm corpora`: which texts go by a name."""

from __future__ import annotations

from typing import Any

from mulstm import console
from mulstm.cli._options import AsJson


def command(as_json: AsJson = False) -> None:
    """List the corpora that go by a name."""
    from mulstm.data.known import KNOWN

    rows: list[dict[str, Any]] = [
        {
            "name": known.name,
            "bytes": known.size or None,
            "about": known.about,
            "licence": known.licence,
            "protocols": {protocol.name: protocol.meaning for protocol in known.protocols},
        }
        for known in KNOWN.values()
    ]
    if as_json:
        console.result_json(rows)
        return
    texts = [[row["name"], f"{row['bytes']:,}" if row["bytes"] else "-", row["about"]] for row in rows]
    console.table(["corpus", "bytes", "what it is"], texts)
    for row in rows:
        for name, meaning in row["protocols"].items():
            console.result(f"{row['name']}, protocol {name}: {meaning}")

"""`mulstm corpora`: which texts go by a name."""

from __future__ import annotations

from mulstm.cli._options import AsJson


def command(as_json: AsJson = False) -> None:
    """List the corpora that go by a name."""
    from mulstm import console
    from mulstm.data.known import KNOWN

    rows = [
        {
            "name": known.name,
            "bytes": sum(file.size for file in known.files),
            "about": known.about,
            "licence": known.licence,
            "protocols": dict(known.protocols),
        }
        for known in KNOWN
    ]
    if as_json:
        console.result_json(rows)
        return
    texts = [[k.name, f"{sum(f.size for f in k.files):,}" if k.files else "-", k.about] for k in KNOWN]
    console.table(["corpus", "bytes", "what it is"], texts)
    for known in KNOWN:
        for name, meaning in known.protocols:
            console.result(f"{known.name}, protocol {name}: {meaning}")

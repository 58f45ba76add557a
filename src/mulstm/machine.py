"""What a run ran on: versions, kinds of machine, the commit; no names of hosts, users or folders."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from mulstm import __version__

PACKAGES = ("torch", "numpy", "triton", "safetensors")


def environment(devices: Sequence[str] = ()) -> dict[str, Any]:
    """For environment.json."""
    versions = {"mulstm": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "versions": versions,
        "system": platform.system(),
        "processor": processor(),
        "cores": cores(),
        "devices": list(devices),
        "commit": commit(),
    }


def cores() -> int | None:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def processor() -> str:
    """In its maker's words."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def commit() -> str:
    """The commit of the source tree this package runs from ("+" when changed since).

    Where there is no repository, or another one's, as in a container, MULSTM_COMMIT gives it.
    """
    here = Path(__file__).parent
    given = os.environ.get("MULSTM_COMMIT", "")
    if given or not (here.parents[1] / ".git").exists():
        return given
    try:
        described = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return described.stdout.strip()

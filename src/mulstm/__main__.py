"""`python -m mulstm` and the `mulstm` command."""

import os
import signal
from types import FrameType


def main() -> None:
    # OpenMP's threads wait for each other in a loop that keeps the core. Where other programs want the
    # cores too, a step then waits for a thread that cannot run: ten times slower was measured. Going to
    # sleep soon costs nothing on a quiet machine. It must be said before torch is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, and stays so
        signal.signal(signal.SIGINT, interrupted)
    from mulstm.cli import run

    run()


def interrupted(number: int, frame: FrameType | None) -> None:
    """Ctrl-C. While torch or numpy are imported an exception would be swallowed, or take the process down."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os._exit(128 + number)
        frame = frame.f_back
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()

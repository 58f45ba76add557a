"""`python -m mulstm` and the `mulstm` command."""

import os


def main() -> None:
    # OpenMP's threads wait for each other in a loop that keeps the core. Where other programs want the
    # cores too, a step then waits for a thread that cannot run: ten times slower was measured. Going to
    # sleep soon costs a few percent on a quiet machine. It must be said before torch is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    from mulstm.cli import run

    run()


if __name__ == "__main__":
    main()

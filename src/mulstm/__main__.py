"""`python -m mulstm` and the `mulstm` command."""


def main() -> None:
    from mulstm.cli import run

    run()


if __name__ == "__main__":
    main()

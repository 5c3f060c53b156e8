"""`python -m inlay` is the `inlay` command."""

from inlay.cli.main import main

if __name__ == "__main__":
    main()

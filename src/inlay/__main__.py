"""`python -m inlay` is the `inlay` command."""

from inlay.cli.main import main

main()

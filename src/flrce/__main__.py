"""`python -m flrce`: the command line."""

from flrce.cli.cli import main

if __name__ == "__main__":
    raise SystemExit(main())

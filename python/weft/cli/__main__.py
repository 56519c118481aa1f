"""`python -m weft.cli`: the same as the `weft` command."""

from weft.cli import main

if __name__ == "__main__":
    main()

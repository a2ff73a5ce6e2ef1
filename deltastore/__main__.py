"""``python -m deltastore`` is the `deltastore` command."""

from deltastore.cli import main

if __name__ == "__main__":
    main()

"""``python -m receiver`` is the `receiver` command."""

from receiver.cli import main

if __name__ == "__main__":
    main()

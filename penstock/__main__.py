"""``python -m penstock`` is the command ``penstock``."""

from __future__ import annotations

from penstock.cli import main

if __name__ == "__main__":
    main()

"""``python -m hypatia`` is the command ``hypatia``."""

from .tools.cli import main

if __name__ == "__main__":
    main()

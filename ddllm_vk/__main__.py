"""`python -m ddllm_vk` and the `ddllm_vk` script."""

import sys


def main() -> int:
    """Runs the command line on sys.argv; returns the exit status."""
    from .cli import run

    return run()


if __name__ == "__main__":
    sys.exit(main())

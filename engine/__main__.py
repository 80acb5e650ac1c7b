"""`python -m engine`: the command line."""

import signal
import sys
from types import FrameType

from engine.cli import main


def _terminate(number: int, frame: FrameType | None) -> None:
    """End like an interrupted program: temporary files and children go, too."""
    sys.exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _terminate)
    sys.exit(main())

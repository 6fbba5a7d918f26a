"""``python -m scio_recorder`` is the ``scio-recorder`` command."""

import sys

from scio_recorder.command_line import main

if __name__ == "__main__":
    sys.exit(main())

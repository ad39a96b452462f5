"""``python -m fxround``: run the command line."""

from __future__ import annotations

import sys

from fxround.cli import main

sys.exit(main())

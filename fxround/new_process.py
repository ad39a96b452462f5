"""Run code in a new interpreter that finds the same modules.

It has the module search path of this process, so that it imports the same fxround and the same PyTorch. A terminal's
Ctrl-C does not reach it: this process decides whether it waits for the new one, or kills it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Final

# The child sets sys.path before it imports anything of fxround's or the caller's.
_HEAD: Final = "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1))\n"


def run(
    code: str, *arguments: str, environment: Mapping[str, str] | None = None, timeout: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Python code, with ``arguments`` in ``sys.argv[1:]``, and return what it printed.

    environment: variables to set besides those of this process. timeout: in seconds; subprocess.TimeoutExpired follows.
    """
    paths = json.dumps([os.getcwd() if entry == "" else entry for entry in sys.path])
    return subprocess.run(
        [sys.executable, "-c", _HEAD + code, paths, *arguments],
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
        start_new_session=True,
        check=False,
    )

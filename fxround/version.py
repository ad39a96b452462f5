"""The version of fxround, which its exported files carry."""

from typing import Final

VERSION: Final = "0.1.0"

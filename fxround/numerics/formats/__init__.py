"""Floating-point formats: the class (``format``), one documented row each (``rows``), other spellings (``names``).

A format is a set of values: the multiples of a quantum that depends on the binade, from zero (or the minimum) to the
maximum, with or without a sign, infinities and NaNs. Precision counts the implicit bit. Encodings play no part: fxround
keeps the values of a narrow format in a wider carrier (binary32 or binary64), where each of them is exact.
``FORMATS["e4m3fn"].describe()`` says in words how a format treats ties, subnormals, minus zero and overflow.
``Format.parse(str(fmt)) == fmt`` for every format, so graphs, files and processes exchange formats as text.
"""

from fxround.numerics.formats.format import Format, Overflow, candidates, number, spelt
from fxround.numerics.formats.rows import FORMATS, TABLES

table = Format.table

__all__ = ["FORMATS", "TABLES", "Format", "Overflow", "candidates", "number", "spelt", "table"]

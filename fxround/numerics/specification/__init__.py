"""What a rounding, a scaled rounding and a fault return, over rational numbers and integers.

The modules import nothing of ``arithmetic`` or ``elementary``, directly or through others, and these import none of
them: the two share the rows of formats, the rules of modes and the definitions of faults.
"""

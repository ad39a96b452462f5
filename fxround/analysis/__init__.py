"""Analysis: measure how a perturbed model behaves, and find the operations that lose accuracy.

The modules use compiled models through their public interface and change no graph. Results are data (``to_dict``,
``to_json``, ``to_pandas``), from which text, HTML and plots are made. A module imports an optional package only when
a function needs it, so that ``import fxround`` stays fast. Example::

    fxround.variability(model, inputs).check(min_bits=10)
"""

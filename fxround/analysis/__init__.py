"""Analysis: what a perturbed model tells, as data first.

What is true here. Every module reads compiled models through their public interface; nothing changes a graph. Results
are data (``to_dict``, ``to_json``, ``to_pandas``); text, HTML and plots come second. What needs an optional package
imports it when asked, so that importing ``fxround`` stays quick.

    before   a loop over seeds, and np.std
    after    fxround.variability(model, inputs).check(min_bits=10)
"""

"""Studies of pretrained models that Python packages ship: a question, a table and a figure each (docs/gallery).

``python -m benchmarks.gallery NAME`` runs one, ``--write`` stores what it says. The studies are notebooks in the
percent format, which Visual Studio Code, PyCharm and Jupyter with jupytext open as cells; each leaves ``columns`` and
``rows``, and its first cell says what to install. Nothing else in the project needs their packages.
"""

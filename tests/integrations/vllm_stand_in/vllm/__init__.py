"""Stands in for vLLM in the tests of the drop-in: the modules, names and signatures that it looks for, made small.

The pool keeps lists and dicts and follows the rules that vLLM's pool follows, so that the self-test has something to
compare with. Tests copy this tree to where they need it and change the copy.
"""

__version__ = "0.33.0+cpu"

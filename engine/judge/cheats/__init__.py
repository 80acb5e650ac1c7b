"""Candidates that the judge must refuse, and honest ones that it must accept: the judge's self-test.

Every one is a backend that the judge loads like any source candidate ("file.py:class", called with deployment, plan
and threads) and that does in a real child process what its docstring says. `registry.py` says what each must get.
"""

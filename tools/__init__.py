"""Developers' programs: the GPU record, checkers, fuzzer, mutation run, compile record, studies.

Nothing here is installed. Run each with ``python -m tools.<name>`` in the root of a checkout.
"""

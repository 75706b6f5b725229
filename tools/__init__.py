"""What only developers run: the GPU record, checkers, mutation run and compile record.

Nothing here is installed. Run each with ``python -m tools.<name>`` in the root of a checkout.
"""

"""Benchmarks: suites as data files, one driver, one record per measurement, reports from records.

``suites`` says what to measure, ``driver`` runs it in worker processes, ``record`` is the schema
of what comes out, ``analysis`` turns records into ratios, ``compare`` and ``report`` read them.
"""

from __future__ import annotations

from sparsetile.bench.record import SCHEMA, Record, read_records

__all__ = ["SCHEMA", "Record", "read_records"]

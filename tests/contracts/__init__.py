"""Suites that every reorderer, format, balancer, kernel and system passes by being registered."""

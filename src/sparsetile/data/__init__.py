"""Matrices to work on: generators, stand-ins for published graphs, downloads, folders."""
